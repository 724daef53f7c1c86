"""Storages that fail on purpose: one kills its process at a chosen operation, one loses writes that were not synced."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from stoker.checkpoint.storage import PosixStorage, Sink


class Countdown:
    """A countdown of operations, then SIGKILL; with `torn`, in the middle of the next write."""

    def __init__(self, operations: int, *, torn: bool = False) -> None:
        self.left = operations
        self.torn = torn

    def step(self) -> None:
        if self.left == 0:
            die()
        self.left -= 1


class FullDisk(Countdown):
    """A disk that refuses one operation with ENOSPC, after the given number of operations."""

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive after SIGKILL")


class CrashingSink:
    def __init__(self, sink: Sink, countdown: Countdown) -> None:
        self.sink = sink
        self.countdown = countdown

    def write(self, data: memoryview) -> None:
        if self.countdown.left == 0 and self.countdown.torn:
            self.sink.write(data[: len(data) // 2])
        self.countdown.step()
        self.sink.write(data)

    def sync(self) -> None:
        self.countdown.step()
        self.sink.sync()

    def close(self) -> None:
        self.sink.close()


class CrashingStorage(PosixStorage):
    """A storage that counts every operation that changes the disk."""

    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def create(self, path: Path) -> Sink:
        self.countdown.step()
        return CrashingSink(super().create(path), self.countdown)

    def make_folder(self, folder: Path) -> None:
        self.countdown.step()
        super().make_folder(folder)

    def rename(self, source: Path, target: Path) -> None:
        self.countdown.step()
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self.countdown.step()
        super().sync_folder(folder)

    def remove_file(self, path: Path) -> None:
        self.countdown.step()
        super().remove_file(path)

    def remove_folder(self, folder: Path) -> None:
        self.countdown.step()
        super().remove_folder(folder)


@dataclass
class FileNode:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class FolderNode:
    entries: dict[str, FolderNode | FileNode] = field(default_factory=dict)
    durable: dict[str, FolderNode | FileNode] = field(default_factory=dict)


class ForgetfulSink:
    def __init__(self, sink: Sink, node: FileNode, storage: ForgetfulStorage) -> None:
        self.sink, self.node, self.storage = sink, node, storage

    def write(self, data: memoryview) -> None:
        self.sink.write(data)
        self.node.data += data
        self.storage.snapshot()

    def sync(self) -> None:
        self.sink.sync()
        self.node.durable = bytes(self.node.data)
        self.storage.snapshot()

    def close(self) -> None:
        self.sink.close()


class ForgetfulStorage(PosixStorage):
    """A storage that writes for real and records what a power cut after each operation could leave.

    It covers two extremes of file systems. `names` keeps every name at once, but only the synced bytes of a file.
    `synced` keeps names only once their folder was synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = FolderNode()
        self.cuts: list[dict[str, dict[str, bytes]]] = []

    def create(self, path: Path) -> Sink:
        sink = super().create(path)
        node = FileNode()
        self.folder(path.parent).entries[path.name] = node
        self.snapshot()
        return ForgetfulSink(sink, node, self)

    def make_folder(self, folder: Path) -> None:
        super().make_folder(folder)
        parent, made = self.folder(folder.parent), FolderNode()
        parent.entries[folder.name] = parent.durable[folder.name] = made  # as `make_folder` promises
        self.snapshot()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.folder(target.parent).entries[target.name] = self.folder(source.parent).entries.pop(source.name)
        self.snapshot()

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        node = self.folder(folder)
        node.durable = dict(node.entries)
        self.snapshot()

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self.folder(path.parent).entries.pop(path.name, None)
        self.snapshot()

    def remove_folder(self, folder: Path) -> None:
        super().remove_folder(folder)
        self.folder(folder.parent).entries.pop(folder.name, None)
        self.snapshot()

    def folder(self, path: Path) -> FolderNode:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            child = node.entries[part]
            assert isinstance(child, FolderNode)
            node = child
        return node

    def snapshot(self) -> None:
        names = dict(walk(self.tree, "", synced=False))
        synced = dict(walk(self.tree, "", synced=True))
        self.cuts.append({"names": names, "synced": synced})


def walk(node: FolderNode, prefix: str, *, synced: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and bytes that a power cut leaves; empty folders are omitted."""
    for name, child in (node.durable if synced else node.entries).items():
        if isinstance(child, FolderNode):
            yield from walk(child, f"{prefix}{name}/", synced=synced)
        else:
            yield f"{prefix}{name}", child.durable


def lay_out(root: Path, files: dict[str, bytes]) -> None:
    """Write the state after a power cut to the disk."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
