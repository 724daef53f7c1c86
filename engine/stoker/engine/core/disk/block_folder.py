"""One folder of cache blocks: a file for each block, named by its content.

A block has megabytes, so that a file of its own costs little, gives its room back at once, and needs no compaction. It
is written under another name and renamed when it is complete (`serial`). Nothing is flushed to the device: a block is
not worth the wait, and one that a crash of the machine cut off is refused by its digest.

Every method may wait for the disk; called by `disk_tier` in threads of its own.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.transfer.checksum import content_seed
from stoker.engine.transfer.serial import BlockHeader, read_blocks, write_blocks

SUFFIX = ".block"
UNFINISHED = "unfinished"
"""Folder of files that are being written."""
FRAME_BYTES = 4096
"""More than a file has beside block and token ids."""
TOKEN_BYTES = 5
SECTOR = 4096


class Found(NamedTuple):
    digest: bytes
    used_s: float
    """Last use, in seconds since 1970."""


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
        """Names in a folder, and their last change. Empty for a folder that is not there."""
        ...


class PosixFiles:
    """The file system of this machine."""

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def open(self, path: Path) -> BinaryIO:
        return path.open("rb")

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        os.utime(path)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def list(self, path: Path) -> Sequence[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_mtime))
        return found


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
        self.root = identity.root

    @property
    def file_bytes(self) -> int:
        """Room that a block's file takes, at most."""
        return file_bytes(self.identity)

    def prepare(self, unfinished_before_s: float = float("inf")) -> None:
        """Make the folder, and remove what was not finished since a time. Raises OSError."""
        self.files.make_folder(self.path / UNFINISHED)
        for name, changed_s in self.files.list(self.path / UNFINISHED):
            if changed_s < unfinished_before_s:
                self.files.remove(self.path / UNFINISHED / name)

    def scan(self) -> list[Found]:
        """All blocks, the least recently used first. Raises OSError."""
        return sorted(self._scan(), key=lambda found: found.used_s)

    def write(self, content: BlockContent, data_N: np.ndarray, total: int) -> None:
        """Write a block with its seeded sum; until this returns it cannot be read. Raises OSError."""
        header = BlockHeader(
            self.identity.fingerprint, self.identity.salt, 0, 1, self.identity.layout, content.digest,
            self.unix_time(), 0.0, parent=content.parent, tokens=content.tokens,
        )  # fmt: skip
        target = self._path(content.digest)
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

    def read(self, content: BlockContent, into_N: np.ndarray) -> int:
        """Read a block and return its seeded sum.

        Raises:
            FileNotFoundError: it is not there.
            OSError: it cannot be read.
            TransferError: cut off, changed, or of another identity or content.
            BlockRefused: its sum is wrong.
        """
        path = self._path(content.digest)
        with suppress(OSError):
            self.files.touch(path)  # its place among the least recently used; a lease where others may remove it
        with self.files.open(path) as stream:
            blocks = read_blocks(
                stream, fingerprint=self.identity.fingerprint, salt=self.identity.salt, layout=self.identity.layout,
                content=content.digest, seeds=[content_seed(self.root, 0, content.digest)], now_s=self.unix_time(),
                parent=content.parent, tokens=content.tokens,
            )  # fmt: skip
        into_N[:] = blocks.data[0]
        return blocks.sums[0]

    def remove(self, digest: bytes) -> None:
        """Give its room back. Raises OSError."""
        self.files.remove(self._path(digest))

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.path / name[:2] / f"{name}{SUFFIX}"

    def _scan(self) -> Iterator[Found]:
        for first in range(256):
            folder = f"{first:02x}"
            for name, used_s in self.files.list(self.path / folder):
                digest = digest_in(name)
                if digest is None or not name.startswith(folder):
                    self.files.remove(self.path / folder / name)
                else:
                    yield Found(digest, used_s)


def digest_in(name: str) -> bytes | None:
    """The digest in a file's name; None for another name."""
    if len(name) != 64 + len(SUFFIX) or not name.endswith(SUFFIX):
        return None
    with suppress(ValueError):
        digest = bytes.fromhex(name.removesuffix(SUFFIX))
        return digest if digest.hex() + SUFFIX == name else None
    return None


def file_bytes(identity: BlockIdentity) -> int:
    """Room that the file of one block takes, at most."""
    layout = identity.layout
    size = layout.block_bytes + FRAME_BYTES + TOKEN_BYTES * layout.block_size + 4 * len(identity.salt)
    return -(-size // SECTOR) * SECTOR
