"""A model in a bucket: a Stoker checkpoint, a model that `push` wrote, a Hugging Face folder, or one GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.checkpoint.bucket_access import access_of
from stoker.checkpoint.bucket_storage import BucketStorage, open_store
from stoker.checkpoint.entries import MANIFEST_FILE
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from stoker.checkpoint.manifest_file import read_manifest
from stoker.checkpoint.remote.listing import (
    CHUNK_BYTES,
    INDEX_FILE,
    MAX_FILES,
    WRITTEN_BYTES,
    Environment,
    Listing,
    RemoteFile,
    append_to,
    checked_name,
    digest_of_listing,
)
from stoker.checkpoint.remote.model_uri import ModelUri
from stoker.checkpoint.verify import verify

MAX_INDEX_BYTES = 8 * 2**20


class BucketModel:
    """Objects below one prefix, or one object."""

    def __init__(self, uri: ModelUri, environment: Environment) -> None:
        """Open the client; nothing is sent."""
        self.uri = uri
        bucket, _, self._prefix = uri.place.partition("/")
        access = access_of(uri.place, environment)
        self._client, self._store = open_store(bucket, access)
        self._storage = BucketStorage(bucket, access)

    def listing(self) -> Listing:
        path = Path(f"s3://{self.uri.place}")
        with self._storage.errors(path):
            objects = self._objects()
        files = self._files(objects)
        names = {file.name for file in files}
        if not files:
            raise CheckpointMissing(f"{self.uri}: no objects below it")
        if MANIFEST_FILE in names:
            return Listing(f"blake3:{read_manifest(path, self._storage).digest}", files)
        index = next((file for file in files if file.name == INDEX_FILE), None)
        return self._indexed(index, files) if index else Listing(digest_of_listing(files), files)

    def fetch(self, file: RemoteFile, target: Path) -> None:
        with self._storage.errors(Path(f"s3://{self.uri.place}")):
            append_to(target, lambda offset: self._chunks(file, offset))

    def check(self, folder: Path) -> None:
        if (folder / MANIFEST_FILE).is_file():
            report = verify(folder)
            if not report.ok:
                raise CheckpointCorrupt(f"{self.uri}: {report.problems[0]}")

    def close(self) -> None:
        """The client ends with its last user."""

    def _objects(self) -> list[Any]:
        prefix = f"{self._prefix}/" if self._prefix else None
        pages = self._client.list(self._store, prefix, chunk_size=1000)
        found = list(islice((item for page in pages for item in page), MAX_FILES + 1))
        if len(found) > MAX_FILES:
            raise CheckpointError(f"{self.uri}: more than {MAX_FILES:,} objects are below it, too many for a model")
        if not found and self._prefix:
            try:
                return [self._client.head(self._store, self._prefix)]
            except FileNotFoundError:
                return []
        return found

    def _files(self, objects: list[Any]) -> tuple[RemoteFile, ...]:
        """The objects that are files of a model: none that is hidden, and none that a console made for a folder."""
        named = {self._name(found["path"]): found for found in objects}
        folders = {str(folder) for name in named for folder in PurePosixPath(name).parents}
        return tuple(
            self._file(name, found)
            for name, found in named.items()
            if not _is_hidden(name) and (found["size"] or (name not in folders and found["path"] != self._prefix))
        )

    def _name(self, key: str) -> str:
        if key == self._prefix:
            return key.rpartition("/")[2]
        return key.removeprefix(f"{self._prefix}/") if self._prefix else key

    def _file(self, name: str, found: Any) -> RemoteFile:
        etag = str(found.get("e_tag") or "").strip('"')
        return RemoteFile(checked_name(name, str(self.uri)), int(found["size"]), key=found["path"], version=etag)

    def _indexed(self, index: RemoteFile, files: tuple[RemoteFile, ...]) -> Listing:
        """The files that the index lists, each with its hash."""
        if index.bytes > MAX_INDEX_BYTES:
            raise CheckpointCorrupt(f"{self.uri}: {INDEX_FILE} has {index.bytes} bytes")
        with self._storage.errors(Path(f"s3://{self.uri.place}")):
            body = bytes(self._client.get(self._store, index.key).bytes())
        try:
            listed = {name: (int(one["bytes"]), str(one["sha256"])) for name, one in json.loads(body)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{self.uri}: {INDEX_FILE} is no list of files with bytes and sha256") from error
        by_name = {file.name: file for file in files}
        if missing := listed.keys() - by_name.keys():
            raise CheckpointCorrupt(f"{self.uri}: {', '.join(sorted(missing)[:3])} of {INDEX_FILE} is missing")
        for name, (size, _) in sorted(listed.items()):
            if (found := by_name[name].bytes) != size:
                raise CheckpointCorrupt(f"{self.uri}: {name} has {found} bytes, {INDEX_FILE} lists {size}")
        kept = tuple(
            RemoteFile(name, size, sha256=sha256, key=by_name[name].key, version=by_name[name].version)
            for name, (size, sha256) in sorted(listed.items())
        )
        return Listing(digest_of_listing(kept), kept)

    def _chunks(self, file: RemoteFile, offset: int) -> Iterator[memoryview]:
        """Read an object from an offset as it arrives; one that was replaced meanwhile is refused by its version."""
        while offset < file.bytes:
            end = min(offset + CHUNK_BYTES, file.bytes)
            options = {"range": (offset, end), **({"if_match": f'"{file.version}"'} if file.version else {})}
            arriving = self._client.get(self._store, file.key, options=options).stream(min_chunk_size=WRITTEN_BYTES)
            for chunk in arriving:
                part = memoryview(chunk).cast("B")
                yield part
                offset += len(part)


def _is_hidden(name: str) -> bool:
    """Whether a file is hidden, or in a hidden folder, as the hub's client and git keep beside a model."""
    return any(part.startswith(".") for part in name.split("/"))
