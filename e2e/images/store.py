"""The seed store: one containerd root with every image, cloned into each node by hard links.

The images take 13 GB on a node. Cloned, a second node costs a second and no disk, and all nodes share the page cache of
PyTorch's libraries. That is safe because containerd never writes into an unpacked layer or a blob; its databases, which
it does write, are copied. Removing a node's files leaves the seed whole.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.images.builder import Builder
from e2e.images.commands import run, say
from e2e.images.seed import OVERLAYFS, SNAPSHOTS, Seed

LARGE_FILES = 2000
"""A layer with more files is shared by a symbolic link.

Such layers (base, packages) leave the seed only when their lock file changes.
"""


class ImageStore:
    """Owns the folder of the seed; one process writes to it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> ImageStore:
        """Return the store in the cache, beside the cluster's programs."""
        cache = Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache" / "stoker")
        return cls(cache / "images")

    @property
    def root(self) -> Path:
        """The root for containerd's configuration."""
        return self.folder / "root"

    def names(self) -> list[str]:
        """Return the names of the images in the seed."""
        return sorted(self._loaded())

    def load(self, images: Sequence[str], builder: Builder, bin_folder: Path) -> list[str]:
        """Import built images into the seed; only missing layers are copied.

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
                with Seed.running(self.root, bin_folder) as seed:
                    for name in stale:
                        self._import(name, builder, seed)
                        self._remember({**self._loaded(), name: wanted[name]})
                    seed.collect_garbage()
            return stale

    def _import(self, name: str, builder: Builder, seed: Seed) -> None:
        start = time.monotonic()
        new_bytes = seed.take(builder.image(name), builder)
        say(f"{name} imported in {time.monotonic() - start:.0f} s, {new_bytes / 1e6:.0f} MB of it new")

    def clone_to(self, root: Path) -> None:
        """Clone the seed into a node's containerd root, which must be on the same file system.

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
        """Copy databases and link files.

        A layer with thousands of files becomes one symbolic link, which is quick to make and to remove.
        """
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

    def _loaded(self) -> dict[str, str]:
        """Return the id in buildah's store of each image at its import, by name."""
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


def _is_large(layer: Path) -> bool:
    files = (name for _, _, names in os.walk(layer) for name in names)
    return next(itertools.islice(files, LARGE_FILES, None), None) is not None
