"""Verification of a whole checkpoint: manifest, exact cover, every piece and every file.

Reads each byte once, in bounded memory.

Called by the command `verify`, by task pods, and by the trainer after a save and before a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.cover import cover_problems
from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.hashing import new_hasher
from stoker.checkpoint.manifest import MANIFEST_FILE, FileEntry, Manifest, Piece
from stoker.checkpoint.manifest_file import being_read, read_manifest
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.reader import check_size
from stoker.checkpoint.storage import Storage

CHUNK_BYTES = 16 * 2**20
READERS = 3
"""Pieces that are read and hashed at once."""
MAX_PROBLEMS = 100

OnProgress = Callable[[int, int], None]
"""Called with bytes verified so far and bytes in all."""


@dataclass(frozen=True)
class VerifyReport:
    """The result of verification. The facts are None when there is no valid manifest to take them from."""

    folder: str
    ok: bool
    problems: tuple[str, ...]
    step: int | None = None
    writer: str | None = None
    digest: str | None = None
    bytes: int | None = None
    tensors: int | None = None
    pieces: int | None = None
    unlisted: tuple[str, ...] = ()
    """Files of the folder that the manifest does not list; they are no proof of damage."""

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "ok": self.ok,
            "step": self.step,
            "writer": self.writer,
            "digest": self.digest,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "pieces": self.pieces,
            "problems": list(self.problems),
            "unlisted": list(self.unlisted),
        }


def verify(
    folder: Path,
    digest: str | None = None,
    *,
    progress: OnProgress | None = None,
    storage: Storage | None = None,
    share: tuple[int, int] = (0, 1),
    reads_data: bool = True,
) -> VerifyReport:
    """Check everything that can be checked. Never raises for a bad checkpoint, only for a failing disk (OSError).

    `ok` means: the manifest is valid (and the one with `digest`), each tensor is covered exactly once, each data file
    is exactly its pieces, and every byte has the hash that was recorded when it was written. `share` (i, n) reads only
    the i-th of n shares of the bytes: together n calls read all. Without `reads_data` no byte but the manifest's is
    read: every file must be there and have its size.
    """
    folder = Path(folder)
    storage = storage or storage_of(folder)
    with being_read(folder, storage):
        return _verify(folder, digest, progress, storage, share if reads_data else None)


def _verify(
    folder: Path, digest: str | None, progress: OnProgress | None, storage: Storage, share: tuple[int, int] | None
) -> VerifyReport:
    try:
        manifest = read_manifest(folder, storage, digest)
    except CheckpointError as error:
        return VerifyReport(str(folder), False, (str(error),))
    problems = cover_problems(manifest)
    checked = 0
    sizes = _size_problems(folder, manifest, storage)
    problems += sizes.values()
    for size, problem in _check_bytes(folder, manifest, storage, share, sizes.keys()) if share is not None else ():
        checked += size
        if progress is not None:
            progress(checked, manifest.bytes)
        if problem is not None:
            problems.append(problem)
    return _report(folder, manifest, problems, storage)


def _report(folder: Path, manifest: Manifest, problems: list[str], storage: Storage) -> VerifyReport:
    listed = manifest.file_sizes().keys() | {MANIFEST_FILE}
    shown = problems[:MAX_PROBLEMS]
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return VerifyReport(
        folder=str(folder),
        ok=not problems,
        problems=tuple(shown),
        step=manifest.step,
        writer=manifest.writer,
        digest=manifest.digest,
        bytes=manifest.bytes,
        tensors=len(manifest.tensors),
        pieces=len(manifest.pieces),
        unlisted=tuple(name for name in storage.names(folder) if name not in listed),
    )


def _size_problems(folder: Path, manifest: Manifest, storage: Storage) -> dict[str, str]:
    """The files that are missing or have another size, and what is wrong with each."""
    problems = {}
    for name, size in manifest.file_sizes().items():
        try:
            check_size(storage, folder / name, size)
        except CheckpointError as error:
            problems[name] = str(error)
    return problems


def _check_bytes(
    folder: Path, manifest: Manifest, storage: Storage, share: tuple[int, int], unusable: Collection[str]
) -> Iterator[tuple[int, str | None]]:
    """Yield the bytes checked and the problem found, for each piece and each travelling file that can be read."""
    pieces = share_of(manifest, *share)
    usable = [piece for piece in pieces if piece.file not in unusable]
    yield sum(piece.bytes for piece in pieces) - sum(piece.bytes for piece in usable), None
    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="verify") as readers:
        problems = readers.map(lambda piece: _piece_problem(folder, piece, storage), usable)
        yield from zip((piece.bytes for piece in usable), problems, strict=True)
    for entry in manifest.files if share[0] == 0 else ():
        yield entry.bytes, None if entry.name in unusable else _entry_problem(folder, entry, storage)


def share_of(manifest: Manifest, index: int, shares: int) -> list[Piece]:
    """Return whole data files where there are enough of them, else every n-th piece.

    Share i begins with the file behind the i-th, so that another rank reads what a rank wrote.

    Share i begins with the file behind the i-th: what a rank wrote is read by another one.
    """
    files = sorted({piece.file for piece in manifest.pieces})
    if len(files) < shares:
        return list(manifest.pieces[index::shares])
    mine = {file for place, file in enumerate(files) if (place - 1) % shares == index}
    return [piece for piece in manifest.pieces if piece.file in mine]


def _piece_problem(folder: Path, piece: Piece, storage: Storage) -> str | None:
    found = _hash(storage, folder / piece.file, piece.offset, piece.bytes)
    return None if found == piece.blake3 else f"{piece} is damaged: blake3 {found}, {piece.blake3} was written"


def _entry_problem(folder: Path, entry: FileEntry, storage: Storage) -> str | None:
    found = _hash(storage, folder / entry.name, 0, entry.bytes)
    return (
        None if found == entry.blake3 else f"file {entry.name} is damaged: blake3 {found}, {entry.blake3} was written"
    )


def _hash(storage: Storage, path: Path, offset: int, size: int) -> str:
    hasher = new_hasher(size)
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for start in range(0, size, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, size - start)]
        hasher.update(chunk[: storage.read(path, offset + start, chunk)])
    return hasher.hexdigest()
