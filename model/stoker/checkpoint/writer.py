"""Writing: one `PieceWriter` for each rank and save, and the small files that travel along.

Nothing here is visible to a reader until `CheckpointRoot.publish` has run.

Called by the trainer's saver: each rank writes its own pieces, and no two write the same file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from blake3 import blake3

from stoker.checkpoint.box import Box
from stoker.checkpoint.dtype import Array, item_bytes
from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.hashing import PARALLEL_BYTES, hash_bytes
from stoker.checkpoint.manifest import PIECE_BYTES, FileEntry, Piece, TensorInfo, check_file_name
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Sink, Storage

Buffer = memoryview | bytes | bytearray | Array


class PieceWriter:
    """Streams a rank's shards into one data file, hashing while it writes. Not for several threads at once.

    The file is made at the first piece, so a rank that owns nothing leaves no file. A write that fails (full disk)
    spoils the writer: every later call is refused, so a save can never be reported without its bytes.
    """

    def __init__(
        self, folder: Path, file: str, *, storage: Storage | None = None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        check_file_name(file)
        if not 0 < piece_bytes <= PIECE_BYTES:
            raise CheckpointError(f"piece_bytes must be 1 to {PIECE_BYTES}, got {piece_bytes}")
        self.folder = Path(folder)
        self.file = file
        self._storage = storage or storage_of(self.folder)
        self._piece_bytes = piece_bytes
        self._pieces: list[Piece] = []
        self._offset = 0
        self._sink: Sink | None = None
        self._hasher: ThreadPoolExecutor | None = None
        self._usable = True

    def add(self, tensor: TensorInfo, box: Box, flat: tuple[int, int], data: Buffer) -> None:
        """Write the elements `box[flat[0]:flat[1]]` of `tensor`.

        `data` holds exactly those elements, raw and little-endian, in one contiguous buffer; it may change again when
        the call returns. An empty range writes nothing.

        Raises:
            CheckpointError: box, range and buffer do not fit each other.
            OSError: the bytes could not be written.
        """
        view = self._checked(tensor, box, flat, data)
        item = item_bytes(tensor.dtype)
        stride = max(self._piece_bytes // item, 1)
        for start in range(flat[0], flat[1], stride):
            end = min(start + stride, flat[1])
            part = view[(start - flat[0]) * item : (end - flat[0]) * item]
            digest = self._write(part)
            self._pieces.append(
                Piece(tensor.name, box, start, end, tensor.dtype, self.file, self._offset, len(part), digest)
            )
            self._offset += len(part)

    def close(self) -> list[Piece]:
        """Make the file durable and return what it holds.

        Raises:
            OSError: the bytes could not be made durable.
        """
        self._check_usable()
        self._usable = False
        try:
            if self._sink is not None:
                self._sink.sync()
        finally:
            self._release()
        return list(self._pieces)

    def abort(self) -> None:
        """Give the save up; the file stays behind, unlisted, in the staging folder."""
        self._usable = False
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _checked(self, tensor: TensorInfo, box: Box, flat: tuple[int, int], data: Buffer) -> memoryview:
        self._check_usable()
        if not box.inside(tensor.shape):
            raise CheckpointError(f"tensor {tensor.name}: box {box} leaves the shape {tensor.shape}")
        if not 0 <= flat[0] <= flat[1] <= box.volume:
            raise CheckpointError(f"tensor {tensor.name}: flat range {flat} must lie in 0..{box.volume}")
        expected = (flat[1] - flat[0]) * item_bytes(tensor.dtype)
        view = raw_bytes(data, tensor.name)
        if len(view) != expected:
            raise CheckpointError(
                f"tensor {tensor.name}: {len(view)} bytes given, {flat[1] - flat[0]} elements of {tensor.dtype} take "
                f"{expected}"
            )
        return view

    def _check_usable(self) -> None:
        if not self._usable:
            raise CheckpointError(f"{self.folder / self.file}: the writer is closed or a write failed")

    def _write(self, part: memoryview) -> str:
        """Hash and write at the same time."""
        try:
            if self._sink is None:
                self._sink = self._storage.create(self.folder / self.file)
            if len(part) < PARALLEL_BYTES:
                self._sink.write(part)
                return hash_bytes(part)
            if self._hasher is None:
                self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")
            digest = self._hasher.submit(hash_bytes, part)
            try:
                self._sink.write(part)
            finally:
                hexadecimal = digest.result()  # the caller may change `part` from now on
        except BaseException:
            self.abort()
            raise
        return hexadecimal

    def _release(self) -> None:
        sink, self._sink = self._sink, None
        hasher, self._hasher = self._hasher, None
        if hasher is not None:
            hasher.shutdown()
        if sink is not None:
            sink.close()


def write_file(folder: Path, name: str, data: bytes, *, storage: Storage | None = None) -> FileEntry:
    """Write a small file that travels along, durably."""
    check_file_name(name)
    sink = (storage or storage_of(Path(folder))).create(Path(folder) / name)
    try:
        sink.write(memoryview(data))
        sink.sync()
    finally:
        sink.close()
    return FileEntry(name, len(data), blake3(data).hexdigest())


def raw_bytes(data: Buffer, name: str) -> memoryview:
    """The buffer as flat bytes, without a copy."""
    try:
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, BufferError, ValueError) as error:
        raise CheckpointError(f"tensor {name}: one contiguous buffer is needed: {error}") from error
