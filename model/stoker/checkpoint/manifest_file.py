"""The manifest in a folder: read and checked, and locked while the checkpoint is being read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointMissing
from stoker.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Storage


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
    """
    try:
        text = read_whole(storage, folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointMissing(f"{folder}: no {MANIFEST_FILE}, so not a committed checkpoint") from error
    try:
        manifest = Manifest.from_json(text)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{folder}: {error}") from error
    if digest is not None and manifest.digest != digest:
        raise CheckpointCorrupt(f"{folder}: the manifest's digest is {manifest.digest}, {digest} is wanted")
    return manifest


def read_whole(storage: Storage, path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a small file."""
    size = storage.size(path)
    if size > max_bytes:
        raise CheckpointCorrupt(f"{path} has {size} bytes, {max_bytes} are allowed")
    data = bytearray(size)
    return bytes(data[: storage.read(path, 0, memoryview(data))])
