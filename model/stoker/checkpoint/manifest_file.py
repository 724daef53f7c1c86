"""The manifest in a folder: read and checked, and locked while the checkpoint is being read."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointMissing
from stoker.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, parse_folder_name
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Storage

LATEST_FILE = "LATEST"
"""In a checkpoint root from the first save on: the name of the newest."""


@contextmanager
def being_read(folder: Path, storage: Storage | None = None) -> Iterator[None]:
    """Lock a checkpoint for reading, so that retention leaves it alone. Any other folder or file is let through."""
    lock = (storage or storage_of(folder)).lock_shared(folder / MANIFEST_FILE)
    with lock or nullcontext():
        yield


def read_manifest(folder: Path, storage: Storage, digest: str | None = None) -> Manifest:
    """Return the checked manifest of a folder.

    Raises:
        CheckpointMissing: no folder or no manifest.
        CheckpointCorrupt: not valid, or its digest is not `digest`.
        FileNotFoundError: there is no checkpoint with `digest`, and its root has no sign of any save.
    """
    try:
        text = read_whole(storage, folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        if digest is not None and parse_folder_name(folder.name) and not has_saves(folder.parent, storage):
            raise _no_saves(folder) from error
        raise CheckpointMissing(f"{folder}: no {MANIFEST_FILE}, so not a committed checkpoint") from error
    try:
        manifest = Manifest.from_json(text)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{folder}: {error}") from error
    if digest is not None and manifest.digest != digest:
        raise CheckpointCorrupt(f"{folder}: the manifest's digest is {manifest.digest}, {digest} is wanted")
    return manifest


def has_saves(root: Path, storage: Storage) -> bool:
    """Whether a checkpoint root has any sign of a save. An empty volume has none, and neither has most others."""
    try:
        storage.size(root / LATEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return any(map(parse_folder_name, _folders(root, storage)))
    return True


def _folders(root: Path, storage: Storage) -> list[str]:
    try:
        return storage.folders(root)
    except NotADirectoryError:
        return []


def _no_saves(folder: Path) -> FileNotFoundError:
    """Return the error of a storage to which the save was not written: where it was, it may be as good as ever."""
    text = f"no sign of any save, but {folder.name} was written: the storage is empty or another one"
    return FileNotFoundError(errno.ENOENT, text, str(folder.parent))


def read_whole(storage: Storage, path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a small file."""
    size = storage.size(path)
    if size > max_bytes:
        raise CheckpointCorrupt(f"{path} has {size} bytes, {max_bytes} are allowed")
    data = bytearray(size)
    return bytes(data[: storage.read(path, 0, memoryview(data))])
