"""Write files whole: after a crash or on a full disk a file has its old or its new content, never a part of it.

A sealed file begins with a line that holds the checksum of the rest, so that damage is found when it is read.

Called by the object store's files, the addresses and the supervisor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

SUFFIX = ".new"
"""Suffix of the temporary file; one that a crash left behind may be deleted."""
_SEAL = b'{"sha256":"'


class DamagedFile(ValueError):
    """A file does not hold what was written; the message explains the difference."""


def write_whole(file: Path, content: bytes) -> None:
    """Write to a temporary file, sync it, rename it, sync the folder.

    Raises:
        OSError: the old content is still there, and the temporary file is gone.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_name(file.name + SUFFIX)
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    except OSError as error:
        error.filename = error.filename or str(file)
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_folder(file.parent)


def remove_file(file: Path) -> None:
    """Delete a file durably; an absent one is no error."""
    try:
        file.unlink()
    except FileNotFoundError:
        return
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_aside(file: Path) -> Path:
    """Rename a damaged file to a free name that ends in `.damaged`, where nothing reads it, and return the new path."""
    number = 0
    while True:
        aside = file.with_name(f"{file.name}{f'.{number}' if number else ''}.damaged")
        if not aside.exists():
            break
        number += 1
    file.rename(aside)
    return aside


def seal(body: bytes) -> bytes:
    """Put a line with the checksum of `body` before it."""
    return _SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}\n' + body


def unseal(content: bytes) -> bytes:
    """Check a sealed file and return its body. Content without a seal, from an earlier version, is returned as it is.

    Raises:
        DamagedFile: the checksum does not match.
    """
    if not content.startswith(_SEAL):
        return content
    line, _, body = content.partition(b"\n")
    try:
        expected = json.loads(line)["sha256"]
    except (ValueError, KeyError, TypeError):
        raise DamagedFile("the line with the checksum cannot be read") from None
    if hashlib.sha256(body).hexdigest() != expected:
        raise DamagedFile("the checksum does not match the content")
    return body
