"""The seam to storage: the few operations that the format needs, and their POSIX form.

An object store fits behind it: keys below a staging folder are written straight below the final name, `rename` and `sync_folder` do nothing,
and because the manifest is written last its object is the commit. Nothing above this module opens a file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from stoker.checkpoint.errors import CheckpointCorrupt

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

FLUSH_BYTES = 64 * 2**20
"""Written bytes after which a push to the disk is begun in the background."""


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`; OSError with the path when the disk refuses."""

    def sync(self) -> None:
        """Return only when everything written so far is durable."""

    def close(self) -> None:
        """Release the file. Safe to call twice; does not make anything durable."""


class Storage(Protocol):
    """Files and folders of a checkpoint root. Failures are OSError; a file that is not a regular one is CheckpointCorrupt."""

    def create(self, path: Path) -> Sink:
        """A new, empty file; refuses a name that exists."""

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
        """Atomically. A file replaces a file; a folder only an empty folder."""

    def sync_folder(self, folder: Path) -> None:
        """Return only when the entries of `folder` are durable."""

    def remove_file(self, path: Path) -> None:
        """Remove the name (a link, not its target); fine when it is gone."""

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder; fine when it is gone."""


class PosixSink:
    """A file descriptor that knows its path, for errors that say which file.

    A large file is pushed to the disk while it is being written: the final `sync` is short, and a save never piles up dirty pages until the
    kernel stops every writer of the machine. A failure of such a push is kept and raised by the next call, because the kernel tells it only once.
    """

    def __init__(
        self, path: Path, *, flush: Callable[[int], None] = os.fdatasync, flush_bytes: int = FLUSH_BYTES
    ) -> None:
        self.path = path
        self._push = flush
        self._flush_bytes = flush_bytes
        self._handle: int | None = os.open(path, _CREATE_FLAGS, 0o644)
        self._flusher: ThreadPoolExecutor | None = None
        self._flush: Future[None] | None = None
        self._unflushed_bytes = 0

    def write(self, data: memoryview) -> None:
        with _path_in_errors(self.path):
            self._unflushed_bytes += len(data)
            while data:
                data = data[os.write(self._opened(), data) :]
            if self._unflushed_bytes >= self._flush_bytes:
                self._start_flush()

    def sync(self) -> None:
        with _path_in_errors(self.path):
            self._finish_flush()
            os.fsync(self._opened())

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if self._flusher is not None:
            self._flusher.shutdown()
        if handle is not None:
            with _path_in_errors(self.path):
                os.close(handle)

    def _start_flush(self) -> None:
        """Begin a push to the disk unless one is still going."""
        if self._flush is not None and not self._flush.done():
            return
        self._finish_flush()
        if self._flusher is None:
            self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._flush = self._flusher.submit(self._push, self._opened())
        self._unflushed_bytes = 0

    def _finish_flush(self) -> None:
        flush = self._flush
        if flush is not None:
            flush.result()

    def _opened(self) -> int:
        if self._handle is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._handle


class PosixStorage:
    """A local or network file system. Has no state: every instance is the same."""

    def create(self, path: Path) -> Sink:
        return PosixSink(path)

    def read(self, path: Path, offset: int, out: memoryview) -> int:
        done = 0
        with _regular_file(path) as handle, _path_in_errors(path):
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
            with _path_in_errors(folder):
                os.fsync(handle)
        finally:
            os.close(handle)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return


@contextmanager
def _regular_file(path: Path) -> Iterator[int]:
    """An open handle; a link, pipe, device or folder is refused before anything is read from it."""
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
def _path_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
