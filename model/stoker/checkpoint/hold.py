"""A file that somebody reads: shared locks on it, which the kernel takes back when a reader ends, however it ends.

`flock`, so that it holds between the processes of a machine, and between machines where the file system carries it there (NFS does).
Where there are no locks at all, reading and claiming go on without one.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.checkpoint.errors import CheckpointInUse

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Hold:
    """One lock, until it is closed or forgotten."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def close(self) -> None:
        """Harmless twice."""
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


def hold(path: Path) -> Hold | None:
    """While it is held, `claim` refuses the file. None: it cannot be opened, or it went while somebody claimed it."""
    try:
        handle = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    held = Hold(handle)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH)
    if _is_there(path, handle):
        return held
    held.close()
    return None


def claim(path: Path) -> Hold:
    """The only hold of a file.

    Raises:
        CheckpointInUse: somebody reads it.
    """
    handle = _open_to_claim(path)
    held = Hold(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise CheckpointInUse(f"{path.parent} is being read") from error
    except OSError:  # a file system without locks: nobody can hold it
        pass
    return held


def _is_there(path: Path, handle: int) -> bool:
    """The name still belongs to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def _open_to_claim(path: Path) -> int:
    """NFS gives an exclusive lock only to who may write; elsewhere a file that is read-only can be claimed, too."""
    try:
        return os.open(path, os.O_RDWR | _FLAGS)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _FLAGS)
