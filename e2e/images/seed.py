"""A containerd on the seed store that runs while images are imported.

A layer is written once, as its archive streams from the builder. Its unpacked files exist already in the builder's
store and become a snapshot by hard links.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.images.builder import Builder
from e2e.images.built import BuiltImage, chain_ids, digest_of
from e2e.images.commands import BuildError, run

NAMESPACE = "k8s.io"
OVERLAYFS = "io.containerd.snapshotter.v1.overlayfs"
SNAPSHOTS = f"{OVERLAYFS}/snapshots"
COLLECTABLE = "containerd.io/gc.root="
"""The label that `ctr` gives each snapshot it makes, taken off: from then on the image alone holds it."""
START_S = 120.0
CONFIG = """\
version = 3
root = "{root}"
state = "{state}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.nri.v1.nri",
  "io.containerd.podsandbox.controller.v1.podsandbox", "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{state}/c.sock"
[ttrpc]
  address = "{state}/t.sock"
# Garbage goes when it is asked to: half an image is not garbage yet.
[plugins."io.containerd.gc.v1.scheduler"]
  startup_delay = "0s"
  mutation_threshold = 0
  deletion_threshold = 1000000000
"""


class Seed:
    """The running containerd; `running` creates it."""

    def __init__(self, ctr: Sequence[str]) -> None:
        self.ctr = ctr

    @classmethod
    @contextmanager
    def running(cls, root: Path, bin_folder: Path) -> Iterator[Seed]:
        """Run containerd while the context is entered.

        Args:
            root: containerd's root folder.
            bin_folder: the folder with containerd and ctr.

        Raises:
            BuildError: it does not start.
        """
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="stoker-images-") as state:
            config, log = Path(state) / "config.toml", Path(state) / "log"
            config.write_text(CONFIG.format(root=root, state=state))
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [str(bin_folder / "containerd"), "--config", str(config)], stdout=file, stderr=file
                )
            try:
                _wait_for(Path(state) / "c.sock", process, log)
                yield cls([str(bin_folder / "ctr"), f"--address={state}/c.sock", f"--namespace={NAMESPACE}"])
            finally:
                process.terminate()
                process.wait()

    def take(self, image: BuiltImage, builder: Builder) -> int:
        """Import the missing layers of an image and name it; return the number of new bytes.

        Raises:
            BuildError: the builder lacks a layer, or containerd refuses one.
        """
        new_bytes = self._take_blobs(image, builder)
        self._take_layers(image.diff_ids, builder)
        self._run("images", "import", "-", data=image.archive())
        return new_bytes

    def collect_garbage(self) -> None:
        """Remove the content of replaced images; deleting a lease makes containerd collect garbage."""
        lease = self._run("leases", "create")
        self._run("leases", "delete", "--sync", lease)

    def _take_blobs(self, image: BuiltImage, builder: Builder) -> int:
        known = set(self._run("content", "ls", "--quiet").split())
        new_layers = [(digest, size) for digest, size in image.layers if digest not in known]
        for digest, size in new_layers:
            with builder.archive(digest) as stream:
                self._run(*_ingest(digest, size), stdin=stream)
        for document in (image.config, image.manifest):
            self._run(*_ingest(digest_of(document), len(document)), data=document)
        return sum(size for _, size in new_layers)

    def _take_layers(self, diff_ids: Sequence[str], builder: Builder) -> None:
        parent = ""
        for diff_id, chain_id in zip(diff_ids, chain_ids(diff_ids), strict=True):
            if not self._run("snapshots", "info", chain_id, check=False):
                self._take_layer(builder.files(diff_id), chain_id, parent)
            parent = chain_id

    def _take_layer(self, files: Path, name: str, parent: str) -> None:
        draft = f"draft-{name}"
        self._run("snapshots", "remove", draft, check=False)
        (mount,) = json.loads(self._run("snapshots", "prepare", "--mounts", draft, *filter(None, [parent])))
        upper = [option.partition("=")[2] for option in mount["Options"] if option.startswith("upperdir=")]
        target = upper[0] if upper else mount["Source"]
        run(["cp", "--archive", "--link", f"{files}/.", target], what=name)
        self._run("snapshots", "commit", name, draft)
        self._run("snapshots", "label", name, COLLECTABLE)

    def _run(self, *arguments: str, check: bool = True, **standard_input: Any) -> str:
        return run([*self.ctr, *arguments], what=f"image store: {' '.join(arguments)}", check=check, **standard_input)


def _ingest(digest: str, size: int) -> list[str]:
    return ["content", "ingest", f"--expected-size={size}", f"--expected-digest={digest}", digest]


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BuildError(f"containerd did not start on the image store:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
