"""The lock of a state folder: at most one supervisor has it, and it is the only proof that one runs.

Two locks make it: one on the folder itself, which stays when the files inside are deleted, and one on
`supervisor.lock`, which also holds on network file systems without locks for folders, and names the process. The holder
makes a deleted lock file again; when the folder was replaced, it may not write there any more.

Taken by the supervisor; the command line only tests it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from stoker.operator.cluster.local.folders import StateFolders

NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that cannot lock a folder."""
PATIENCE_S = 1.0
"""Longer than `is_held` holds the lock."""


class StateFolderTaken(Exception):
    """Another supervisor holds the state folder."""


class StateFolderReplaced(OSError):
    """The locked folder was deleted or replaced by another: its supervisor must end."""


class StateLock:
    """The lock while a supervisor runs. Make it with `lock_state`."""

    def __init__(self, folders: StateFolders) -> None:
        self.folders = folders
        self._folder = os.open(folders.root, os.O_RDONLY | os.O_DIRECTORY)
        self._folder_is_locked = False
        self._file = -1

    def take(self) -> None:
        """Take both locks.

        Raises:
            StateFolderTaken.
        """
        try:
            taken = _lock(self._folder, fcntl.LOCK_EX)
            self._folder_is_locked = taken
        except OSError as error:
            if error.errno not in NO_FOLDER_LOCKS:
                raise
            taken = True  # the lock file alone has to do
        if not taken or not self._take_file():
            raise StateFolderTaken(f"{self.folders.root} belongs to a running supervisor{_pid_text(self.folders)}")

    def check(self) -> None:
        """Make sure that this process may still write to the folder; make a deleted lock file again.

        Raises:
            StateFolderReplaced.
        """
        if not _is_at(self._folder, self.folders.root):
            raise StateFolderReplaced(errno.ESTALE, "the folder was deleted or replaced", str(self.folders.root))
        if _is_at(self._file, self.folders.lock) or self._take_file() or self._folder_is_locked:
            return
        raise StateFolderReplaced(errno.ESTALE, "another supervisor has taken the folder", str(self.folders.root))

    def release(self) -> None:
        for handle in (self._file, self._folder):
            if handle >= 0:
                os.close(handle)

    def _take_file(self) -> bool:
        file = os.open(self.folders.lock, os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(file, fcntl.LOCK_EX):
            os.close(file)
            return False
        with contextlib.suppress(OSError):  # a full disk: the lock counts, its text is for people
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        return True


@contextlib.contextmanager
def lock_state(folders: StateFolders, *, patience_s: float = PATIENCE_S) -> Iterator[StateLock]:
    """Hold the lock of a state folder.

    Raises:
        StateFolderTaken: another process has held it for longer than `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        lock = StateLock(folders)
        try:
            lock.take()
            break
        except StateFolderTaken:
            lock.release()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    try:
        yield lock
    finally:
        lock.release()


def is_held(folders: StateFolders) -> bool:
    """Whether a supervisor holds the folder. The locks are taken for a moment to find out."""
    with contextlib.ExitStack() as opened:
        for path, flags in ((folders.root, os.O_RDONLY | os.O_DIRECTORY), (folders.lock, os.O_RDWR)):
            try:
                handle = os.open(path, flags)
            except (FileNotFoundError, NotADirectoryError):
                continue
            opened.callback(os.close, handle)
            try:
                if not _lock(handle, fcntl.LOCK_SH):
                    return True
            except OSError as error:
                if error.errno not in NO_FOLDER_LOCKS:
                    raise
    return False


def holder_pid(folders: StateFolders) -> int | None:
    """Find the process that holds the folder; None when it cannot be found."""
    with contextlib.suppress(OSError, ValueError):
        return int(folders.lock.read_text())
    try:
        inode = folders.root.stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    fields = (line.split() for line in locks if " FLOCK " in line and "->" not in line)
    return next((int(words[4]) for words in fields if words[5].rpartition(":")[2] == str(inode)), None)


def _pid_text(folders: StateFolders) -> str:
    pid = holder_pid(folders)
    return "" if pid is None else f" (pid {pid})"


def _lock(handle: int, mode: int) -> bool:
    """Take a lock without waiting; False when another process has it."""
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one that a path names now."""
    held = os.fstat(handle)
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
