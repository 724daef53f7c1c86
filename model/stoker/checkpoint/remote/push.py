"""Bring a model's folder to a hub, a bucket or a registry, and check what is there afterwards.

In a bucket the list of files with their hashes (`stoker-model.json`) is written first: until all of them are there, a
fetch is refused, where files alone would be taken for a folder that other tools have written. In a registry the
manifest makes a model, on the hub the commit does. A push that ends too early leaves nothing that looks whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.bucket_access import access_of
from stoker.checkpoint.bucket_storage import BucketStorage
from stoker.checkpoint.entries import MANIFEST_FILE
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointExists
from stoker.checkpoint.remote.access import access_variables
from stoker.checkpoint.remote.hub_model import DEFAULT_ENDPOINT, HubModel, hub_client, hub_errors
from stoker.checkpoint.remote.listing import (
    CHUNK_BYTES,
    INDEX_FILE,
    Environment,
    RemoteFile,
    checked_name,
    digest_of_listing,
    file_hash,
)
from stoker.checkpoint.remote.model_uri import ModelUri, parse_model_uri
from stoker.checkpoint.remote.registry_client import MANIFEST_TYPE, RegistryClient
from stoker.checkpoint.remote.registry_model import NAMES

ARTIFACT_TYPE = "application/vnd.stoker.model.v1"
FILE_TYPE = "application/octet-stream"
EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

OnFile = Callable[[RemoteFile], None]
"""Called before each file is sent."""


@dataclass(frozen=True)
class Pushed:
    """A model elsewhere."""

    uri: str
    """With the revision by which exactly these files can be fetched."""
    digest: str
    files: int
    bytes: int


def push_folder(
    folder: Path,
    uri: str,
    environment: Environment = os.environ,
    *,
    replace: bool = False,
    sent: OnFile = lambda _file: None,
) -> Pushed:
    """Send every file of a folder, then compare what arrived.

    Args:
        replace: take the place of another model below the same prefix of a bucket.

    Raises:
        CheckpointError: the URI is wrong, the folder is empty, or what arrived is not what was sent.
        OSError: the other side cannot be reached or refuses access.
    """
    wanted = parse_model_uri(uri)
    files = _files(folder)
    variables = access_variables(environment)
    if wanted.scheme == "hf":
        return _push_to_hub(folder, files, wanted, variables, sent)
    if wanted.scheme == "s3":
        return _push_to_bucket(folder, files, wanted, variables, replace, sent)
    return _push_to_registry(folder, files, wanted, variables, sent)


def _files(folder: Path) -> tuple[RemoteFile, ...]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    if not paths:
        raise CheckpointError(f"{folder} has no files to push")
    return tuple(
        RemoteFile(
            checked_name(str(path.relative_to(folder)), str(folder)),
            path.stat().st_size,
            sha256=file_hash(path, hashlib.sha256()),
        )
        for path in paths
        if path.name != INDEX_FILE
    )


def _is_hidden(path: Path) -> bool:
    """Whether a file is hidden, or in a hidden folder, as the hub's client and git keep beside a model."""
    return any(part.startswith(".") for part in path.parts)


def _pushed(uri: ModelUri, revision: str, digest: str, files: tuple[RemoteFile, ...]) -> Pushed:
    shown = str(ModelUri(uri.scheme, uri.place, revision))
    return Pushed(shown, digest, len(files), sum(file.bytes for file in files))


def _push_to_hub(
    folder: Path, files: tuple[RemoteFile, ...], uri: ModelUri, environment: Environment, sent: OnFile
) -> Pushed:
    client = hub_client(str(uri))
    api = client.HfApi(
        endpoint=environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, token=environment.get("HF_TOKEN") or False
    )
    with hub_errors(uri), _without_bars(client):
        for file in files:
            sent(file)  # one commit has all of them
        api.create_repo(uri.place, private=True, exist_ok=True)
        if uri.revision != "main":
            api.create_branch(uri.place, branch=uri.revision, exist_ok=True)
        commit = api.create_commit(
            uri.place,
            [client.CommitOperationAdd(file.name, str(folder / file.name)) for file in files],
            commit_message="Push a model by Stoker",
            revision=uri.revision,
        )
    with closing(HubModel(ModelUri("hf", uri.place, commit.oid), environment)) as there:
        names = {file.name for file in files}
        arrived = {file.name: file for file in there.listing(names.__contains__).files}
    for file in files:
        found = arrived.get(file.name)
        same = found is not None and found.bytes == file.bytes and _same_hash(found, file, folder / file.name)
        if not same and file.name.endswith((".safetensors", ".json")):
            raise CheckpointCorrupt(f"{uri}: {file.name} of commit {commit.oid} is not what was sent")
    return _pushed(uri, commit.oid, f"commit:{commit.oid}", files)


@contextmanager
def _without_bars(client: Any) -> Iterator[None]:
    """Keep the client's progress bars out of logs; on a terminal they are shown."""
    if sys.stderr.isatty() or client.utils.are_progress_bars_disabled():
        yield
        return
    client.utils.disable_progress_bars()
    try:
        yield
    finally:
        client.utils.enable_progress_bars()


def _same_hash(found: RemoteFile, sent: RemoteFile, path: Path) -> bool:
    if found.sha256 is not None:
        return found.sha256 == sent.sha256
    start = hashlib.sha1(f"blob {sent.bytes}\0".encode(), usedforsecurity=False)
    return found.git_sha1 in (None, file_hash(path, start))


def _push_to_bucket(
    folder: Path, files: tuple[RemoteFile, ...], uri: ModelUri, environment: Environment, replace: bool, sent: OnFile
) -> Pushed:
    root = Path(f"s3://{uri.place}")
    storage = BucketStorage(root.parts[1], access_of(uri.place, environment))
    there = storage.names(root)
    if there and not replace:
        raise CheckpointExists(f"{uri} is not empty ({', '.join(there[:3])}); --replace takes its place")
    if MANIFEST_FILE in there:
        raise CheckpointExists(
            f"{uri} is a checkpoint ({MANIFEST_FILE}), which no model replaces; push to another prefix"
        )
    _write_index(storage, root / INDEX_FILE, files)
    for file in files:
        sent(file)
        storage.remove_file(root / file.name)
        _upload(storage, folder / file.name, root / file.name)
    for file in files:
        if _hash_of_object(storage, root / file.name, file.bytes) != file.sha256:
            raise CheckpointCorrupt(f"{uri}: {file.name} is not what was sent")
    return _pushed(uri, "", digest_of_listing(files), files)


def _write_index(storage: BucketStorage, place: Path, files: tuple[RemoteFile, ...]) -> None:
    index = {"version": 1, "files": {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in files}}
    storage.remove_file(place)
    storage.put_new(place, json.dumps(index, indent=1, sort_keys=True).encode())


def _upload(storage: BucketStorage, source: Path, target: Path) -> None:
    sink = storage.create(target)
    try:
        with source.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                sink.write(memoryview(chunk))
        sink.sync()
    finally:
        sink.close()


def _hash_of_object(storage: BucketStorage, path: Path, size: int) -> str:
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for start in range(0, size, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, size - start)]
        hasher.update(chunk[: storage.read(path, start, chunk)])
    return hasher.hexdigest()


def _push_to_registry(
    folder: Path, files: tuple[RemoteFile, ...], uri: ModelUri, environment: Environment, sent: OnFile
) -> Pushed:
    registry, _, repository = uri.place.partition("/")
    if uri.revision.startswith("sha256:"):
        raise CheckpointError(f"{uri}: a push needs a tag; the digest follows from the files")
    with closing(RegistryClient(registry, repository, environment, writes=True)) as client:
        return _push_layers(folder, files, uri, client, sent)


def _push_layers(
    folder: Path, files: tuple[RemoteFile, ...], uri: ModelUri, client: RegistryClient, sent: OnFile
) -> Pushed:
    layers = []
    for file in files:
        sent(file)
        client.push_blob(f"sha256:{file.sha256}", folder / file.name)
        layers.append(_descriptor(FILE_TYPE, str(file.sha256), file.bytes) | {"annotations": {NAMES[0]: file.name}})
    empty = hashlib.sha256(EMPTY).hexdigest()
    client.push_blob(f"sha256:{empty}", EMPTY)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": _descriptor(EMPTY_TYPE, empty, len(EMPTY)),
        "layers": layers,
    }
    body = json.dumps(manifest, indent=1, sort_keys=True).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    client.push_manifest(uri.revision, body)
    arrived, _ = client.manifest(uri.revision)
    if arrived != digest:
        raise CheckpointCorrupt(f"{uri}: the registry has the manifest {arrived}, {digest} was sent")
    return _pushed(uri, digest, digest, files)


def _descriptor(media: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": size}
