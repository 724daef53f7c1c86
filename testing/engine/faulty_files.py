"""File systems that fail: at the n-th operation, for ever from there on (a killed process), or by kind."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from stoker.engine.core.disk.block_folder import PosixFiles


class Killed(BaseException):
    """The process ended here."""


class FaultyFiles(PosixFiles):
    """The real file system, with a hook before each operation and each piece that is written."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        """`before(kind)`: raises OSError or Killed, or waits, or does nothing."""
        super().__init__()
        self.before = before
        self.change: Callable[[bytes], bytes] = lambda data: data
        """Of what is read."""

    def create(self, path: Path) -> BinaryIO:
        self.before("create")
        return _Stream(super().create(path), self.before)  # type: ignore[return-value]

    def open(self, path: Path) -> BinaryIO:
        self.before("open")
        with super().open(path) as stream:
            data = stream.read()
        self.before("read")
        return io.BytesIO(self.change(data))

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.before("remove")
        super().remove(path)

    def make_folder(self, path: Path) -> None:
        self.before("make_folder")
        super().make_folder(path)

    def list(self, path: Path) -> Sequence[tuple[str, float]]:
        self.before("list")
        return super().list(path)


class _Stream:
    """Writes half of a piece before it may fail in it."""

    def __init__(self, stream: BinaryIO, before: Callable[[str], None]) -> None:
        self.stream, self.before = stream, before

    def write(self, data: bytes | memoryview) -> None:
        half = len(data) // 2
        self.stream.write(data[:half])
        self.before("write")
        self.stream.write(data[half:])

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def killed_at(number: int) -> Callable[[str], None]:
    """A hook: the process is killed at this operation; nothing works after it."""
    left = [number]

    def before(_: str) -> None:
        if left[0] <= 0:
            raise Killed
        left[0] -= 1

    return before


def full(kind: str) -> None:
    """A hook: the disk is full."""
    if kind in ("create", "write"):
        raise OSError(errno.ENOSPC, "No space left on device")


def failing(*kinds: str) -> Callable[[str], None]:
    """A hook: these operations fail."""

    def before(kind: str) -> None:
        if kind in kinds:
            raise OSError(errno.EIO, "Input/output error")

    return before
