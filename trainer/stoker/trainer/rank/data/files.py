"""Files of a data source: on a mounted volume, or on another file system by URL (`fsspec`).

`fsspec` and the packages behind a scheme are imported when a URL is used. Read-only; called by `source` and `cache`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError, StorageFailed
from stoker.trainer.protocol.config import DataSourceConfig
from stoker.trainer.rank.data.compressed import GROWTH, Suffixes, suffixes_of
from stoker.trainer.rank.data.remote_stream import READ_BYTES, RemoteStream

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "created", "ino")
"""Facts of a remote file that change with its content."""

LOST_AND_FOUND = "lost+found"
"""A folder at the top of many volumes that only root may read. It holds no data of the user."""


class DataFile(Protocol):
    """One file of a source."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        ...

    @property
    def suffixes(self) -> Suffixes: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> list[str | int] | None:
        """Facts that differ whenever the content may differ; None where the file system has none."""
        ...

    @property
    def version(self) -> tuple[int, ...] | None:
        """Facts of this moment that a write changes; None where only the listing has such facts."""
        ...

    def open(self) -> BinaryIO:
        """Open the file as it is: a compressed one is not decompressed."""
        ...


@dataclass(frozen=True)
class LocalFile:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def suffixes(self) -> Suffixes:
        return suffixes_of(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def identity(self) -> list[str | int] | None:
        facts = self.path.stat()
        return [str(self.path.resolve()), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]

    @property
    def version(self) -> tuple[int, ...] | None:
        facts = self.path.stat()
        return facts.st_size, facts.st_mtime_ns  # mounts of buckets may give a file another inode each time

    def open(self) -> BinaryIO:
        return self.path.open("rb")


@dataclass(frozen=True)
class RemoteFile:
    system: Any
    """An `fsspec` file system."""
    path: str
    info: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    @property
    def suffixes(self) -> Suffixes:
        return suffixes_of(PurePosixPath(self.path.partition("?")[0]))

    @property
    def size(self) -> int:
        return int(self.info.get("size") or 0)

    @property
    def identity(self) -> list[str | int] | None:
        versions = [f"{name} {self.info[name]}" for name in _VERSIONS if self.info.get(name) is not None]
        return [self.name, self.size, *versions] if versions else None

    @property
    def version(self) -> tuple[int, ...] | None:
        return None  # servers behind one address may give one content different tags

    def open(self) -> BinaryIO:
        return BufferedReader(RemoteStream(self.system.open(self.path, "rb"), self.name), READ_BYTES)


def stored_bytes(files: Sequence[DataFile]) -> int:
    """Return the length of the files as they are."""
    return sum(file.size for file in files)


def text_bytes(files: Sequence[DataFile]) -> int:
    """Return about how long the files are when they are read, for progress."""
    return sum(file.size * (GROWTH if file.suffixes.compression else 1) for file in files)


def list_files(source: DataSourceConfig) -> list[DataFile]:
    """The files of a source, sorted by path.

    Raises:
        DataError: nothing is there, or a folder on the way may not be read.
        ConfigError: a package that the URL needs is not installed.
        StorageFailed: the network or the server of a URL fails.
    """
    if source.path is None:
        found = _remote_files(source, str(source.url))
    else:
        try:
            found = _local_files(source, source.path)
        except PermissionError as error:
            raise DataError(f"data source {source.name}: {error.filename}: {error.strerror}") from error
    if not found:
        raise DataError(f"data source {source.name}: {source.place} holds no file")
    return found


def _local_files(source: DataSourceConfig, place: str) -> list[DataFile]:
    """Raises PermissionError for a folder that may not be read: what is in it would be left out without a word."""
    path = Path(place)
    if path.is_file():
        return [LocalFile(path)]
    if path.is_dir():
        found = (file for file in _files_below(path) if file.is_file())
    elif glob.has_magic(place):
        found = (file for file in _matches(path) if file.is_file())
    else:
        raise DataError(f"data source {source.name}: {place} does not exist; a file, folder or glob pattern is needed")
    return [LocalFile(file) for file in sorted(found)]


def _files_below(top: Path) -> Iterator[Path]:
    """Yield all below a folder that is no folder, without hidden ones."""
    for folder, folders, names in os.walk(top, onerror=_refuse_unread):  # `rglob` leaves such a folder out
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _refuse_unread(error: OSError) -> None:
    if Path(str(error.filename)).name != LOST_AND_FOUND:
        raise error


def _matches(pattern: Path) -> set[Path]:
    """Return what a glob pattern names, each path once."""
    start = Path(pattern.anchor)
    return set(_below_folder(start, pattern.relative_to(start).parts, frozenset({start.resolve()})))


def _below_folder(folder: Path, parts: tuple[str, ...], above: frozenset[Path]) -> Iterator[Path]:
    """Yield what the last `parts` of a pattern name in a folder. `above`: the folder and those on the way to it.

    A loop of symbolic links ends: `**` enters no folder that it is in. `glob` goes round until a path is too long.
    """
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _below_folder(folder, rest or ("*",), above)
    for name in _names(folder, "*" if first == "**" else first):
        found = folder / name
        if first != "**" and not rest:
            yield found
        elif found.is_dir() and not (first == "**" and found.resolve() in above):
            yield from _below_folder(found, parts if first == "**" else rest, above | {found.resolve()})


def _names(folder: Path, pattern: str) -> list[str]:
    """Return what a part of a pattern names in a folder. What is there by that very name is meant: a mount may be below
    `runs[2]`.
    """
    try:
        if (folder / pattern).exists():
            return [pattern]
        if glob.has_magic(pattern):
            os.scandir(folder).close()  # `glob` leaves out a folder that may not be read
    except PermissionError as error:
        if folder.name == LOST_AND_FOUND:
            return []
        raise PermissionError(error.errno, error.strerror, str(folder)) from error
    return glob.glob(pattern, root_dir=folder)  # noqa: PTH207  (Path.glob has hidden ones)


def _remote_files(source: DataSourceConfig, url: str) -> list[DataFile]:
    system, path = _open_system(source, url)
    with remote_errors(f"data source {source.name}: {url}"):
        if system.isfile(path):
            names = [path]
        elif glob.has_magic(path):
            names = [name for name in system.glob(path) if system.isfile(name)]
        elif system.isdir(path):
            names = [name for name in system.find(path) if not _hidden(_below(name, path))]
        else:
            raise DataError(f"data source {source.name}: {url} does not exist; a file, folder or glob is needed")
        return [RemoteFile(system, name, system.info(name)) for name in sorted(names)]


def _open_system(source: DataSourceConfig, url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises ConfigError where a package for it is missing."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"data source {source.name}: url {url} needs fsspec: install stoker[remote]") from error
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0]
        extra = {"s3": "stoker[s3]", "s3a": "stoker[s3]", "http": "stoker[remote]", "https": "stoker[remote]"}.get(
            scheme, f"the fsspec package for {scheme}"
        )
        raise ConfigError(f"data source {source.name}: url {url}: {error}; install {extra}") from error
    except ValueError as error:
        allowed = "s3://bucket/corpus, https://host/file, or another scheme of fsspec"
        raise ConfigError(f"data source {source.name}: url {url}: {error}; allowed: {allowed}") from error
    return system, str(path)


@contextmanager
def remote_errors(where: str) -> Iterator[None]:
    """Turn what a network or a server raises into StorageFailed with the place, which an operator retries."""
    try:
        yield
    except (DataError, ConfigError, StorageFailed):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:
        raise StorageFailed(f"{where}: {type(error).__name__}: {error}") from error


def _below(name: str, folder: str) -> Path:
    return Path(os.path.relpath(name, folder))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
