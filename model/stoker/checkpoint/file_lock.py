"""Shared and exclusive `flock` locks on one open file: shared for its readers, exclusive for its removal.

The kernel takes a lock back when its process ends, however it ends. `flock` holds between the processes of a machine,
and between machines where the file system carries it there (NFS does). On a file system without locks, reading and
removing go on without one.

`hold` locks a whole root for one run.

Called by `PosixStorage` alone. A lock is held by the `ReadLock` that is returned, until it is closed.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.checkpoint.errors import CheckpointInUse, CheckpointLocked

LOCK_FILE = ".lock"
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ReadLock:
    """One lock, shared or exclusive, until it is closed or collected."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def close(self) -> None:
        """Give the lock back. Harmless twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def shared(path: Path) -> ReadLock | None:
    """Lock a file for reading: `exclusive` refuses it meanwhile. None: it cannot be opened, or was removed just now."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    lock = ReadLock(handle)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH)
    if _is_there(path, handle):
        return lock
    lock.close()
    return None


def exclusive(path: Path) -> ReadLock:
    """Take the only lock of a file.

    Raises:
        CheckpointInUse: a reader has locked it.
    """
    handle = _open_exclusive(path)
    lock = ReadLock(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise CheckpointInUse(f"{path.parent} is being read") from error
    except OSError:  # a file system without locks has no readers' locks either
        pass
    return lock


def _is_there(path: Path, handle: int) -> bool:
    """Whether the name still belongs to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def _open_exclusive(path: Path) -> int:
    """Open for writing where that is allowed, because NFS needs it for an exclusive lock; else for reading."""
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _FLAGS)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder until the end, or until the process dies.

    Raises:
        CheckpointLocked: another process holds it.
        OSError: the file system has no locks, so that nothing would keep another run away.
    """
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _take(folder, handle)
        yield
    finally:
        os.close(handle)


def _take(folder: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
        raise CheckpointLocked(f"{folder} is in use by {holder or 'another run'}") from error
    except OSError as error:
        why = f"a run without an operator needs a file system with locks: {error.strerror}"
        raise OSError(error.errno, why, str(folder / LOCK_FILE)) from error
    with suppress(OSError):  # a full disk: the name helps who is refused, and the holder is to free what a save left
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
