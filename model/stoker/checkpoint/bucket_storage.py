"""Checkpoints in a bucket with the S3 protocol, behind the interface of `storage`.

`s3://bucket/prefix` as a path is `Path("s3:/bucket/prefix")`. A bucket has no folders and cannot rename many objects at
once, so a save is written straight below its final name and **its manifest's object is the commit**: it is written
last, and only if it does not exist. What the hidden folders of a file system mean is mapped onto keys:

=========================================  ========================================================
path                                       key below the prefix
=========================================  ========================================================
`step-N.W/file`                            the same
`.staging-step-N.W-xxxxxxxx/file`          `step-N.W/file`: without a manifest it is no checkpoint
`.deleting-step-N.W/manifest.json`         the same: a copy, made before the manifest is removed
`.deleting-step-N.W/file`                  `step-N.W/file`
=========================================  ========================================================

A file is one object and appears when its upload is complete: a connection that is lost leaves nothing, or parts of an
upload that only a lifecycle rule of the bucket removes. Requests are tried again by the client (obstore). There are no
locks. `bucket_access` finds endpoint, region and credentials.
"""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from stoker.checkpoint.bucket_access import BucketAccess, access_of
from stoker.checkpoint.bucket_errors import as_os_error
from stoker.checkpoint.entries import MANIFEST_FILE
from stoker.checkpoint.errors import CheckpointError, StorageUnusable
from stoker.checkpoint.file_lock import ReadLock
from stoker.checkpoint.storage import Sink

SCHEME = "s3:"
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Parts of one object on their way; each is in memory."""
CONNECT_S, REQUEST_S = 10, 120
RETRIES, RETRY_S = 100, 60
"""Further tries of one request, and its longest time with them. The time ends them: so long a server may be away."""
BACKOFF_BASE = 3
"""The client waits a random time between the first delay and this times the last: at 2 the delays hardly grow."""

_STAGING = re.compile(r"\.staging-(step-[0-9]{8,12}\.[0-9a-f]{8})-[0-9a-f]{8}")
_DELETING = re.compile(r"\.deleting-(step-[0-9]{8,12}\.[0-9a-f]{8})")
_STEP = re.compile(r"step-[0-9]{8,12}\.[0-9a-f]{8}")


def is_bucket_path(path: Path) -> bool:
    """Whether a path names a bucket: `s3://bucket/prefix`, of which `Path` makes `s3:/bucket/prefix`."""
    return path.parts[:1] == (SCHEME,)


class BucketStorage:
    """One bucket."""

    has_locks = False

    def __init__(self, bucket: str, access: BucketAccess | None = None, retries: int = RETRIES) -> None:
        """Open the client; nothing is sent. Without `access` the environment says how to reach the bucket.

        Raises:
            StorageUnusable: the package obstore is missing.
            PermissionError: credentials cannot be read.
        """
        self._client, self._store = open_store(bucket, access or access_of(bucket, os.environ), retries)
        self._bucket = bucket

    def create(self, path: Path) -> Sink:
        if path.name == MANIFEST_FILE:
            return ManifestSink(self, path)
        if self._exists(path):
            raise FileExistsError(errno.EEXIST, "the object exists", str(path))
        return ObjectSink(self, path)

    def read(self, path: Path, offset: int, out: memoryview) -> int:
        length = min(len(out), self.size(path) - offset)
        if length <= 0:
            return 0
        with self.errors(path):
            data = memoryview(self._client.get_range(self._store, self.key(path), start=offset, length=length))
        out[: len(data)] = data.cast("B")
        return len(data)

    def size(self, path: Path) -> int:
        with self.errors(path):
            return int(self._client.head(self._store, self.key(path))["size"])

    def modified(self, path: Path) -> float:
        with self.errors(path):
            return float(self._client.head(self._store, self.key(path))["last_modified"].timestamp())

    def folders(self, folder: Path) -> list[str]:
        files: dict[str, set[str]] = defaultdict(set)
        for key in self._keys(folder):
            first, _, rest = key.partition("/")
            if rest:
                files[first].add(rest)
        return sorted(filter(None, (_folder_name(name, files) for name in files)))

    def names(self, folder: Path) -> list[str]:
        found = {key.partition("/")[0] for key in self._keys(self._data_folder(folder))}
        if _DELETING.fullmatch(folder.name):
            found.discard(MANIFEST_FILE)
            found |= {key for key in self._keys(folder) if key == MANIFEST_FILE}
        return sorted(found)

    def make_folder(self, folder: Path) -> None:
        """A bucket has no folders."""

    def rename(self, source: Path, target: Path) -> None:
        if _STAGING.fullmatch(source.name):
            return  # its files have their final names, and the manifest has made it visible
        if _DELETING.fullmatch(target.name):
            self._hide(source, target)
        elif not _DELETING.fullmatch(source.name):  # files behind a delete that belong to no folder stay where they are
            self._move(source, target)

    def sync_folder(self, folder: Path) -> None:
        """An object is durable when its upload is complete."""

    def lock_shared(self, path: Path) -> ReadLock | None:  # noqa: ARG002  a bucket has no locks
        return None

    def lock_exclusive(self, path: Path) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def hold(self, folder: Path) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def remove_file(self, path: Path) -> None:
        with self.errors(path), self._missing_is_fine():
            self._client.delete(self._store, self.key(path))

    def remove_folder(self, folder: Path) -> None:
        """A bucket has no folders."""

    def key(self, path: Path) -> str:
        """The key of a file."""
        folder, name = path.parent, path.name
        is_copy = name == MANIFEST_FILE and _DELETING.fullmatch(folder.name)
        return self._key_of_folder(folder if is_copy else self._data_folder(folder), name)

    def put_new(self, path: Path, data: bytes) -> None:
        """Write an object that does not exist.

        A try that was carried out and whose answer was lost counts as success.

        Raises:
            FileExistsError: it exists with other contents.
        """
        key = self.key(path)
        with self.errors(path):
            try:
                self._client.put(self._store, key, data, mode="create", use_multipart=False)
            except self._client.exceptions.AlreadyExistsError as error:
                if bytes(self._client.get(self._store, key).bytes()) != data:
                    raise FileExistsError(errno.EEXIST, "the object exists", str(path)) from error

    def open_upload(self, path: Path) -> Any:
        """Return a writer whose object appears when it is closed."""
        with self.errors(path):
            options = {"buffer_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
            return self._client.open_writer(self._store, self.key(path), **options)

    @contextmanager
    def errors(self, path: Path) -> Iterator[None]:
        """Turn the client's errors into OSError with the object's place."""
        try:
            yield
        except self._client.exceptions.BaseError as error:
            raise as_os_error(error, self._place(path)) from error
        except OSError as error:
            if error.errno is not None:  # of this machine, or of here
                raise
            raise as_os_error(error, self._place(path)) from error  # uploads raise Python's own, with a text alone

    def _place(self, path: Path) -> str:
        """A file or folder as people write it. The bucket itself has no key."""
        key = self.key(path) if len(path.parts) > 2 else ""
        return f"s3://{self._bucket}/{key}".rstrip("/")

    @contextmanager
    def _missing_is_fine(self) -> Iterator[None]:
        try:
            yield
        except (self._client.exceptions.NotFoundError, FileNotFoundError):
            return

    def _exists(self, path: Path) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def _hide(self, folder: Path, hidden: Path) -> None:
        """Copy the manifest, then remove it: from then on the folder is no checkpoint."""
        source, target = self.key(folder / MANIFEST_FILE), self.key(hidden / MANIFEST_FILE)
        with self.errors(folder):
            self._client.copy(self._store, source, target)
            self._client.delete(self._store, source)

    def _move(self, source: Path, target: Path) -> None:
        with self.errors(source):
            self._client.copy(self._store, self.key(source), self.key(target))
            self._client.delete(self._store, self.key(source))

    def _keys(self, folder: Path) -> list[str]:
        """Keys below a folder as it is named, without its prefix."""
        prefix = self._key_of_folder(folder, "")
        with self.errors(folder):
            pages = self._client.list(self._store, prefix or None, chunk_size=1000)
            return [item["path"].removeprefix(prefix) for page in pages for item in page]

    def _data_folder(self, folder: Path) -> Path:
        """The folder whose keys hold the files of a hidden one."""
        match = _STAGING.fullmatch(folder.name) or _DELETING.fullmatch(folder.name)
        return folder if match is None else folder.with_name(match[1])

    def _key_of_folder(self, folder: Path, name: str) -> str:
        if not is_bucket_path(folder) or folder.parts[1:2] != (self._bucket,) or ".." in folder.parts:
            raise CheckpointError(f"{folder} is not a folder of the bucket {self._bucket}")
        return "/".join([*folder.parts[2:], name])


class ObjectSink:
    """An object that is uploaded in parts while it is written."""

    def __init__(self, storage: BucketStorage, path: Path) -> None:
        self._storage, self._path = storage, path
        self._writer = storage.open_upload(path)

    def write(self, data: memoryview) -> None:
        with self._storage.errors(self._path):
            for start in range(0, len(data), PART_BYTES):
                self._writer.write(data[start : start + PART_BYTES])

    def sync(self) -> None:
        """Complete the upload: nothing can be written any more."""
        with self._storage.errors(self._path):
            self._writer.close()
        self._writer = None

    def close(self) -> None:
        """Give an upload up that is not complete: no object appears."""
        self._writer = None


class ManifestSink:
    """The manifest: one request, which a manifest that exists refuses."""

    def __init__(self, storage: BucketStorage, path: Path) -> None:
        self._storage, self._path = storage, path
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def sync(self) -> None:
        self._storage.put_new(self._path, bytes(self._data))

    def close(self) -> None:
        self._data.clear()


def open_store(bucket: str, access: BucketAccess, retries: int = RETRIES) -> tuple[Any, Any]:
    """Return the client's module and a bucket of it.

    Raises:
        StorageUnusable: the package obstore is missing.
        PermissionError: credentials cannot be read.
    """
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise StorageUnusable(f"s3://{bucket} needs the package obstore: pip install 'stoker[bucket]'") from error
    config: dict[str, Any] = {"region": access.region, **dict(access.given)}
    if access.endpoint:
        config |= {"endpoint": access.endpoint.rstrip("/"), "virtual_hosted_style_request": False}
    if access.credentials is not None:
        access.read_credentials()  # what is missing is told now, with its name
        config["credential_provider"] = access.read_credentials
    options: Any = {
        "allow_http": bool(access.endpoint and access.endpoint.startswith("http://")),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    patience: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=RETRY_S),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": BACKOFF_BASE,
        },
    }
    return obstore, S3Store(bucket, client_options=options, retry_config=patience, **config)


def _folder_name(name: str, files: Mapping[str, set[str]]) -> str | None:
    """What a file system would call the folder, from the objects that are there; None: it has no name of its own."""
    hidden = _DELETING.fullmatch(name)
    if hidden:
        is_visible = MANIFEST_FILE in files.get(hidden[1], ())  # the copy was made, and nothing was removed yet
        return None if is_visible else name
    if not _STEP.fullmatch(name) or MANIFEST_FILE in files[name]:
        return name
    return None if f".deleting-{name}" in files else f".staging-{name}-00000000"
