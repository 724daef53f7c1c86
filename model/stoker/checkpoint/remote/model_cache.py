"""The folder of a machine with models from elsewhere: each fetched once, whole and checked, for all processes.

```
<cache>/<name>-<digest>/           a model: its files, and `.stoker-fetched.json` with URI and digest
<cache>/<name>-<digest>.partial/   one that is being fetched, or the rest of a fetch that ended too early
<cache>/<name>-<digest>.lock       held while it is fetched (exclusive) and while it is used (shared)
```

A fetch that ends too early is continued by the next one. Several processes that need the same model wait for the one
that fetches it, and report its progress; if that one dies, the next goes on. A file is checked against the hash that
its source lists before it gets its name, and the folder gets its name last. Where the disk has no room, models that no
process uses are removed, the one that was not used for the longest time first.

`fetch_model` is called by engines, trainers and `stoker checkpoint pull`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.remote.access import access_variables
from stoker.checkpoint.remote.listing import Environment, Listing, RemoteFile, RemoteSource, check_file
from stoker.checkpoint.remote.model_uri import ModelUri, parse_model_uri
from stoker.checkpoint.remote.open_source import open_source

MARKER = ".stoker-fetched.json"
FILES_AT_ONCE = 4
POLL_S = 0.2
"""Between two looks at another process's progress."""
SPARE_BYTES = 64 * 2**20
"""Room that a fetch leaves on the disk."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes in all."""
FreeBytes = Callable[[Path], int]
OpenSource = Callable[[ModelUri, Environment], RemoteSource]


@dataclass(frozen=True)
class FetchedModel:
    """A model on this machine."""

    path: Path
    """The model's folder, or its GGUF file."""
    digest: str
    """What its source has under the URI: `sha256:...`, `commit:...` or `blake3:...`."""
    bytes: int
    lease: int
    """Open file with a shared lock: the folder stays while it is open, which is until the process ends."""


def default_cache(environment: Environment = os.environ) -> Path:
    """The user's cache: `STOKER_MODEL_CACHE`, or a folder below that of XDG."""
    given = environment.get("STOKER_MODEL_CACHE")
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "stoker" / "fetched"


def fetch_model(
    uri: str,
    cache: Path | None = None,
    environment: Environment = os.environ,
    progress: OnProgress = lambda _done, _total: None,
    *,
    opened: OpenSource = open_source,
    free_bytes: FreeBytes = lambda folder: shutil.disk_usage(folder).free,
) -> FetchedModel:
    """Bring a model into a cache (default: the user's), or find it there.

    Raises:
        CheckpointError: the URI is wrong, the model is missing, damaged or no model.
        OSError: the source cannot be reached or refuses access, or the disk is full, with sizes in the message.
    """
    wanted = parse_model_uri(uri)
    with closing(opened(wanted, access_variables(environment))) as source:
        return _fetch(wanted, source, cache or default_cache(environment), progress, free_bytes)


def _fetch(
    wanted: ModelUri, source: RemoteSource, cache: Path, progress: OnProgress, free_bytes: FreeBytes
) -> FetchedModel:
    listing = source.listing()
    cache.mkdir(parents=True, exist_ok=True)
    entry = _Entry(cache, wanted, listing)
    lock = os.open(entry.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    try:
        entry.take(lock, progress)
        if not entry.complete:
            with entry.reported(progress):
                entry.fetch(source, free_bytes)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(entry.folder / MARKER)
    except BaseException:
        os.close(lock)
        raise
    progress(listing.bytes, listing.bytes)
    return FetchedModel(_model_path(entry.folder, listing), listing.digest, listing.bytes, lock)


class _Entry:
    """The place of one model in the cache."""

    def __init__(self, cache: Path, uri: ModelUri, listing: Listing) -> None:
        self.uri, self.listing = uri, listing
        name = f"{re.sub(r'[^a-z0-9.-]+', '-', uri.name.lower())[:64]}-{listing.digest.partition(':')[2][:24]}"
        self.folder = cache / name
        self.partial = cache / f"{name}.partial"
        self.lock_file = cache / f"{name}.lock"

    @property
    def complete(self) -> bool:
        return (self.folder / MARKER).is_file()

    def take(self, lock: int, progress: OnProgress) -> None:
        """Wait for the lock: shared where the model is there, else exclusive."""
        while True:
            kind = fcntl.LOCK_SH if self.complete else fcntl.LOCK_EX
            with suppress(BlockingIOError):
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                if kind == fcntl.LOCK_EX or self.complete:
                    return
                fcntl.flock(lock, fcntl.LOCK_UN)  # removed meanwhile
            progress(self.fetched_bytes(), self.listing.bytes)
            time.sleep(POLL_S)

    def fetch(self, source: RemoteSource, free_bytes: FreeBytes) -> None:
        """Fetch what is missing, check everything, give the folder its name."""
        self.partial.mkdir(exist_ok=True)
        missing = [file for file in self.listing.files if not (self.partial / file.name).is_file()]
        self._make_room(free_bytes)
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="fetch") as threads:
                for done in [threads.submit(self._fetch_file, source, file) for file in missing]:
                    done.result()
            source.check(self.partial)
            self._publish()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._full(free_bytes(self.folder.parent)) from error

    def fetched_bytes(self) -> int:
        """Bytes of the files that are there, finished or not."""
        total = 0
        for parent, _, names in os.walk(self.partial):
            for name in names:
                with suppress(OSError):
                    total += (Path(parent) / name).stat().st_size
        return min(total, self.listing.bytes)

    @contextmanager
    def reported(self, progress: OnProgress) -> Iterator[None]:
        """Report the progress beside the work."""
        ended = threading.Event()

        def report() -> None:
            while not ended.wait(POLL_S):
                progress(self.fetched_bytes(), self.listing.bytes)

        reporter = threading.Thread(target=report, name="fetch-progress", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _fetch_file(self, source: RemoteSource, file: RemoteFile) -> None:
        final = self.partial / file.name
        final.parent.mkdir(parents=True, exist_ok=True)
        unfinished = final.with_name(f"{final.name}.part-{file.version[:16]}")
        source.fetch(file, unfinished)
        if file.bytes == 0:
            unfinished.touch()
        try:
            check_file(file, unfinished)
        except CheckpointCorrupt:
            unfinished.unlink(missing_ok=True)  # a further try starts anew
            raise
        _sync(unfinished)
        unfinished.rename(final)

    def _publish(self) -> None:
        listed = {file.name for file in self.listing.files}
        for path in sorted(self.partial.rglob("*"), reverse=True):
            if path.is_file() and str(path.relative_to(self.partial)) not in listed:
                path.unlink()
            elif path.is_dir():
                with suppress(OSError):
                    path.rmdir()
        facts = {"uri": str(self.uri), "digest": self.listing.digest, "bytes": self.listing.bytes}
        (self.partial / MARKER).write_text(json.dumps(facts))
        _sync(self.partial / MARKER)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.partial.rename(self.folder)

    def _make_room(self, free_bytes: FreeBytes) -> None:
        """Remove unused models until the rest fits.

        Raises:
            OSError: it does not fit.
        """
        cache = self.folder.parent
        for other in _unused_first(cache, self.folder.name):
            if self._fits(free_bytes(cache)):
                return
            _remove_unused(other)
        if not self._fits(free := free_bytes(cache)):
            raise self._full(free)

    def _fits(self, free: int) -> bool:
        return self.listing.bytes - self.fetched_bytes() + SPARE_BYTES <= free

    def _full(self, free: int) -> OSError:
        missing = self.listing.bytes - self.fetched_bytes()
        text = f"no room for {self.uri}: {missing / 1e9:.2f} GB are missing, {free / 1e9:.2f} GB are free"
        return OSError(errno.ENOSPC, text, str(self.folder.parent))


def _unused_first(cache: Path, but: str) -> list[Path]:
    """Other entries, the one that was used last at the end. Folders that no fetch has made are left alone."""
    entries = {path.parent for path in cache.glob(f"*/{MARKER}")} | set(cache.glob("*.partial"))
    found = [path for path in entries if path.name.removesuffix(".partial") != but]
    return sorted(found, key=lambda path: (path / MARKER if (path / MARKER).exists() else path).stat().st_mtime)


def _remove_unused(entry: Path) -> None:
    """Remove an entry that no process holds."""
    lock = os.open(entry.parent / f"{entry.name.removesuffix('.partial')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (entry / MARKER).unlink(missing_ok=True)  # from here on it is not complete
            shutil.rmtree(entry, ignore_errors=True)
    finally:
        os.close(lock)


def _model_path(folder: Path, listing: Listing) -> Path:
    """The folder, or the only file of a GGUF model."""
    names = [file.name for file in listing.files]
    return folder / names[0] if len(names) == 1 and names[0].endswith(".gguf") else folder


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
