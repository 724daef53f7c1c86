"""Checkpoints and models in a real S3 server and a real registry of images, by the clients that engines have."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.servers.model_servers import ModelServer, bucket_server, registry_server
from stoker.checkpoint.errors import CheckpointError, CheckpointMissing
from stoker.checkpoint.remote.model_cache import fetch_model
from stoker.checkpoint.remote.push import push_folder

ROOT = Path(__file__).parents[2]
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 20_000}
"""A model of 5 MB: several pieces of an upload."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with bucket_server(tmp_path_factory.mktemp("s3"), "models", "stoker-test") as server:
        yield server


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with registry_server(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name, data in FILES.items():
        (tmp_path / "model" / name).write_bytes(data)
    return tmp_path / "model"


def fetched(uri: str, cache: Path, access: dict[str, str]) -> tuple[dict[str, bytes], str | None]:
    """The files of a model from a server, as they lie in a new cache, and its digest."""
    found = fetch_model(uri, cache, access)
    try:
        names = (path for path in found.path.iterdir() if not path.name.startswith("."))
        return {path.name: path.read_bytes() for path in names}, found.digest
    finally:
        os.close(found.lease)


def test_a_bucket_gives_back_what_was_pushed(bucket: ModelServer, folder: Path, tmp_path: Path) -> None:
    uri = f"s3://models/{secrets.token_hex(4)}/tiny"
    pushed = push_folder(folder, uri, bucket.access)
    assert fetched(pushed.uri, tmp_path / "cache", bucket.access) == (FILES, pushed.digest)
    with pytest.raises(CheckpointError, match=r"--replace takes its place"):
        push_folder(folder, uri, bucket.access)
    (folder / "config.json").write_bytes(b"{}")
    push_folder(folder, uri, bucket.access, replace=True)
    assert fetched(uri, tmp_path / "again", bucket.access)[0]["config.json"] == b"{}"
    with pytest.raises(CheckpointMissing):
        fetch_model("s3://models/none", tmp_path / "cache", bucket.access)
    with pytest.raises(PermissionError):
        fetch_model(uri, tmp_path / "third", {**bucket.access, "AWS_SECRET_ACCESS_KEY": "wrong"})


def test_a_registry_gives_back_what_was_pushed(registry: ModelServer, folder: Path, tmp_path: Path) -> None:
    uri = f"oci://{registry.place}/team/{secrets.token_hex(4)}:v1"
    with pytest.raises(PermissionError, match=r"it needs a user name and password"):
        push_folder(folder, uri, {})
    pushed = push_folder(folder, uri, registry.access)
    assert push_folder(folder, uri, registry.access).digest == pushed.digest, "the registry has these blobs"
    for number, name in enumerate((uri, pushed.uri)):
        assert fetched(name, tmp_path / str(number), registry.access) == (FILES, pushed.digest)
    with pytest.raises(CheckpointMissing, match=r"v2 does not exist"):
        fetch_model(f"{uri.rpartition(':')[0]}:v2", tmp_path / "third", registry.access)
    with pytest.raises(PermissionError, match=r"it needs a user name and password"):
        fetch_model(uri, tmp_path / "third", {**registry.access, "REGISTRY_PASSWORD": "wrong"})


def test_checkpoints_in_a_bucket_do_there_what_they_do_in_the_tests_own(bucket: ModelServer) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/checkpoint/test_bucket_storage.py",
    ]
    environment = {**os.environ, **bucket.access, "STOKER_TEST_S3": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout[-4000:]
