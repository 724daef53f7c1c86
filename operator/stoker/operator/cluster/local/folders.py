"""What lies where in a state folder. Names are short: Unix sockets below a pod's folder have 107 bytes for their path."""

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
    """A short way to `root/pods`, where the folder's own path is long."""

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def claims(self) -> Path:
        """Data of claims that stand for no folder of the user."""
        return self.root / "claims"

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
        """Volumes, scratch and termination log of one pod; goes with it."""
        return (self.pods or self.root / "pods") / str(pod["metadata"]["uid"])[:13]

    def log(self, namespace: str, pod: str) -> Path:
        """Kept after the pod, until a namesake starts."""
        return self.root / "logs" / namespace / f"{pod}.log"

    def make(self) -> None:
        (self.root / "pods").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)


LONGEST_ROOT_BYTES = 45


@contextlib.contextmanager
def short_folders(root: Path) -> Iterator[StateFolders]:
    """The folders of `root`; a long path gets a short link in the system's folder for temporary files, for as long as the `with`."""
    if len(os.fsencode(root)) <= LONGEST_ROOT_BYTES:
        yield StateFolders(root)
        return
    name = hashlib.sha256(f"{os.getuid()}:{root}".encode()).hexdigest()[:10]
    link = Path(tempfile.gettempdir()) / f"stoker-{name}"
    link.unlink(missing_ok=True)  # left by a killed supervisor; somebody else's file is an error here
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
