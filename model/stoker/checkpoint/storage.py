"""The interface to storage: the few operations that the format needs, and their POSIX form.

`bucket_storage` has their form for S3, `place` chooses by the path. Nothing above these modules opens a file.

Called by store, writer, reader and verify. Instances have no state: what changes is the file system.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.file_lock import ReadLock, exclusive, hold, shared

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

BLOCK_BYTES = 8 * 2**20
"""One write to the disk."""
BLOCKS = 4
"""Blocks of one file: one is being filled while the others are on their way."""

Block = mmap.mmap
"""Memory that begins at a page, as direct writes need it."""
Put = Callable[[int, memoryview, int], int]


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`; OSError with the path when the disk refuses."""

    def sync(self) -> None:
        """Return only when everything written so far is durable."""

    def close(self) -> None:
        """Release the file. Safe to call twice; does not make anything durable."""


class Storage(Protocol):
    """Files and folders of a checkpoint root.

    `has_locks`: whether `hold` and `lock_exclusive` keep others away.

    Failures are OSError; a file that is not a regular one is CheckpointCorrupt.
    """

    has_locks: bool

    def create(self, path: Path) -> Sink:
        """Create an empty file; refuse a name that exists."""

    def read(self, path: Path, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset`; returns the bytes read, fewer only at the end of the file."""

    def size(self, path: Path) -> int:
        """Bytes of a regular file."""

    def modified(self, path: Path) -> float:
        """Unix time of the last change, to order saves of one step."""

    def folders(self, folder: Path) -> list[str]:
        """Names of the folders inside, links excluded; empty when `folder` does not exist."""

    def names(self, folder: Path) -> list[str]:
        """Names of everything inside, sorted."""

    def make_folder(self, folder: Path) -> None:
        """Make it with its parents, durably; FileExistsError when it exists."""

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically. A file replaces a file; a folder replaces only an empty folder."""

    def sync_folder(self, folder: Path) -> None:
        """Return only when the entries of `folder` are durable."""

    def lock_shared(self, path: Path) -> ReadLock | None:
        """Lock a file for reading, until the lock is closed or its process ends. None where the file is not there."""

    def lock_exclusive(self, path: Path) -> AbstractContextManager[object]:
        """Take the only lock of a file; CheckpointInUse while another process or thread has one."""

    def hold(self, folder: Path) -> AbstractContextManager[object]:
        """Make a folder, and hold it until the context ends; CheckpointLocked while another process holds it."""

    def remove_file(self, path: Path) -> None:
        """Remove the name (a link, not its target); fine when it is gone."""

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; fine when it is gone."""


class PosixSink:
    """A file that is written in large aligned blocks past the page cache, several at once, by threads of its own.

    So a save neither piles up dirty pages until the kernel stops every writer of the machine, nor grows the page cache
    by its size, and `sync` at the end has little left to do. Where the file system refuses such writes, blocks go
    through the page cache and are pushed to the disk at once. What fills no block goes the ordinary way at `sync`. A
    failure of a block is kept and raised by the next call.
    """

    def __init__(self, path: Path, *, put: Put = os.pwrite, block_bytes: int = BLOCK_BYTES) -> None:
        """`put(handle, block, offset)` writes and returns how much. `block_bytes`: a multiple of the page size."""
        self.path = path
        self._put = put
        self._block_bytes = block_bytes
        self._handle: int | None = os.open(path, _CREATE_FLAGS, 0o644)
        self._direct: int | None = None
        self._pushes = False
        self._writers: ThreadPoolExecutor | None = None
        self._in_flight: deque[tuple[Future[None], Block]] = deque()
        self._spare: list[Block] = []
        self._block: Block | None = None
        self._filled = 0
        self._offset = 0
        """Offset of `_block` in the file."""

    def write(self, data: memoryview) -> None:
        with path_in_errors(self.path):
            self._opened()
            values = np.frombuffer(data, np.uint8)
            while len(values):
                block = self._current()
                count = min(len(values), self._block_bytes - self._filled)
                np.copyto(np.frombuffer(block, np.uint8, count, self._filled), values[:count])
                values, self._filled = values[count:], self._filled + count
                if self._filled == self._block_bytes:
                    self._submit(block)

    def sync(self) -> None:
        with path_in_errors(self.path):
            handle = self._opened()
            while self._in_flight:
                self._finish_oldest()
            if self._block is not None and self._filled:
                self._put_all(handle, memoryview(self._block)[: self._filled], self._offset)
            os.fsync(handle)

    def close(self) -> None:
        handles, self._handle, self._direct = (self._handle, self._direct), None, None
        if self._writers is not None:
            self._writers.shutdown()
        self._in_flight.clear()
        self._spare.clear()
        self._block = None
        for handle in handles:
            if handle is not None:
                with path_in_errors(self.path):
                    os.close(handle)

    def _current(self) -> Block:
        """Return the block that is being filled; wait when all are on their way to the disk."""
        if self._block is None:
            if len(self._in_flight) >= BLOCKS - 1:
                self._finish_oldest()
            self._block = self._spare.pop() if self._spare else mmap.mmap(-1, self._block_bytes)
            self._filled = 0
        return self._block

    def _submit(self, block: Block) -> None:
        if self._writers is None:
            self._writers = ThreadPoolExecutor(max_workers=BLOCKS - 1, thread_name_prefix="write")
            self._direct = self._open_direct()
        self._in_flight.append((self._writers.submit(self._put_block, block, self._offset), block))
        self._offset += self._block_bytes
        self._block = None

    def _put_block(self, block: Block, offset: int) -> None:
        handle = self._direct if self._direct is not None else self._opened()
        self._put_all(handle, memoryview(block), offset)
        if self._pushes:
            os.fdatasync(handle)

    def _put_all(self, handle: int, data: memoryview, offset: int) -> None:
        while data:
            count = self._put(handle, data, offset)
            data, offset = data[count:], offset + count

    def _finish_oldest(self) -> None:
        future, block = self._in_flight.popleft()
        future.result()
        self._spare.append(block)

    def _open_direct(self) -> int | None:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._pushes = True
            return None

    def _opened(self) -> int:
        if self._handle is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._handle


class PosixStorage:
    """A local or network file system. Has no state: every instance is the same."""

    has_locks = True

    def create(self, path: Path) -> Sink:
        return PosixSink(path)

    def read(self, path: Path, offset: int, out: memoryview) -> int:
        done = 0
        with _regular_file(path) as handle, path_in_errors(path):
            while done < len(out):
                count = os.preadv(handle, [out[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def size(self, path: Path) -> int:
        with _regular_file(path) as handle:
            return os.fstat(handle).st_size

    def modified(self, path: Path) -> float:
        return path.lstat().st_mtime

    def folders(self, folder: Path) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    def make_folder(self, folder: Path) -> None:
        if not folder.parent.is_dir():
            with suppress(FileExistsError):
                self.make_folder(folder.parent)
        folder.mkdir()
        self.sync_folder(folder.parent)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def sync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with path_in_errors(folder):
                os.fsync(handle)
        finally:
            os.close(handle)

    def lock_shared(self, path: Path) -> ReadLock | None:
        return shared(path)

    def lock_exclusive(self, path: Path) -> ReadLock:
        return exclusive(path)

    @contextmanager
    def hold(self, folder: Path) -> Iterator[None]:
        if not folder.is_dir():  # durably: a save that is published must not go with a folder above it
            with suppress(FileExistsError):
                self.make_folder(folder)
        with hold(folder):
            yield

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return


@contextmanager
def _regular_file(path: Path) -> Iterator[int]:
    """Open a regular file for reading. A link, pipe, device or folder is refused before anything is read from it."""
    try:
        handle = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CheckpointCorrupt(f"{path} is not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointCorrupt(f"{path} is not a regular file")
        yield handle
    finally:
        os.close(handle)


@contextmanager
def path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError, which names no file when the file is open."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
