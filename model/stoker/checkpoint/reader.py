"""Reading any part of any tensor, from the pieces that hold it.

Each piece is read whole and verified before a byte of it is returned. The reader depends neither on the layout that
wrote the checkpoint nor on the one that reads it.

Read-only. Called by verification, comparison, export, the model's loader and a trainer that resumes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from stoker.checkpoint.box import Box, address, slabs
from stoker.checkpoint.cover import check_tensor, pieces_by_tensor
from stoker.checkpoint.dtype import Array, carrier
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from stoker.checkpoint.hashing import hash_bytes
from stoker.checkpoint.manifest import MANIFEST_FILE, FileEntry, Manifest, Piece, TensorInfo
from stoker.checkpoint.manifest_file import read_manifest, read_whole
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Storage


class CheckpointReader:
    """One checkpoint folder, open for reading. Never changes anything; several threads may share it.

    As long as it lives, or until `close`, retention leaves the folder alone.
    """

    def __init__(self, folder: Path, digest: str | None = None, *, storage: Storage | None = None) -> None:
        """Read the manifest and check that every data file has its exact size.

        Raises:
            CheckpointMissing: no folder or no manifest.
            CheckpointCorrupt: the manifest is not valid, not the one with `digest`, or a file is missing, cut or grown.
        """
        self.folder = Path(folder)
        self.storage = storage or storage_of(self.folder)
        self._lock = self.storage.lock_shared(self.folder / MANIFEST_FILE)
        self.manifest: Manifest = read_manifest(self.folder, self.storage, digest)
        for name, size in self.manifest.file_sizes().items():
            check_size(self.storage, self.folder / name, size)
        self._pieces = pieces_by_tensor(self.manifest)
        self._indexes: dict[str, _Index] = {}
        self._last: tuple[Piece, Array] | None = None

    def close(self) -> None:
        """Unlock the folder for retention; later reads may find it gone."""
        if self._lock is not None:
            self._lock.close()

    def tensor(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor.

        Raises:
            CheckpointMissing: there is none of that name.
        """
        info = self.manifest.tensors.get(name)
        if info is None:
            raise CheckpointMissing(f"{self.folder}: no tensor {name!r}")
        return info

    def read(
        self,
        tensor: str,
        box: Box | None = None,
        flat: tuple[int, int] | None = None,
        out: memoryview | Array | None = None,
    ) -> Array:
        """Return a part of a tensor: all of it, a box, or a flat range inside a box (row by row).

        Returns an array of the box's size, or a 1-D array when `flat` is given; bfloat16 and float8 as unsigned
        integers of their size. With `out` (writable, contiguous, exactly as many bytes) the elements go there and the
        result is a view of it; when an error is raised `out` may hold anything.

        Raises:
            CheckpointMissing: no such tensor.
            CheckpointCorrupt: a piece does not match its hash (the message names it), or the pieces leave a gap or
                overlap.
        """
        info = self.tensor(tensor)
        box = Box.whole(info.shape) if box is None else box
        if not box.inside(info.shape):
            raise CheckpointError(f"tensor {tensor}: box {box} leaves the shape {info.shape}")
        first, end = (0, box.volume) if flat is None else flat
        if not 0 <= first <= end <= box.volume:
            raise CheckpointError(f"tensor {tensor}: flat range {flat} must lie in 0..{box.volume}")
        index = self._index(info)
        values = _target(info, end - first, out)
        if end > first:
            for piece in index.find(box, first, end):
                self._copy(piece, box, first, end, values)
        return values if flat is not None else values.reshape(box.size)

    def check_cover(self, tensor: str) -> None:
        """Refuse a tensor whose pieces leave a gap or overlap; `read` asks this by itself."""
        self._index(self.tensor(tensor))

    def read_piece(self, piece: Piece) -> Array:
        """Return the verified elements of one piece, 1-D. The array must not be written to."""
        last = self._last
        if last is not None and last[0] is piece:
            return last[1]
        elements = np.empty(piece.flat_end - piece.flat_start, carrier(piece.dtype))
        self._fill(piece, elements)
        self._last = (piece, elements)
        return elements

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a file that travels along, verified.

        Raises:
            CheckpointMissing: the manifest lists none of that name.
            CheckpointCorrupt: its bytes are not those that were written.
        """
        for entry in self.manifest.files:
            if entry.name == name:
                return self._file_bytes(entry)
        raise CheckpointMissing(f"{self.folder}: no file {name!r}")

    def _file_bytes(self, entry: FileEntry) -> bytes:
        data = read_whole(self.storage, self.folder / entry.name, entry.bytes)
        if len(data) != entry.bytes or blake3(data).hexdigest() != entry.blake3:
            raise CheckpointCorrupt(f"{self.folder}: file {entry.name} is not what was written")
        return data

    def _index(self, info: TensorInfo) -> _Index:
        """Return a tensor's index, built at its first read, after the proof that its pieces cover it exactly."""
        index = self._indexes.get(info.name)
        if index is None:
            pieces = self._pieces.get(info.name, [])
            check_tensor(info, pieces)
            index = self._indexes[info.name] = _Index(info.shape, pieces)
        return index

    def _copy(self, piece: Piece, box: Box, first: int, end: int, values: Array) -> None:
        """Put what `piece` holds of `box[first:end]` where it belongs in `values`."""
        shift = _same_rows(piece.box, box)
        if shift is not None:
            start, stop = piece.flat_start + shift, piece.flat_end + shift
            if first <= start and stop <= end:
                self._fill(piece, values[start - first : stop - first])
                return
        for held_box, held in self._held(piece, box, first, end):
            position = 0
            for wanted_box in slabs(box, first, end):
                wanted = values[position : position + wanted_box.volume].reshape(wanted_box.size)
                position += wanted_box.volume
                shared = held_box.intersect(wanted_box)
                if shared is not None:
                    wanted[shared.slices_in(wanted_box)] = held[shared.slices_in(held_box)]

    def _held(self, piece: Piece, box: Box, first: int, end: int) -> list[tuple[Box, Array]]:
        """Return the rectangles of a piece with their elements.

        Empty, with nothing read, when none meets the wanted ones.
        """
        held_boxes = slabs(piece.box, piece.flat_start, piece.flat_end)
        wanted_boxes = slabs(box, first, end)
        if not any(held.intersect(wanted) for held in held_boxes for wanted in wanted_boxes):
            return []
        elements = self.read_piece(piece)
        ends = list(accumulate(held.volume for held in held_boxes))
        return [
            (held, elements[last - held.volume : last].reshape(held.size))
            for held, last in zip(held_boxes, ends, strict=True)
        ]

    def _fill(self, piece: Piece, elements: Array) -> None:
        view = elements.data.cast("B")
        if self.storage.read(self.folder / piece.file, piece.offset, view) != piece.bytes:
            raise CheckpointCorrupt(f"{self.folder}: {piece} ends early")
        digest = hash_bytes(view)
        if digest != piece.blake3:
            raise CheckpointCorrupt(f"{self.folder}: {piece} is damaged: blake3 {digest}, {piece.blake3} was written")


class _Index:
    """The pieces of one tensor by the span of row-major addresses that each touches: a read looks only at its
    neighbours.
    """

    def __init__(self, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        self._shape = shape
        spans = [(*_span(shape, piece.box, piece.flat_start, piece.flat_end), piece) for piece in pieces]
        spans.sort(key=lambda span: span[:2])
        self._pieces = [piece for _, _, piece in spans]
        self._starts = [start for start, _, _ in spans]
        self._reach = list(accumulate((end for _, end, _ in spans), max))

    def find(self, box: Box, first: int, end: int) -> list[Piece]:
        """Return every piece that may hold an element of the non-empty range `box[first:end]`."""
        low, high = _span(self._shape, box, first, end)
        return self._pieces[bisect_right(self._reach, low) : bisect_left(self._starts, high)]


def check_size(storage: Storage, path: Path, size: int) -> None:
    """Refuse a file that is missing, cut or grown."""
    try:
        found = storage.size(path)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing") from error
    if found != size:
        raise CheckpointCorrupt(f"{path} has {found} bytes, the manifest says {size}")


def _span(shape: tuple[int, ...], box: Box, first: int, end: int) -> tuple[int, int]:
    """Addresses from the first to behind the last element; both orders are row-major, so no element lies outside."""
    return address(shape, box.index_of(first)), address(shape, box.index_of(end - 1)) + 1


def _same_rows(piece: Box, wanted: Box) -> int | None:
    """Return how far flat positions in `piece` shift in `wanted`, or None.

    There is a shift when both have the same extent in all dims but the first.
    """
    if piece.start[1:] != wanted.start[1:] or piece.size[1:] != wanted.size[1:]:
        return None
    if not piece.size:
        return 0
    return (piece.start[0] - wanted.start[0]) * (piece.volume // piece.size[0])


def _target(info: TensorInfo, elements: int, out: memoryview | Array | None) -> Array:
    dtype: np.dtype[Any] = carrier(info.dtype)
    if out is None:
        return np.empty(elements, dtype)
    view = out.data if isinstance(out, np.ndarray) else out
    if view.readonly or not view.c_contiguous or view.nbytes != elements * dtype.itemsize:
        raise CheckpointError(
            f"tensor {info.name}: out must be writable, contiguous and {elements * dtype.itemsize} bytes, got "
            f"{view.nbytes}"
        )
    return np.frombuffer(view.cast("B") if view.nbytes else b"", dtype)
