"""The layout of a state folder. Names are short: the path of a Unix socket below a pod's folder has 107 bytes.

Creates the state folder and its `pods` folder; the callers create the rest. Values otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.operator.domain.plan import Object


@dataclass(frozen=True)
class StateFolders:
    """Everything of one embedded cluster, below `root` (mode 0700)."""

    root: Path
    pods: Path | None = None
    """A short link to `root/pods`, if the folder's own path is long."""

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def claims(self) -> Path:
        """Data of claims without a folder of their own."""
        return self.root / "claims"

    @property
    def models(self) -> Path:
        """Models that pods have fetched: this machine is the one node."""
        return self.root / "models"

    @property
    def socket(self) -> Path:
        return self.root / "supervisor.sock"

    @property
    def lock(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.root / "supervisor.log"

    @property
    def addresses(self) -> Path:
        return self.root / "addresses.json"

    @property
    def control_key(self) -> Path:
        return self.root / "control-key.pem"

    def pod(self, pod: Object) -> Path:
        """Volumes, scratch and termination log of one pod; deleted with it."""
        return (self.pods or self.root / "pods") / str(pod["metadata"]["uid"])[:13]

    def log(self, namespace: str, pod: str) -> Path:
        """The pod's log; kept until another pod of the same name starts."""
        return self.root / "logs" / namespace / f"{pod}.log"

    def make(self) -> None:
        for folder in (self.root / "pods", self.models):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)


LONGEST_ROOT_BYTES = 45


@contextlib.contextmanager
def short_folders(root: Path) -> Iterator[StateFolders]:
    """The folders of `root`. A long path gets a short link in the folder for temporary files, until the `with` ends."""
    if len(os.fsencode(root)) <= LONGEST_ROOT_BYTES:
        yield StateFolders(root)
        return
    name = hashlib.sha256(f"{os.getuid()}:{root}".encode()).hexdigest()[:10]
    link = Path(tempfile.gettempdir()) / f"stoker-{name}"
    link.unlink(missing_ok=True)  # left by a killed supervisor; a file of another user is an error here
    link.symlink_to(root / "pods")
    try:
        yield StateFolders(root, link)
    finally:
        link.unlink(missing_ok=True)


def default_state_folder() -> Path:
    """`$STOKER_STATE`, else `stoker` below `$XDG_STATE_HOME` or `~/.local/state`."""
    chosen = os.environ.get("STOKER_STATE")
    base = os.environ.get("XDG_STATE_HOME")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".local" / "state") / "stoker"
