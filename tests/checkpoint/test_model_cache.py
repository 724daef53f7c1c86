"""Models from elsewhere: parsed URIs, one fetch for all, resumed, checked, with room made for them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from stoker.checkpoint.remote import bucket_model
from stoker.checkpoint.remote.access import access_variables
from stoker.checkpoint.remote.listing import Listing, RemoteFile
from stoker.checkpoint.remote.model_cache import SPARE_BYTES, FetchedModel, fetch_model
from stoker.checkpoint.remote.model_uri import is_model_uri, model_name, parse_model_uri
from stoker.checkpoint.remote.push import push_folder
from stoker.checkpoint.remote.registry_client import host_of, is_on_this_machine, login_of
from testing.checkpoint.hub_server import TOKEN, HubServer
from testing.checkpoint.registry_server import RegistryServer
from testing.checkpoint.s3_server import S3Server

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(300_000),
}
DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("text", "scheme", "place", "revision"),
    [
        ("hf://org/model", "hf", "org/model", "main"),
        ("hf://org/Model-1.5@refs/pr/3", "hf", "org/Model-1.5", "refs/pr/3"),
        ("s3://bucket/a/b/", "s3", "bucket/a/b", ""),
        ("oci://localhost:5000/team/model", "oci", "localhost:5000/team/model", "latest"),
        ("oci://reg.example/model:v1", "oci", "reg.example/model", "v1"),
        (f"oci://reg.example/model:v1@sha256:{DIGEST}", "oci", "reg.example/model", f"sha256:{DIGEST}"),
    ],
)
def test_uris(text: str, scheme: str, place: str, revision: str) -> None:
    found = parse_model_uri(text)
    assert (found.scheme, found.place, found.revision) == (scheme, place, revision)
    assert parse_model_uri(str(found)) == found
    assert is_model_uri(text)
    assert model_name(text) == place.rpartition("/")[2]


@pytest.mark.parametrize(
    "text", ["hf://model", "hf://a/b/c", "s3://", "s3://b/../c", "oci://reg.example", "oci://r/M", "ftp://a/b", "/a"]
)
def test_other_uris_are_refused_with_the_forms_that_are_allowed(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"names no model; allowed: hf://ORG"):
        parse_model_uri(text)


@dataclass
class Source:
    """A source in this process that may break."""

    files: dict[str, bytes]
    breaks_after: int | None = None
    damages: bool = False
    fetched: list[tuple[str, int]] = field(default_factory=list)

    def listing(self) -> Listing:
        found = (
            RemoteFile(name, len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in self.files.items()
        )
        files = tuple(found)
        text = "".join(f"{file.name}{file.sha256}" for file in files)
        return Listing(f"sha256:{hashlib.sha256(text.encode()).hexdigest()}", files)

    def fetch(self, file: RemoteFile, target: Path) -> None:
        start = target.stat().st_size if target.exists() else 0
        self.fetched.append((file.name, start))
        data = self.files[file.name]
        end = len(data) if self.breaks_after is None else min(len(data), start + self.breaks_after)
        with target.open("ab") as stream:
            stream.write(bytes(end - start) if self.damages else data[start:end])
        if end < len(data):
            raise ConnectionError("cut")

    def check(self, folder: Path) -> None:
        assert folder.is_dir()

    def close(self) -> None:
        """Nothing is open."""


def fetch(
    source: Source, cache: Path, uri: str = "hf://org/model", free: int = 1 << 40, **more: object
) -> FetchedModel:
    return fetch_model(uri, cache, {}, opened=lambda *_: source, free_bytes=lambda _: free, **more)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_fetch_that_breaks_goes_on_where_it_ended_and_is_not_there_before(tmp_path: Path) -> None:
    source = Source(dict(FILES), breaks_after=100_000)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            fetch(source, tmp_path)
        assert not [path for path in tmp_path.iterdir() if path.is_dir() and not path.name.endswith(".partial")]
    seen: list[tuple[int, int]] = []
    found = fetch(source, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert content(found.path) == FILES
    assert [start for name, start in source.fetched if name == "model.safetensors"] == [0, 100_000, 200_000]
    assert [start for name, start in source.fetched if name == "config.json"] == [0]
    total = sum(map(len, FILES.values()))
    assert (seen[-1], found.bytes) == ((total, total), total)
    again = fetch(source, tmp_path)
    assert (again.path, again.digest) == (found.path, found.digest)
    assert len(source.fetched) == 5, "it is there"
    for one in (found, again):
        os.close(one.lease)


def test_damage_is_refused_by_name_and_fetched_anew(tmp_path: Path) -> None:
    source = Source(dict(FILES), damages=True)
    with pytest.raises(CheckpointCorrupt, match=r"is damaged: its sha256 is"):
        fetch(source, tmp_path)
    source.damages = False
    found = fetch(source, tmp_path)
    assert content(found.path) == FILES
    os.close(found.lease)


def test_of_several_that_need_one_model_one_fetches_it(tmp_path: Path) -> None:
    source = Source(dict(FILES))
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: fetch(source, tmp_path), range(6)))
    assert len({one.path for one in found}) == 1
    assert sorted(name for name, _ in source.fetched) == sorted(FILES)
    for one in found:
        os.close(one.lease)


def test_who_waits_reports_the_progress_of_who_fetches_and_goes_on_if_that_ends(tmp_path: Path) -> None:
    source = Source(dict(FILES))
    listing = source.listing()
    name = f"model-{listing.digest.partition(':')[2][:24]}"
    (tmp_path / f"{name}.partial").mkdir()
    (tmp_path / f"{name}.partial" / "config.json").write_bytes(FILES["config.json"])
    held = os.open(tmp_path / f"{name}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    waited = threading.Event()
    seen: list[int] = []

    def progress(done: int, _total: int) -> None:
        seen.append(done)
        waited.set()

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(fetch, source, tmp_path, progress=progress)
        assert waited.wait(60)
        os.close(held)
        os.close(found.result(60).lease)
    assert seen[0] == len(FILES["config.json"])
    assert "config.json" not in [name for name, _ in source.fetched]


def test_a_full_disk_is_told_in_figures_and_unused_models_make_room(tmp_path: Path) -> None:
    old, used = Source({"model.safetensors": b"o" * 1000}), Source({"model.safetensors": b"u" * 1000})
    os.close(fetch(old, tmp_path, "hf://org/old").lease)
    kept = fetch(used, tmp_path, "hf://org/used")
    write(tmp_path / "by-hand", FILES)
    source = Source(dict(FILES))
    with pytest.raises(
        OSError, match=r"no room for hf://org/model@main: 0.00 GB are missing, 0.00 GB are free"
    ) as error:
        fetch(source, tmp_path, free=1000)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert not source.fetched
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir() if path.is_dir()) == [
        "by",
        "model",
        "used",
    ]
    os.close(kept.lease)
    need = sum(map(len, FILES.values())) + SPARE_BYTES
    found = fetch(source, tmp_path, free=need)
    assert kept.path.is_dir(), "there was room"
    os.close(found.lease)


def test_a_disk_that_fills_up_meanwhile_is_told_too(tmp_path: Path) -> None:
    source = Source(dict(FILES))
    source.fetch = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"no room for hf://org/model@main"):
        fetch(source, tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", ".hidden", ""])
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    layers = [{"digest": f"sha256:{DIGEST}", "size": 1, "annotations": {"org.opencontainers.image.title": name}}]
    with RegistryServer() as registry:
        registry.manifests["m:latest"] = json.dumps({"layers": layers}).encode()
        with pytest.raises(CheckpointError, match=r"is not allowed|has no name"):
            fetch_model(f"oci://{registry.place}/m", tmp_path, registry.login)


# The hub


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def test_a_revision_of_the_hub_is_fetched_at_its_commit_with_the_token(hub: HubServer, tmp_path: Path) -> None:
    files = {**FILES, "model.safetensors": os.urandom(12 << 20)}
    first = hub.add("org/model", {**files, "pytorch_model.bin": b"no", "README.md": b"no"}, private=True)
    access = tmp_path / "access"
    access.mkdir()
    (access / "HF_TOKEN").write_text(f"{TOKEN}\n")
    variables = {"HF_ENDPOINT": hub.endpoint, "STOKER_MODEL_ACCESS": str(access)}
    hub.cut_after = 11 << 20  # the client goes on by itself
    found = fetch_model("hf://org/model", tmp_path / "cache", variables)
    assert (found.digest, content(found.path)) == (f"commit:{first}", files)
    assert [one for one in hub.fetched if one.startswith("model.")] == [
        "model.safetensors from 0",
        f"model.safetensors from {11 << 20}",
    ]
    second = hub.add("org/model", {"config.json": b'{"model_type": "qwen3"}'})
    newer = fetch_model("hf://org/model", tmp_path / "cache", variables)
    assert (newer.digest, newer.path != found.path) == (f"commit:{second}", True)
    for one in (found, newer):
        os.close(one.lease)

    with pytest.raises(CheckpointMissing, match=r"org/model@main does not exist, or is private"):
        fetch_model("hf://org/model", tmp_path / "cache", {"HF_ENDPOINT": hub.endpoint})
    with pytest.raises(ConnectionError, match=r"hf://org/model@main cannot be reached"):
        fetch_model("hf://org/model", tmp_path / "cache", {"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(CheckpointMissing, match=r"the revision v9 does not exist"):
        fetch_model("hf://org/model@v9", tmp_path / "cache", variables)
    hub.add("org/empty", {"config.json": b"{}"})
    with pytest.raises(CheckpointError, match=r"no .safetensors file"):
        fetch_model("hf://org/empty", tmp_path / "cache", variables)


# Registries and buckets


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_registry_gives_back_what_was_pushed_and_goes_on_with_a_blob_that_broke_off(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    with RegistryServer() as registry:
        uri = f"oci://{registry.place}/team/model:v1"
        with pytest.raises(PermissionError, match=r"no token|refuses access"):
            push_folder(folder, uri, {})
        pushed = push_folder(folder, uri, registry.login)
        assert (pushed.files, pushed.bytes) == (3, sum(map(len, FILES.values())))
        registry.cut_after = 120_000
        for name in (uri, pushed.uri):
            found = fetch_model(name, tmp_path / name.rpartition("/")[2].replace(":", "-"), registry.login)
            assert (found.digest, content(found.path)) == (pushed.digest, FILES)
            os.close(found.lease)
        digest = f"sha256:{hashlib.sha256(FILES['model.safetensors']).hexdigest()}"
        assert [start for one, start in registry.fetched if one == digest][:4] == [0, 120_000, 240_000, 0]
        registry.blobs[digest] = bytes(300_000)
        registry.cut_after = None
        with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors is damaged: its sha256"):
            fetch_model(uri, tmp_path / "third", registry.login)
        with pytest.raises(CheckpointMissing, match=r"v2 does not exist"):
            fetch_model(f"oci://{registry.place}/team/model:v2", tmp_path / "third", registry.login)
        with pytest.raises(CheckpointError, match=r"a push needs a tag"):
            push_folder(folder, pushed.uri, registry.login)


def test_a_blob_that_arrived_whole_but_was_not_named_is_not_asked_for_again(tmp_path: Path) -> None:
    with RegistryServer() as registry:
        uri = f"oci://{registry.place}/team/model:v1"
        push_folder(write(tmp_path / "model", FILES), uri, registry.login)
        registry.cut_after = 10_000
        with pytest.raises(ConnectionError, match=r"the connection broke 5 times"):
            fetch_model(uri, tmp_path / "cache", registry.login)
        (unfinished,) = (tmp_path / "cache").rglob("model.safetensors.part-*")
        unfinished.write_bytes(FILES["model.safetensors"])  # the process died between its last byte and its name
        registry.cut_after = None
        found = fetch_model(uri, tmp_path / "cache", registry.login)
        assert content(found.path) == FILES
        os.close(found.lease)


def test_a_registry_whose_log_in_or_manifest_breaks_is_named(tmp_path: Path) -> None:
    with RegistryServer() as registry:
        uri = f"oci://{registry.place}/team/model:v1"
        push_folder(write(tmp_path / "model", FILES), uri, registry.login)
        for fault, text in (
            ({"realm": "http://127.0.0.1:9/token"}, r"no token from http://127\.0\.0\.1:9/token, .* cannot be reached"),
            ({"token_answer": b"<html>"}, r"no token from .*: its answer has no token"),
            ({"token_answer": b"{}"}, r"no token from .*: its answer has no token"),
            ({"cut_manifests": 10}, r"team/model: the connection broke: "),
        ):
            registry.realm = registry.token_answer = registry.cut_manifests = None
            vars(registry).update(fault)
            with pytest.raises(ConnectionError, match=text):
                fetch_model(uri, tmp_path / "cache", registry.login)


def test_a_bucket_gives_back_what_was_pushed_over_a_bad_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    with S3Server() as server:
        server.fault = lambda number, _method: "cut" if number % 5 == 0 else ""
        pushed = push_folder(folder, "s3://models/tiny", server.environment)
        assert set(server.objects) == {f"models/tiny/{name}" for name in (*FILES, "stoker-model.json")}
        with pytest.raises(CheckpointError, match=r"is not empty .*--replace takes its place"):
            push_folder(folder, "s3://models/tiny", server.environment)
        push_folder(folder, "s3://models/tiny", server.environment, replace=True)
        found = fetch_model("s3://models/tiny", tmp_path / "cache", server.environment)
        assert (pushed.files, content(found.path)) == (3, FILES)
        os.close(found.lease)
        server.objects["models/tiny/model.safetensors"] = bytes(300_000)
        with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors is damaged"):
            fetch_model("s3://models/tiny", tmp_path / "other", server.environment)
        server.objects["models/one/small.gguf"] = b"GGUF"
        single = fetch_model("s3://models/one/small.gguf", tmp_path / "cache", server.environment)
        assert single.path.read_bytes() == b"GGUF"
        os.close(single.lease)
        with pytest.raises(CheckpointMissing, match=r"no objects below it"):
            fetch_model("s3://models/nothing", tmp_path / "cache", server.environment)


@pytest.mark.parametrize(
    "body", [b"{half", b"[]", b"{}", b'{"files": []}', b'{"files": {"a": {}}}', b'{"files": {"a": 1}}', b"\xff"]
)
def test_a_damaged_list_of_a_bucket_is_named(body: bytes, tmp_path: Path) -> None:
    with S3Server() as server:
        server.objects |= {"models/tiny/model.safetensors": b"w", "models/tiny/stoker-model.json": body}
        with pytest.raises(CheckpointCorrupt, match=r"s3://models/tiny: stoker-model\.json is no list of files"):
            fetch_model("s3://models/tiny", tmp_path / "cache", server.environment)


def test_of_a_bucket_that_other_tools_filled_only_the_models_files_are_fetched(tmp_path: Path) -> None:
    """Consoles make an empty object for each folder; the hub's client and git keep folders beside a model."""
    others = ("", "onnx/", ".gitattributes", ".cache/huggingface/download/config.json.metadata", ".git/config")
    with S3Server() as server:
        server.objects |= {f"models/tiny/{name}": data for name, data in (FILES | {"onnx/model.onnx": b"o"}).items()}
        server.objects |= {f"models/tiny/{name}": b"" for name in others}
        found = fetch_model("s3://models/tiny", tmp_path / "cache", server.environment)
        os.close(found.lease)
    assert content(found.path) == FILES | {"onnx/model.onnx": b"o"}


def test_a_bucket_of_too_many_objects_is_refused_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_model, "MAX_FILES", 30)
    with S3Server() as server:
        server.objects |= {f"models/tiny/{number}.safetensors": b"w" for number in range(30)}
        os.close(fetch_model("s3://models/tiny", tmp_path / "cache", server.environment).lease)
        server.objects["models/tiny/config.json"] = b"{}"
        with pytest.raises(CheckpointError, match=r"s3://models/tiny: more than 30 objects are below it"):
            fetch_model("s3://models/tiny", tmp_path / "other", server.environment)


def test_a_push_replaces_no_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    with S3Server() as server:
        before = {"models/run/step-1.ab/manifest.json": b"{}", "models/run/step-1.ab/piece": b"old"}
        server.objects |= before
        with pytest.raises(CheckpointError, match=r"step-1\.ab is a checkpoint \(manifest\.json\)"):
            push_folder(folder, "s3://models/run/step-1.ab", server.environment, replace=True)
        assert server.objects == before, "engines would have gone on to serve it"


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize("longer", [None, 0, 7], ids=["first", "replacing", "replacing-others"])
def test_a_push_to_a_bucket_that_ends_too_early_is_no_model(sent: int, longer: int | None, tmp_path: Path) -> None:
    def end_early(file: RemoteFile) -> None:
        if file.name == sorted(FILES)[sent]:
            raise KeyboardInterrupt

    new = write(tmp_path / "new", FILES)
    with S3Server() as server:
        if longer is not None:
            others = {name: data[::-1] + b" " * longer for name, data in FILES.items()}
            push_folder(write(tmp_path / "old", others), "s3://models/tiny", server.environment)
        with pytest.raises(KeyboardInterrupt):
            push_folder(new, "s3://models/tiny", server.environment, replace=True, sent=end_early)
        with pytest.raises(CheckpointCorrupt, match=r"is missing|is damaged|has \d+ bytes"):
            fetch_model("s3://models/tiny", tmp_path / "cache", server.environment)
        push_folder(new, "s3://models/tiny", server.environment, replace=True)
        found = fetch_model("s3://models/tiny", tmp_path / "cache", server.environment)
        assert content(found.path) == FILES
        os.close(found.lease)


def test_what_other_tools_keep_beside_a_model_is_not_pushed(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    write(folder / ".cache" / "huggingface" / "download", {"config.json.metadata": b"1"})
    write(folder / ".git", {"config": b"[core]"})
    with S3Server() as server:
        push_folder(folder, "s3://models/tiny", server.environment)
        assert set(server.objects) == {f"models/tiny/{name}" for name in (*FILES, "stoker-model.json")}


@pytest.fixture
def plain_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads over HTTP, as the stand-in has no Xet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.mark.usefixtures("plain_uploads")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_files_of_a_models_subfolders_are_pushed_to_the_hub_and_checked(hub: HubServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    write(folder / "1_Pooling", {"config.json": b"{}"})
    pushed = push_folder(folder, "hf://org/model", {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN})
    commit = pushed.digest.removeprefix("commit:")
    assert hub.repositories["org/model"].commits[commit] == {**FILES, "1_Pooling/config.json": b"{}"}


@pytest.mark.usefixtures("plain_uploads")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_upload_that_the_hub_refuses_is_named(hub: HubServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", FILES)
    hub.refuses_uploads = True
    with pytest.raises(ConnectionError, match=r"hf://org/model@main: Error while uploading 'model\.safetensors' .*403"):
        push_folder(folder, "hf://org/model", {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN})


def test_files_of_a_secret_go_before_variables(tmp_path: Path) -> None:
    (tmp_path / "HF_TOKEN").write_text("new\n")
    (tmp_path / "..data").mkdir()
    found = access_variables({"STOKER_MODEL_ACCESS": str(tmp_path), "HF_TOKEN": "old", "HOME": "/h"})
    assert (found["HF_TOKEN"], found["HOME"], "..data" in found) == ("new", "/h", False)
    assert access_variables({"A": "b"}) == {"A": "b"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"REGISTRY_USERNAME": "u", "REGISTRY_PASSWORD": "p"}, ("u", "p")),
        ({".dockerconfigjson": '{"auths": {"r": {"auth": "dTpw"}}}'}, ("u", "p")),
        ({".dockerconfigjson": '{"auths": {"r": {"username": "u", "password": "p"}}}'}, ("u", "p")),
        ({".dockerconfigjson": '{"auths": {"other": {"auth": "dTpw"}}}'}, None),
        ({".dockerconfigjson": '{"auths": {"https://r": {"auth": "dTpw"}}}'}, ("u", "p")),
        ({".dockerconfigjson": '{"auths": {"https://r/v1/": {"auth": "YTpi"}, "r": {"auth": "dTpw"}}}'}, ("u", "p")),
    ],
)
def test_logins(variables: dict[str, str], expected: tuple[str, str] | None) -> None:
    assert login_of("r", variables) == expected


@pytest.mark.parametrize("registry", ["docker.io", "index.docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "registry-1.docker.io"])
def test_docker_hub_is_asked_at_its_host_with_the_login_of_any_of_its_names(registry: str, key: str) -> None:
    assert host_of(registry) == "registry-1.docker.io"
    assert login_of(registry, {".dockerconfigjson": json.dumps({"auths": {key: {"auth": "dTpw"}}})}) == ("u", "p")


def test_other_registries_are_their_own_host() -> None:
    assert [host_of(name) for name in ("ghcr.io", "docker.io.example", "r:5000")] == [
        "ghcr.io",
        "docker.io.example",
        "r:5000",
    ]


@pytest.mark.parametrize(
    ("registry", "expected"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("localhost.example.com", False),
        ("localhosts:5000", False),
        ("127.example.com", False),
    ],
)
def test_only_registries_of_this_machine_get_passwords_in_plain_http(registry: str, expected: bool) -> None:
    assert is_on_this_machine(registry) == expected


def test_a_broken_login_names_the_key() -> None:
    with pytest.raises(CheckpointError, match=r".dockerconfigjson has no valid entry for r"):
        login_of("r", {".dockerconfigjson": '{"auths": {"r": {"auth": "?"}}}'})


@pytest.mark.parametrize("where", ["hub", "bucket", "registry"])
def test_the_progress_of_a_small_model_moves_while_it_arrives(tmp_path: Path, where: str) -> None:
    files = {**FILES, "model.safetensors": os.urandom(3 << 20)}
    total, seen = sum(map(len, files.values())), set[int]()
    with SERVERS[where]() as server:
        uri, variables = serve_model(server, write(tmp_path / "model", files))
        server.second_half.clear()

        def progress(done: int, of: int) -> None:
            assert of >= total
            seen.add(done)
            if 1 << 20 < done < total:
                server.second_half.set()

        found = fetch_model(uri, tmp_path / "cache", variables, progress)
        assert content(found.path) == files
        os.close(found.lease)
        assert server.second_half.is_set(), f"a half had arrived, and the progress was {sorted(seen)[:-1]} of {total}"


SERVERS: dict[str, Any] = {"hub": HubServer, "bucket": S3Server, "registry": RegistryServer}


def serve_model(server: HubServer | S3Server | RegistryServer, folder: Path) -> tuple[str, dict[str, str]]:
    """Put a model on a server: its URI, and the variables that give access."""
    if isinstance(server, HubServer):
        server.add("org/model", content(folder))
        return "hf://org/model", {"HF_ENDPOINT": server.endpoint}
    uri = "s3://models/small" if isinstance(server, S3Server) else f"oci://{server.place}/team/small:v1"
    variables = server.environment if isinstance(server, S3Server) else server.login
    push_folder(folder, uri, variables)
    return uri, variables
