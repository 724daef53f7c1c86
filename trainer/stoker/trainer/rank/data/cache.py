"""The token cache that the ranks of a pod share: one writer at a time, names by content.

Called by `corpus` and `byte_bpe`. An entry never changes once it has its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from blake3 import blake3

from stoker.checkpoint.storage import path_in_errors
from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.files import DataFile, RemoteFile, remote_errors
from stoker.trainer.rank.data.percent import Report

POLL_S = 0.1
REPORT_S = 5.0
REPORT_BYTES = 64 << 20
"""Of hashed data between two reports, each of which is progress to the agent: hours of hashing are no hang."""
CHUNK_BYTES = 1 << 20
ASIDE = "part"
"""Ends the name of an entry that is being written."""
_LINE_BYTES = 200
"""Of the lock's file, which holds the last report of its holder."""


@contextlib.contextmanager
def cache_lock(folder: Path, report: Report, *, report_s: float = REPORT_S) -> Iterator[Report]:
    """Hold the cache's lock, one process of the machine at a time; yield the report of what is done under it.

    Those that wait report the last of its lines, every `report_s`. The kernel frees the lock when its holder dies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_lock(handle, report, report_s)
        with path_in_errors(folder):
            _tell(handle, "")  # else waiting processes would show the line of a holder that died
            yield partial(_tell_all, handle, report)
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, report: Report, report_s: float) -> None:
    reported = time.monotonic()
    while not _try_lock(handle):
        time.sleep(POLL_S)
        if time.monotonic() - reported >= report_s:
            reported = time.monotonic()
            report(f"WaitingForTokens {_told(handle)}".rstrip())


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each process does the work, under names of its own
        pass
    return True


def _tell_all(handle: int, report: Report, line: str) -> None:
    _tell(handle, line)
    report(line)


def _tell(handle: int, line: str) -> None:
    os.pwrite(handle, line.encode()[:_LINE_BYTES].ljust(_LINE_BYTES), 0)


def _told(handle: int) -> str:
    return os.pread(handle, _LINE_BYTES, 0).decode(errors="replace").strip()


def content_digest(files: list[DataFile], folder: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Digest of the files' contents in their order, without their names. `progress` gets the bytes read so far.

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
        digest = _read_digest(files, progress)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    write_whole(kept, digest.encode())
    return digest


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that appears with all of its content or not at all."""
    aside = aside_of(file)
    aside.write_bytes(content)
    aside.replace(file)


def aside_of(entry: Path) -> Path:
    """A new name beside an entry, under which it is written. Pods of other nodes have the same process ids."""
    return entry.with_name(f"{entry.name}.{secrets.token_hex(4)}.{ASIDE}")


def name_folder(aside: Path, folder: Path) -> None:
    """Give a written folder its name. What has it already is the same: another node wrote it, whom the lock does not
    reach.
    """
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)


def _read_digest(files: list[DataFile], progress: Callable[[int], None]) -> str:
    whole, done = blake3(), 0
    for file in files:
        with remote_errors(file.name) if isinstance(file, RemoteFile) else path_in_errors(Path(file.name)):
            one = blake3()
            for chunk in _chunks(file):
                one.update(chunk)
                done += len(chunk)
                if done % REPORT_BYTES < len(chunk):
                    progress(done)
            whole.update(one.digest())
    return whole.hexdigest()


def _chunks(file: DataFile) -> Iterator[bytes]:
    with file.open() as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
