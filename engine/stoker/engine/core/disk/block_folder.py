"""One folder of cache blocks: a file for each block, or for each part of one, named by its content.

A block has megabytes, so that a file of its own costs little, gives its room back at once, and needs no compaction. It
is written under another name and renamed when it is complete (`serial`). Nothing is flushed to the device: a block is
not worth the wait, and one that a crash of the machine cut off is refused by its digest.

Engines of several ranks write their parts of a block: layers and heads, which the file's name and its header tell. A
block is there when its parts are all of it (`tiling`). A reader takes what it needs from the parts that overlap its
own, so that engines of any width read what those of another have written.

Every method may wait for the disk; called by `disk_tier` in threads of its own.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.transfer.block_part import BlockPart, Parts, layout_of_part, part_of, tiling
from stoker.engine.transfer.checksum import content_seed, raw_sums
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.repack import repack
from stoker.engine.transfer.serial import BlockHeader, read_blocks, write_blocks

log = logging.getLogger("stoker.engine")

SUFFIX = ".block"
UNFINISHED = "unfinished"
"""Folder of files that are being written."""
FRAME_BYTES = 4096
"""More than a file has beside block and token ids."""
TOKEN_BYTES = 5
SECTOR = 4096


_PLACE = "(0|[1-9][0-9]{0,4})"
_NAME = re.compile(rf"([0-9a-f]{{64}})(?:\.{_PLACE}-{_PLACE}\.{_PLACE}-{_PLACE})?\.block")


class Stored(NamedTuple):
    """A block that is there."""

    digest: bytes
    parts: Parts
    """The files that are all of it."""


class Found(NamedTuple):
    """Files of a block, which may not be all of it."""

    digest: bytes
    used_s: float
    """Last use of any, in seconds since 1970."""
    parts: Parts


class Files(Protocol):
    """What a folder needs of a file system. Failures are OSError."""

    def create(self, path: Path) -> BinaryIO: ...

    def open(self, path: Path) -> BinaryIO: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """Harmless for a file that has gone."""
        ...

    def touch(self, path: Path) -> None: ...

    def make_folder(self, path: Path) -> None:
        """With its parents; harmless for one that is there."""
        ...

    def list(self, path: Path) -> Sequence[tuple[str, float]]:
        """Names of files in a folder, and their last change. Empty for a folder that is not there."""
        ...


class PosixFiles:
    """The file system of this machine."""

    def __init__(self) -> None:
        self._noted: set[Path] = set()
        """Folders that were found among files; each is logged once."""

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def open(self, path: Path) -> BinaryIO:
        return path.open("rb")

    def rename(self, source: Path, target: Path) -> None:
        """A folder in place of the target gives way: an empty one is removed, any other gets another name."""
        try:
            source.rename(target)
        except IsADirectoryError:
            _give_way(target)
            source.rename(target)

    def remove(self, path: Path) -> None:
        with suppress(IsADirectoryError):  # no engine's file is there
            path.unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        os.utime(path)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def list(self, path: Path) -> Sequence[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._note_folder(path / entry.name)
                    continue
                with suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_mtime))
        return found

    def _note_folder(self, path: Path) -> None:
        if path not in self._noted:
            self._noted.add(path)
            log.warning("%s is a folder among files of cache blocks, and stays there: no engine made it", path)


def _give_way(folder: Path) -> None:
    """Make room for a file of this name. Raises OSError."""
    try:
        folder.rmdir()
    except OSError:
        aside = folder.rename(folder.with_name(f"{folder.name}.aside-{uuid.uuid4().hex}"))
        log.warning("%s is a folder in place of a cache block: no engine made it, and it is now %s", folder, aside.name)


class BlockFolder:
    """Blocks of one identity."""

    def __init__(
        self,
        path: Path,
        identity: BlockIdentity,
        files: Files | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.identity, self.unix_time = path, identity, unix_time
        self.files = files or PosixFiles()
        self.root, self.whole = identity.root, part_of(identity.layout)

    def prepare(self, unfinished_before_s: float = float("inf")) -> None:
        """Make the folder, and remove what was not finished since a time. Raises OSError."""
        self.files.make_folder(self.path / UNFINISHED)
        for name, changed_s in self.files.list(self.path / UNFINISHED):
            if changed_s < unfinished_before_s:
                self.files.remove(self.path / UNFINISHED / name)

    def scan(self) -> list[Found]:
        """All blocks and parts of blocks, the least recently used first. Raises OSError."""
        return sorted(self._scan(), key=lambda found: found.used_s)

    def complete(self, parts: Parts) -> Parts | None:
        """The parts that are a whole block; None: some are missing."""
        if parts == (self.whole,):
            return parts
        return tiling(frozenset(parts), self.whole)

    def write(self, content: BlockContent, layout: BlockLayout, data_N: np.ndarray, total: int) -> None:
        """Write a block, or the part of this layout, with its seeded sum; until this returns it cannot be read.

        Raises OSError.
        """
        header = BlockHeader(
            self.identity.fingerprint, self.identity.salt, 0, 1, layout, content.digest, self.unix_time(), 0.0,
            parent=content.parent, tokens=content.tokens,
        )  # fmt: skip
        target = self._path(content.digest, part_of(layout))
        unfinished = self.path / UNFINISHED / uuid.uuid4().hex
        try:
            with self.files.create(unfinished) as stream:
                write_blocks(stream, header, data_N[None], [total], [0])
            self.files.make_folder(target.parent)
            self.files.rename(unfinished, target)
        except OSError:
            with suppress(OSError):
                self.files.remove(unfinished)
            raise

    def read(self, content: BlockContent, parts: Parts, layout: BlockLayout, into_N: np.ndarray) -> int:
        """Read a block, or the part of this layout, from the parts that are there. Returns its raw sum.

        Raises:
            FileNotFoundError: a part is not there.
            OSError: it cannot be read.
            TransferError: cut off, changed, or of another identity or content.
            BlockRefused: its sum is wrong.
        """
        own = part_of(layout)
        if own in parts:
            into_N[:], raw = self._read(content, own)
            return raw
        sources = [
            (layout_of_part(self.identity.layout, part), {0: self._read(content, part)[0]})
            for part in parts
            if part.overlaps(own)
        ]
        repack(sources, layout, {0: into_N})
        return int(raw_sums(into_N[None])[0])

    def _read(self, content: BlockContent, part: BlockPart) -> tuple[np.ndarray, int]:
        """A file's bytes and their raw sum."""
        path, layout = self._path(content.digest, part), layout_of_part(self.identity.layout, part)
        with suppress(OSError):
            self.files.touch(path)  # its place among the least recently used; a lease where others may remove it
        with self.files.open(path) as stream:
            blocks = read_blocks(
                stream, fingerprint=self.identity.fingerprint, salt=self.identity.salt, layout=layout,
                content=content.digest, seeds=[content_seed(self.root, 0, content.digest)], now_s=self.unix_time(),
                parent=content.parent, tokens=content.tokens,
            )  # fmt: skip
        return blocks.data[0], blocks.raw_sums[0]

    def remove(self, digest: bytes, parts: Parts) -> None:
        """Give the room of these parts back. Raises OSError."""
        for part in parts:
            self.files.remove(self._path(digest, part))

    def list(self, name: str) -> list[Found]:
        """The blocks and parts in one of the folders. Raises OSError."""
        found: dict[bytes, Found] = {}
        for file, used_s in self.files.list(self.path / name):
            parsed = self._parse(file)
            if parsed is not None:
                digest, part = parsed
                before = found.get(digest, Found(digest, 0.0, ()))
                found[digest] = Found(digest, max(used_s, before.used_s), (*before.parts, part))
        return list(found.values())

    def _path(self, digest: bytes, part: BlockPart) -> Path:
        name = digest.hex()
        place = "" if part == self.whole else f".{part.first_layer}-{part.end_layer}.{part.first_head}-{part.end_head}"
        return self.path / name[:2] / f"{name}{place}{SUFFIX}"

    def _parse(self, name: str) -> tuple[bytes, BlockPart] | None:
        """The digest and the part in a file's name; None for another name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if match[2] is None:
            return bytes.fromhex(match[1]), self.whole
        part = BlockPart(*(int(match[place]) for place in range(2, 6)))
        return (bytes.fromhex(match[1]), part) if part.is_in(self.whole) and part != self.whole else None

    def _scan(self) -> Iterator[Found]:
        for first in range(256):
            folder = f"{first:02x}"
            for name, _ in self.files.list(self.path / folder):
                if self._parse(name) is None or not name.startswith(folder):
                    self.files.remove(self.path / folder / name)
            yield from self.list(folder)


def file_bytes(identity: BlockIdentity, parts: Parts) -> int:
    """Room that the files of one block take, at most, in these parts."""
    return sum(_file_bytes(layout_of_part(identity.layout, part), identity.salt) for part in parts)


def _file_bytes(layout: BlockLayout, salt: str) -> int:
    size = layout.block_bytes + FRAME_BYTES + TOKEN_BYTES * layout.block_size + 4 * len(salt)
    return -(-size // SECTOR) * SECTOR
