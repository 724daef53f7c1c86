"""One volume of the store: a folder that many engines write to and read from, and its clean-up.

    PATH/store-FINGERPRINT/{used, sweeper, unfinished, 00, 01, ..., ff}

A block appears by a rename, so that a reader finds a whole one or none; two engines that write the same block write the
same bytes. A read renews the file's time, which is its lease: nothing that was used in the last `LEASE_S` is removed.

The engine that holds the lock of `sweeper` removes what was not used for the time to live, the least recently used
beyond the size, files that were begun and never finished, and folders of fingerprints without a use in that time.

Every method may wait for the disk.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import BlockFolder, Files, Found, Stored
from stoker.engine.core.disk.disk_index import HIGH, LOW
from stoker.engine.core.disk.disk_tier import Tended
from stoker.engine.core.disk.lane import TAG_DIGITS

LEASE_S = 10.0
UNFINISHED_S = 60.0
SWEEP_EVERY_S = 30.0
LIST_EVERY_S = 2.0
SETTLED_S = 3.0
"""Age of a folder's last change from which an equal time means that nothing has changed."""
USED, SWEEPER = "used", "sweeper"
_NAME = re.compile(r"store-([0-9a-f]{32})(\.leaving-[0-9a-f]{32})?")


class SharedHome:
    """A folder of a volume that engines share."""

    tend_every_s = LIST_EVERY_S

    def __init__(
        self, path: Path, identity: BlockIdentity, max_blocks: int, ttl_s: float, files: Files | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.path, self.identity, self.max_blocks, self.ttl_s, self.unix_time = (
            path, identity, max_blocks, ttl_s, unix_time,
        )  # fmt: skip
        self.folder_path = path / f"store-{identity.fingerprint.hex()[:TAG_DIGITS]}"
        self.folder = BlockFolder(self.folder_path, identity, files, unix_time)
        self._sweep_due_s = 0.0
        self._listed: dict[str, tuple[float, list[Stored]]] = {}
        """Folder -> its last change, and the blocks in it."""

    def open(self) -> tuple[BlockFolder, Sequence[Stored]]:
        self._mark()
        return self.folder, list(self._list())

    def tend(self) -> Tended:
        """List the blocks, and from time to time remove those that are due."""
        num_cleaned = 0
        if self.unix_time() >= self._sweep_due_s:
            self._sweep_due_s = self.unix_time() + SWEEP_EVERY_S
            self._mark()
            with self._sweeping() as is_sweeper:
                num_cleaned = self.sweep() if is_sweeper else 0
        return Tended(num_cleaned, self._list())

    def close(self) -> None:
        """Others use it, too."""

    def sweep(self) -> int:
        """Remove what is due. Returns the number of folders that were. Raises OSError."""
        now_s = self.unix_time()
        self.folder.prepare(now_s - UNFINISHED_S)
        found = self.folder.scan()
        for one in due(found, self.max_blocks, self.ttl_s, now_s):
            self.folder.remove(one.digest, one.parts)
        for one in found:
            if one.used_s < now_s - UNFINISHED_S and self.folder.complete(one.parts) is None:
                self.folder.remove(one.digest, one.parts)  # a rank did not write its part
        return self._remove_foreign(now_s)

    def _mark(self) -> None:
        """Make the folder, and note that it is in use. Raises OSError, also for a path that is not there."""
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not mounted")
        self.folder.files.make_folder(self.folder_path)
        (self.folder_path / USED).touch()
        now_s = self.unix_time()
        os.utime(self.folder_path / USED, (now_s, now_s))
        self.folder.prepare(now_s - UNFINISHED_S)

    @contextmanager
    def _sweeping(self) -> Iterator[bool]:
        """Hold the sweeper's lock. False: another engine has it."""
        lock = os.open(self.folder_path / SWEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def _remove_foreign(self, now_s: float) -> int:
        num_removed = 0
        for folder in sorted(self.path.iterdir()):
            match = _NAME.fullmatch(folder.name)
            if match is None or folder == self.folder_path or folder.is_symlink():
                continue
            if match[2] is not None:
                shutil.rmtree(folder, ignore_errors=True)  # begun before
            elif (_changed_s(folder / USED) or now_s) < now_s - self.ttl_s:
                leaving = folder.rename(folder.with_name(f"{folder.name}.leaving-{uuid.uuid4().hex}"))
                shutil.rmtree(leaving, ignore_errors=True)
                num_removed += 1
        return num_removed

    def _list(self) -> Collection[Stored]:
        """The blocks that are there; a folder is read again where it has changed."""
        blocks: list[Stored] = []
        for first in range(256):
            name = f"{first:02x}"
            changed_s = _changed_s(self.folder_path / name)
            if changed_s is None:
                self._listed.pop(name, None)
                continue
            known = self._listed.get(name)
            if known is None or known[0] != changed_s:
                known = changed_s, self._blocks_in(name)
                if changed_s < time.time() - SETTLED_S:
                    self._listed[name] = known
            blocks += known[1]
        return blocks

    def _blocks_in(self, name: str) -> list[Stored]:
        found = [(one.digest, self.folder.complete(one.parts)) for one in self.folder.list(name)]
        return [Stored(digest, parts) for digest, parts in found if parts is not None]


def due(found: Sequence[Found], max_blocks: int, ttl_s: float, now_s: float) -> Iterator[Found]:
    """Blocks to be removed, of those that were found, the least recently used first. Pure.

    None that was used in the last `LEASE_S`; all that were not used for `ttl_s`; and the oldest beyond the size.
    """
    excess = len(found) - int(LOW * max_blocks) if len(found) > HIGH * max_blocks else 0
    for place, one in enumerate(found):
        if one.used_s >= now_s - LEASE_S:
            return
        if place < excess or one.used_s < now_s - ttl_s:
            yield one


def _changed_s(path: Path) -> float | None:
    """The last change; None for what is not there."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None
