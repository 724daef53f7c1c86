"""What a source of models offers: the list of a model's files, and one file at a time, from any offset."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError

Environment = Mapping[str, str]
INDEX_FILE = "stoker-model.json"
"""List of a pushed model's files with their sizes and sha256, where the store itself checks nothing."""
CHUNK_BYTES = 8 * 2**20
WRITTEN_BYTES = 256 * 2**10
"""Of a fetched file that are written at once: its size is the progress that others see."""
MAX_FILES = 10_000
_PLAIN = re.compile(r"[\w.+ -][\w.+ -]*")
_ALLOWED = "allowed: letters, digits, _ . + - and spaces between /, and no . at the start"


@dataclass(frozen=True)
class RemoteFile:
    """One file of a model elsewhere."""

    name: str
    """Path in the model's folder, with `/`."""
    bytes: int
    sha256: str | None = None
    git_sha1: str | None = None
    """Hash of a small file in a git repository."""
    key: str = ""
    """What the source calls it."""
    version: str = ""
    """Changes when the file does; it is part of the name under which an unfinished copy is kept."""


@dataclass(frozen=True)
class Listing:
    """A model as a source has it now."""

    digest: str
    """Names these files and no others: `sha256:...`, `commit:...` or `blake3:...`."""
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class RemoteSource(Protocol):
    """A model elsewhere."""

    def listing(self) -> Listing:
        """Return its files.

        Raises:
            CheckpointError: it does not exist, or is no model.
            OSError: it cannot be reached, or refuses access.
        """

    def fetch(self, file: RemoteFile, target: Path) -> None:
        """Write a file, going on where an unfinished copy at `target` ends.

        Raises:
            OSError: the source or the disk fails.
        """

    def check(self, folder: Path) -> None:
        """Check a whole folder, beyond the hashes of its files.

        Raises:
            CheckpointCorrupt: what is wrong.
        """

    def close(self) -> None:
        """End the client's connections."""


def checked_name(name: str, source: str) -> str:
    """Return a file's name that stays inside of the model's folder.

    Raises:
        CheckpointError: it is absolute, climbs, is hidden, or has odd characters.
    """
    parts = name.split("/")
    if not all(_PLAIN.fullmatch(part) and not part.startswith(".") for part in parts):
        raise CheckpointError(f"{source}: the file name {name!r} is not allowed; {_ALLOWED}")
    return name


def check_file(file: RemoteFile, path: Path) -> None:
    """Compare size and hash of a fetched file with the listing.

    Raises:
        CheckpointCorrupt: they differ.
    """
    size = path.stat().st_size
    if size != file.bytes:
        raise CheckpointCorrupt(f"{file.name} has {size} bytes, its source lists {file.bytes}")
    if file.sha256 is not None:
        _compare(file.name, "sha256", file_hash(path, hashlib.sha256()), file.sha256)
    elif file.git_sha1 is not None:
        start = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        _compare(file.name, "git hash", file_hash(path, start), file.git_sha1)


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def file_hash(path: Path, hasher: Hasher) -> str:
    """Return the hash of a file's bytes, added to what the hasher has."""
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def digest_of_listing(files: tuple[RemoteFile, ...]) -> str:
    """Return a digest over names, sizes and versions, for a store that has none of its own."""
    lines = "\n".join(sorted(f"{file.name} {file.bytes} {file.sha256 or file.version}" for file in files))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def append_to(target: Path, read_from: Callable[[int], object]) -> None:
    """Append chunks to a file; `read_from(offset)` yields them."""
    with target.open("ab") as stream:
        for chunk in read_from(stream.tell()):  # type: ignore[attr-defined]
            stream.write(chunk)


def _compare(name: str, kind: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise CheckpointCorrupt(f"{name} is damaged: its {kind} is {found}, its source lists {wanted}")
