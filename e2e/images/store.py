"""The seed store: one containerd root that holds every image, imported and unpacked once, and is cloned into each node by hard links.

The runtime image takes 9 GB on a node. Cloned, a second node costs a second and no disk, and all nodes share the page cache of PyTorch's libraries. That is
safe because containerd never writes into an unpacked layer or a blob; its databases, which it does write, are copied. Removing a node's files leaves the seed whole.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.images.builder import Builder, BuildError, run, say
from e2e.images.layout import Layout, blob_path

NAMESPACE = "k8s.io"
CONTENT = "io.containerd.content.v1.content"
OVERLAYFS = "io.containerd.snapshotter.v1.overlayfs"
SNAPSHOTS = f"{OVERLAYFS}/snapshots"
LARGE_FILES = 2000
"""A layer with more files is shared by a symbolic link. Such layers (base, packages) leave the seed only when their lock file changes."""
START_S = 20.0
CONFIG = """\
version = 3
root = "{root}"
state = "{state}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.nri.v1.nri",
  "io.containerd.podsandbox.controller.v1.podsandbox", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{state}/c.sock"
[ttrpc]
  address = "{state}/t.sock"
"""


class ImageStore:
    """Owns the folder of the seed; one process writes to it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> ImageStore:
        """In the cache, beside the cluster's programs."""
        cache = Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache" / "stoker")
        return cls(cache / "images")

    @property
    def root(self) -> Path:
        """As containerd's configuration names it."""
        return self.folder / "root"

    def names(self) -> list[str]:
        """The images in the seed."""
        return sorted(self._loaded())

    def load(self, images: Sequence[str], builder: Builder, bin_folder: Path) -> list[str]:
        """Brings images that were built into the seed, as far as it does not have them: only missing layers move.

        Args:
            images: names with tags.
            builder: has them.
            bin_folder: with containerd and ctr.

        Returns: the names that were new or had changed.

        Raises:
            BuildError: an image cannot be read or imported.
        """
        with self._locked(fcntl.LOCK_EX):
            loaded = self._loaded()
            wanted = {name: builder.id(name) for name in images}
            stale = [name for name in images if loaded.get(name) != wanted[name]]
            if stale:
                with self._containerd(bin_folder) as address:
                    for name in stale:
                        self._import(name, builder, bin_folder, address)
                        self._remember({**self._loaded(), name: wanted[name]})
                    _collect_garbage(bin_folder, address)
                Layout(self.folder / "layout").prune()
            return stale

    def clone_to(self, root: Path) -> None:
        """Makes a node's containerd root with every image of the seed. Must be on the seed's file system.

        Raises:
            FileExistsError: the node has a store already.
        """
        if root.exists() and any(root.iterdir()):
            raise FileExistsError(f"{root} is not empty: a node's store is cloned before its containerd starts")
        with self._locked(fcntl.LOCK_SH):
            if not self.root.exists():
                return
            self._clone(root)

    def _clone(self, root: Path) -> None:
        """Files as hard links, databases as copies; a layer with thousands of files is one symbolic link, which is made and removed at once."""
        layers = [layer for layer in (self.root / SNAPSHOTS).iterdir() if layer.is_dir()]
        large = {layer.name for layer in layers if _is_large(layer)}
        (root / SNAPSHOTS).mkdir(parents=True, exist_ok=True)
        small = [str(layer) for layer in layers if layer.name not in large]
        others = [str(part) for part in self.root.iterdir() if part.name != OVERLAYFS]
        for parts, target in ((others, root), (small, root / SNAPSHOTS)):
            if parts:
                run(["cp", "--archive", "--link", f"--target-directory={target}", *parts], what=str(root))
        for name in large:
            (root / SNAPSHOTS / name).symlink_to(self.root / SNAPSHOTS / name)
        for database in self.root.glob("*/*.db"):
            copy = root / database.relative_to(self.root)
            copy.unlink(missing_ok=True)
            shutil.copy2(database, copy)

    def _import(self, name: str, builder: Builder, bin_folder: Path, address: str) -> None:
        start = time.monotonic()
        layout = Layout(self.folder / "layout")
        ref = name.rpartition("/")[2].replace(":", "-")
        # Layers stay uncompressed: packing and unpacking them took most of the time, and only so are they recognised in the layout.
        run(
            [
                "skopeo",
                "copy",
                "--quiet",
                "--dest-oci-accept-uncompressed-layers",
                builder.reference(name),
                f"oci:{layout.folder}:{ref}",
            ],
            what=name,
        )
        descriptor = layout.manifest(ref)
        digests = layout.digests(descriptor)
        missing = [digest for digest in digests if not blob_path(self.root / CONTENT, digest).exists()]
        command = [str(bin_folder / "ctr"), "--address", address, "--namespace", NAMESPACE, "images", "import", "-"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            layout.write(process.stdin, name, descriptor, missing)
            process.stdin.close()
            output = process.stdout.read().decode()
        if process.returncode:
            raise BuildError(f"{name}: ctr images import ended with {process.returncode}:\n{output[-2000:]}")
        self._share(layout, digests)
        size = sum(layout.blob(digest).stat().st_size for digest in missing)
        say(f"{name} imported in {time.monotonic() - start:.0f} s, {size / 1e6:.0f} MB of it new")

    def _share(self, layout: Layout, digests: Sequence[str]) -> None:
        """The layout keeps its blobs, which tell the next push what is there, as links to the content store's: one copy on disk."""
        for digest in digests:
            kept, blob = blob_path(self.root / CONTENT, digest), layout.blob(digest)
            if kept.exists() and not kept.samefile(blob):
                blob.unlink()
                os.link(kept, blob)

    @contextmanager
    def _containerd(self, bin_folder: Path) -> Iterator[str]:
        """A containerd on the seed for as long as images are imported; gives its address."""
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="stoker-images-") as state:
            config = Path(state) / "config.toml"
            config.write_text(CONFIG.format(root=self.root, state=state))
            with (Path(state) / "log").open("wb") as log:
                process = subprocess.Popen(
                    [str(bin_folder / "containerd"), "--config", str(config)], stdout=log, stderr=log
                )
            try:
                _wait_for(Path(state) / "c.sock", process, Path(state) / "log")
                yield f"{state}/c.sock"
            finally:
                process.terminate()
                process.wait()

    def _loaded(self) -> dict[str, str]:
        """Name of an image in the seed -> its id in buildah's store when it was imported."""
        index = self.folder / "images.json"
        return dict(json.loads(index.read_text())) if index.exists() else {}

    def _remember(self, loaded: dict[str, str]) -> None:
        draft = self.folder / "images.json.draft"
        draft.write_text(json.dumps(loaded, indent=1, sort_keys=True))
        draft.replace(self.folder / "images.json")

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, mode)
            yield


def _collect_garbage(bin_folder: Path, address: str) -> None:
    """Layers of images that were replaced go now: deleting a lease is how containerd is told to."""
    ctr = [str(bin_folder / "ctr"), "--address", address, "--namespace", NAMESPACE, "leases"]
    lease = run([*ctr, "create"], what="a lease of the image store")
    run([*ctr, "delete", "--sync", lease], what="garbage of the image store")


def _is_large(layer: Path) -> bool:
    files = (name for _, _, names in os.walk(layer) for name in names)
    return next(itertools.islice(files, LARGE_FILES, None), None) is not None


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BuildError(f"containerd did not start on the image store:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
