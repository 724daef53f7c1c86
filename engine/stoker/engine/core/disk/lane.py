"""The folder of one engine below `cache.disk.path`, and folders that no engine uses any more.

    PATH/blocks-FINGERPRINT-NUMBER/{lock, unfinished, 00, 01, ..., ff}

An engine takes the first number whose lock is free, so that after a restart it finds its blocks, and engines that share
a volume keep apart. The lock ends with the process. Folders of other fingerprints are removed when they are free, those
of this one when they were free for a while: an engine that restarts takes its own again.

Every function may wait for the disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

log = logging.getLogger("stoker.engine")

LOCK = "lock"
MOST_LANES = 1024
FREE_S = 600.0
"""Time after which a free folder of the same fingerprint is removed."""
TAG_DIGITS = 32
_NAME = re.compile(r"blocks-([0-9a-f]{32})-(\d{1,4})(\.leaving-[0-9a-f]{32})?")


class Lane:
    """A folder that is locked by this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    def renew(self) -> None:
        """Note that it is in use. Raises OSError."""
        os.utime(self.path / LOCK)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_lane(path: Path, fingerprint: bytes) -> Lane:
    """Lock the first free folder of this fingerprint, which is made if need be. Raises OSError.

    Where a name is not what an engine makes of it, a file in place of the folder or a folder in place of the lock, it
    stays, and the next number is tried.
    """
    tag = fingerprint.hex()[:TAG_DIGITS]
    for number in range(MOST_LANES):
        folder = path / f"blocks-{tag}-{number}"
        try:
            lane = _lock(folder, make=True)
        except (FileExistsError, IsADirectoryError) as error:
            log.warning("%s is left out, the disk tier takes the next folder: %s", folder, error)
            continue
        if lane is not None:
            lane.renew()
            return lane
    raise OSError(f"{path}: all of {MOST_LANES} folders are in use")


def remove_unused(path: Path, fingerprint: bytes, now_s: float) -> int:
    """Remove folders that no engine holds: of other fingerprints, and old ones of this. Returns how many.

    Only folders with a name of this module are touched. A folder gets another name first, so that an engine that starts
    meanwhile makes a new one. Raises OSError.
    """
    tag, num_removed = fingerprint.hex()[:TAG_DIGITS], 0
    for folder in sorted(path.iterdir()):
        match = _NAME.fullmatch(folder.name)
        if match is None or folder.is_symlink() or not folder.is_dir():
            continue
        if match[3] is not None:
            shutil.rmtree(folder, ignore_errors=True)  # begun before
        elif match[1] != tag or _used_s(folder) < now_s - FREE_S:
            num_removed += _remove_free(folder)
    return num_removed


def _remove_free(folder: Path) -> bool:
    try:
        lane = _lock(folder, make=False)
    except IsADirectoryError:
        return False  # no engine made a folder of this name
    if lane is None:
        return False
    with lane:
        leaving = folder.rename(folder.with_name(f"{folder.name}.leaving-{uuid.uuid4().hex}"))
        shutil.rmtree(leaving, ignore_errors=True)
    return True


def _lock(folder: Path, *, make: bool) -> Lane | None:
    """Lock a folder. None: another process has it, or it is just being removed."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (folder / LOCK).stat()):
                return Lane(folder, lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    return None


def _used_s(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return (folder / LOCK).stat().st_mtime
    return time.time()
