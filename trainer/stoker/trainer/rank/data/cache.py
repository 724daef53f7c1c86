"""The token cache that the ranks of a pod share: one writer at a time, names by content.

Called by `corpus` and `byte_bpe`. An entry never changes once it has its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from stoker.checkpoint.storage import path_in_errors
from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.files import DataFile, RemoteFile, remote_errors

POLL_S = 0.1
REPORT_S = 5.0


@contextlib.contextmanager
def cache_lock(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's lock, one process of the machine at a time. Waiting is reported.

    The kernel frees the lock when its holder dies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        reported = time.monotonic()
        while not _try_lock(handle.fileno()):
            time.sleep(POLL_S)
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                report("WaitingForTokens")
        with path_in_errors(folder):
            yield


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def content_digest(files: list[DataFile], folder: Path) -> str:
    """Digest of the files' contents in their order, without their names.

    Reading everything again at each start (and in each rank) would be slow, so the digest is kept in `folder` under the
    files' paths, sizes, times of change and inodes, or what a remote file system gives in their place. Where it gives
    nothing, the files are read each time.
    """
    try:
        identities = [file.identity for file in files]
        seen = blake3(json.dumps(identities).encode()).hexdigest()
        kept = folder / f"contents-{seen[:32]}.txt"
        if None not in identities and kept.is_file():
            return kept.read_text()
        digest = _read_digest(files)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    write_whole(kept, digest.encode())
    return digest


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that appears with all of its content or not at all."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.part")
    aside.write_bytes(content)
    aside.replace(file)


def _read_digest(files: list[DataFile]) -> str:
    whole = blake3()
    for file in files:
        with remote_errors(file.name) if isinstance(file, RemoteFile) else path_in_errors(Path(file.name)):
            whole.update(_file_digest(file))
    return whole.hexdigest()


def _file_digest(file: DataFile) -> bytes:
    one = blake3()
    with file.open() as stream:
        while chunk := stream.read(1 << 20):
            one.update(chunk)
    return one.digest()
