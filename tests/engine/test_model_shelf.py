"""`stoker serve --models-dir`: models of a directory, loaded and unloaded by request."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.config import EngineConfig, EngineIdentity
from stoker.engine.fronts.parts import managed_by
from stoker.engine.program import Environment
from stoker.engine.shelf.folders import ModelFolder, file_bytes, model_folders
from stoker.engine.shelf.model_check import check_head
from stoker.engine.shelf.program import ShelfProgram, available_bytes
from stoker.engine.shelf.room import LoadedModel, NoRoom, models_to_unload
from stoker.pod.causes import Cause
from stoker.pod.config_file import parse
from testing.engine.fake_core import ByteCodec, release
from testing.engine.serving import run, serving, until

LOADED = st.lists(
    st.builds(LoadedModel, st.text("abc", min_size=1), st.integers(0, 50), st.floats(0, 9)),
    max_size=5,
    unique_by=lambda model: model.name,
)


@given(needed=st.integers(0, 200), free=st.none() | st.integers(0, 100), loaded=LOADED, most=st.integers(1, 4))
def test_as_few_models_go_as_must_and_those_asked_for_last_stay(
    needed: int, free: int | None, loaded: list[LoadedModel], most: int
) -> None:
    def fits(kept: list[LoadedModel]) -> bool:
        freed = sum(model.num_bytes for model in loaded) - sum(model.num_bytes for model in kept)
        return len(kept) < most and (free is None or needed <= free + freed)

    if not fits([]):
        with pytest.raises(NoRoom, match=f"it needs about {needed} bytes, and {free} are free"):
            models_to_unload(needed, free, loaded, most)
        return
    gone = models_to_unload(needed, free, loaded, most)
    by_use = sorted(loaded, key=lambda model: model.used_s)
    assert gone == tuple(model.name for model in by_use[: len(gone)])
    assert fits(by_use[len(gone) :])
    assert not gone or not fits(by_use[len(gone) - 1 :])


def test_models_of_a_directory_are_found_by_their_files(tmp_path: Path) -> None:
    for path in ("llama/config.json", "llama/model.safetensors", "saved/manifest.json", "notes/readme.txt", "q4.gguf"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("12345")
    found = model_folders(tmp_path).models
    assert {name: (model.path.name, model.num_bytes) for name, model in found.items()} == {
        "llama": ("llama", 10),
        "q4": ("q4.gguf", 5),
        "saved": ("saved", 5),
    }


def test_a_file_beside_a_folder_of_its_name_is_listed_with_its_ending(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    for path in ("llama/config.json", "llama.gguf", "q4.gguf"):
        (tmp_path / path).write_text("{}")
    found = model_folders(tmp_path).models
    assert {name: (model.name, model.path.name) for name, model in found.items()} == {
        "llama": ("llama", "llama"),
        "llama.gguf": ("llama.gguf", "llama.gguf"),
        "q4": ("q4", "q4.gguf"),
    }


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("m", {"config.json": b"{}"}, "m: tokenizer.json is missing"),
        ("m", {"config.json": b"{", "tokenizer.json": b""}, "config.json: Expecting property name"),
        ("m", {"config.json": b'{"model_type": "gpt2"}', "tokenizer.json": b""}, "config.json: .*gpt2"),
        ("m", {"config.json": b"[]", "tokenizer.json": b""}, "config.json: "),
        ("m.gguf", b"GGUF\1\0\0\0", "m.gguf: not a valid GGUF file: version 1"),
        ("m.gguf", b"GGML", "m.gguf is not a GGUF file"),
    ],
    ids=["no tokenizer", "no JSON", "other family", "no object", "old GGUF", "no GGUF"],
)
def test_a_model_that_can_never_be_loaded_is_found_by_its_head(
    name: str, files: dict[str, bytes] | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if isinstance(files, bytes):
        path.write_bytes(files)
    else:
        path.mkdir()
        for file, content in files.items():
            (path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_head(ModelFolder(name, path, 0))


def test_a_model_that_cannot_be_loaded_takes_no_loaded_one_s_place(tmp_path: Path) -> None:
    def check(model: ModelFolder) -> None:
        if model.name == "broken":
            raise ValueError("tokenizer.json is missing")

    async def scenario() -> None:
        async with shelf(tmp_path, max_models=1, check=check) as s:
            await s.load("one")
            await s.ready("one")
            await s.load("broken")
            await until(lambda: s.program.shelf.entries["broken"].error != "")
            assert await s.statuses() == {"broken": "failed", "one": "ready", "two": "unloaded"}
            card = (await s.http.get("/v1/models/broken")).json()
            assert card["error"] == "tokenizer.json is missing"
            assert (await s.complete("say:x", model="one")).status_code == 200

    run(scenario)


def test_free_memory_is_read_where_the_system_tells_it() -> None:
    found = available_bytes()
    assert (found is None) == (not Path("/proc/meminfo").exists())
    assert found is None or found > 2**20


def fake_core(config_file: Path, address: str) -> Sequence[str]:
    """A core for each model; that of `broken` ends at once."""
    if '"broken"' in config_file.read_text():
        return [sys.executable, "-c", "raise SystemExit(66)"]
    return [sys.executable, "-m", "testing.engine.fake_core", address]


class Shelf:
    def __init__(self, program: ShelfProgram, http: httpx.AsyncClient) -> None:
        self.program, self.http = program, http

    async def load(self, name: str) -> httpx.Response:
        return await self.http.post(f"/v1/models/{name}/load")

    async def unload(self, name: str) -> httpx.Response:
        return await self.http.delete(f"/v1/models/{name}")

    async def complete(self, prompt: str, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **body})

    async def statuses(self) -> dict[str, str]:
        return {card["id"]: card["status"] for card in (await self.http.get("/v1/models")).json()["data"]}

    async def ready(self, name: str) -> None:
        async with asyncio.timeout(240):
            while (await self.statuses())[name] != "ready":
                await asyncio.sleep(0.02)


@asynccontextmanager
async def shelf(
    tmp_path: Path, max_models: int | None = None, check: Callable[[ModelFolder], None] = lambda _: None
) -> AsyncIterator[Shelf]:
    models = tmp_path / "models"
    for name in ("broken", "one", "two"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text("{}")

    def config_of(model: ModelFolder) -> EngineConfig:
        names = [model.name] if model.name else []
        return parse(
            EngineConfig,
            {"model": {"path": str(model.path), "names": names}, "listen": {"port": 0}, "grace_period_s": 240},
        )

    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    environment = Environment(command=fake_core, open_codec=ByteCodec, on_listen=port.set_result)
    (tmp_path / "w").mkdir()
    program = ShelfProgram(
        models, config_of, tmp_path / "w", max_models=max_models, environment=environment, check=check
    )
    ended = asyncio.create_task(program.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}", timeout=120) as http:
        try:
            yield Shelf(program, http)
        finally:
            program.stop.set()
            assert (await ended).cause is Cause.INTERRUPTED
            assert not program.shelf.entries, "every engine has ended"


def test_models_are_listed_loaded_beside_each_other_used_and_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            assert await s.statuses() == {"broken": "unloaded", "one": "unloaded", "two": "unloaded"}
            assert (await s.http.get("/readyz")).status_code == 200
            refused = await s.complete("say:x", model="one")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
            assert (await s.complete("say:x")).json()["error"]["code"] == "model_needed"
            assert (await s.load("three")).status_code == 404

            loading = await s.load("one")
            assert (loading.status_code, loading.json()["id"], loading.json()["status"]) == (200, "one", "loading")
            await s.ready("one")
            assert (await s.load("one")).json()["status"] == "ready", "a second time changes nothing"
            answer = await s.complete("say:hello")
            assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == ("one", "hello")
            assert (await s.http.get(f"/v1/requests/{answer.json()['id']}")).json()["id"] == answer.json()["id"]
            assert (await s.http.get("/v1/requests/none")).status_code == 404

            await s.load("two")
            await s.ready("two")
            unnamed = (await s.complete("say:x")).json()["error"]["message"]
            assert unnamed == "model is needed: 2 models are loaded; allowed: one, two"
            chat = {"model": "two", "messages": [{"role": "user", "content": "say:hi"}]}
            assert (await s.http.post("/v1/chat/completions", json=chat)).json()["model"] == "two"
            tokens = (await s.http.post("/tokenize", json={"model": "one", "prompt": "ab"})).json()["tokens"]
            assert tokens[-2:] == [97, 98]
            assert list((await s.http.get("/status")).json()["models"]) == ["one", "two"]
            metrics = (await s.http.get("/metrics")).text
            assert metrics.count("# TYPE vllm:num_requests_running gauge") == 1
            for name in ("one", "two"):
                assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}}' in metrics
            assert 'handler="/v1/completions"' in metrics

            gone = await s.unload("one")
            assert (gone.json()["deleted"], gone.json()["status"]) == (True, "unloaded")
            assert (await s.unload("one")).json()["error"]["code"] == "model_not_loaded"
            assert await s.statuses() == {"broken": "unloaded", "one": "unloaded", "two": "ready"}

    run(scenario)


def test_a_model_that_cannot_be_loaded_says_why_and_may_be_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            for _ in range(2):
                await s.load("broken")
                await until(lambda: bool(s.program.shelf.entries["broken"].error))
                card = (await s.http.get("/v1/models/broken")).json()
                assert (card["status"], card["error"].split(":")[0]) == ("failed", "ModelError")
            assert (await s.http.get("/health")).json()["status"] == "degraded"
            refused = await s.complete("say:x", model="broken")
            assert "is not loaded: ModelError" in refused.json()["error"]["message"]
            assert "0 models are loaded" in (await s.complete("say:x")).json()["error"]["message"]
            await s.load("one")
            await s.ready("one")
            assert (await s.complete("say:x")).json()["model"] == "one", "the only one that is loaded"
            assert (await s.unload("broken")).json()["status"] == "unloaded"

    run(scenario)


def test_a_request_to_a_model_that_loads_is_to_be_repeated(tmp_path: Path) -> None:
    checked = threading.Event()

    def check(_: ModelFolder) -> None:
        assert checked.wait(240)

    async def scenario() -> None:
        async with shelf(tmp_path, check=check) as s:
            await s.load("one")
            for ask in ({"model": "one", "stream": True}, {"model": "one"}, {}):
                refused = await s.complete("say:x", **ask)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["message"] == (
                    "The model one is not ready: its files are read, or others end before it. Try again; "
                    "GET /v1/models/one shows its status."
                )
            checked.set()
            engine = s.program.shelf.entries["one"]
            await until(lambda: engine.engine is not None)
            await s.ready("one")
            assert (await s.complete("say:x")).status_code == 200

    run(scenario)


DRAINING = {
    "message": "The model one is being unloaded and takes no new requests. POST /v1/models/one/load loads it again "
    "once its requests have ended.",
    "type": "server_error", "param": "model", "code": "model_draining",
}  # fmt: skip


def test_unloading_lets_requests_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            await s.load("one")
            await s.ready("one")
            running = asyncio.ensure_future(s.complete("held say:" + "x" * 40, max_tokens=50))
            engine = s.program.shelf.entries["one"].engine
            assert engine is not None
            await until(lambda: engine.core.running == 1)
            unloading = asyncio.ensure_future(s.unload("one"))
            await until(lambda: engine.front.served.draining)
            assert await s.statuses() == {"broken": "unloaded", "one": "draining", "two": "unloaded"}
            assert (await s.load("one")).json()["error"]["code"] == "model_draining"
            for stream in (False, True):
                refused = await s.complete("say:x", model="one", stream=stream)
                assert (refused.status_code, refused.json()["error"]) == (503, DRAINING)
                assert refused.headers["x-should-retry"] == "false"
            assert "0 models are loaded. POST /v1" in (await s.complete("say:x")).json()["error"]["message"]
            release(engine.folder)
            assert (await running).json()["choices"][0]["text"] == "x" * 40
            assert (await unloading).status_code == 200

    run(scenario)


def test_a_server_that_ends_loads_no_further_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            await s.load("one")
            await s.ready("one")
            running = asyncio.ensure_future(s.complete("held say:" + "x" * 40, model="one", max_tokens=50))
            engine = s.program.shelf.entries["one"].engine
            assert engine is not None
            await until(lambda: engine.core.running == 1)
            s.program.stop.set()
            await until(lambda: s.program.shelf.closing)
            refused = await s.load("two")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            refused = await s.complete("say:x", model="one", stream=True)
            assert refused.json()["error"]["message"] == "This server is ending and takes no new requests."
            assert refused.headers["retry-after"] == "1"
            assert set(s.program.shelf.entries) == {"one"}
            release(engine.folder)
            assert (await running).status_code == 200

    run(scenario)


def test_a_loaded_model_whose_files_have_gone_answers_and_can_be_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            await s.load("one")
            await s.ready("one")
            (tmp_path / "models/one/config.json").unlink()
            assert await s.statuses() == {"broken": "unloaded", "two": "unloaded", "one": "ready"}
            assert (await s.complete("say:x")).json()["model"] == "one"
            assert (await s.unload("one")).json()["status"] == "unloaded"
            assert await s.statuses() == {"broken": "unloaded", "two": "unloaded"}
            assert (await s.load("one")).json()["error"]["code"] == "model_not_found"

    run(scenario)


def test_a_directory_that_cannot_be_read_takes_no_loaded_model_with_it(tmp_path: Path) -> None:
    """Such as a volume that was unmounted."""
    models, away = tmp_path / "models", tmp_path / "away"

    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            await s.load("one")
            await s.ready("one")
            models.rename(away)
            assert (await s.complete("say:x", model="one")).status_code == 200
            assert await s.statuses() == {"one": "ready"}
            health = (await s.http.get("/health")).json()
            assert (health["status"], health["reason"]) == (
                "degraded", f"{models} cannot be read: No such file or directory",
            )  # fmt: skip
            refused = await s.load("two")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
            assert f"{models} cannot be read" in refused.json()["error"]["message"]
            away.rename(models)
            assert (await s.http.get("/health")).json()["status"] == "healthy"
            assert (await s.load("two")).status_code == 200

    run(scenario)


def test_a_folder_that_cannot_be_read_is_told_with_the_reason(tmp_path: Path) -> None:
    """The name is too long for the file system: root may read every folder, but not this one."""

    async def scenario() -> None:
        async with shelf(tmp_path) as s:
            secret = tmp_path / "models" / "secret"
            secret.symlink_to("x" * 300)
            (tmp_path / "models" / "gone").symlink_to("nowhere")
            reason = f"{secret} cannot be read: File name too long"
            assert (await s.http.get("/status")).json()["unreadable"] == {"secret": reason}
            assert await s.statuses() == {"broken": "unloaded", "one": "unloaded", "two": "unloaded"}
            for refused in (await s.load("secret"), await s.complete("say:x", model="secret")):
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_unreadable")
                assert refused.json()["error"]["message"] == f"The model secret cannot be loaded: {reason}."
            assert (await s.load("gone")).json()["error"]["code"] == "model_not_found"
            await s.load("one")
            await s.ready("one")
            assert (await s.http.get("/health")).json()["status"] == "healthy", "such as lost+found of a volume"

    run(scenario)


def test_a_file_that_goes_while_models_are_listed_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("123")
    assert (file_bytes(tmp_path / "part"), file_bytes(tmp_path / "gone")) == (3, 0)


def test_where_only_one_fits_the_next_comes_instead(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with shelf(tmp_path, max_models=1) as s:
            await s.load("one")
            await s.load("two")  # while the first is still loading
            await s.ready("two")
            assert await s.statuses() == {"broken": "unloaded", "one": "unloaded", "two": "ready"}
            await s.load("one")
            await s.ready("one")
            assert await s.statuses() == {"broken": "unloaded", "one": "ready", "two": "unloaded"}
            (tmp_path / "models/two/model.gguf").write_bytes(bytes(1000))
            s.program.shelf.free_bytes = lambda: 900
            assert (await s.load("two")).json()["error"]["code"] == "no_room"

    run(scenario)


def test_an_engine_of_one_model_refuses_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for answer in (await s.http.post("/v1/models/tiny/load"), await s.http.delete("/v1/models/tiny")):
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_fixed")
                assert "this engine serves one model" in answer.json()["error"]["message"]
            assert (await s.http.get("/v1/models/tiny/load")).status_code == 405
            for answer in (await s.http.get("/v1/models/load"), await s.http.delete("/v1/models/load")):
                assert answer.status_code in (404, 409), "a model may be called load"
            assert (await s.http.options("/v1/models/tiny/load")).headers["allow"] == "POST, OPTIONS"

    run(scenario)
    operated = EngineIdentity(namespace="chat", deployment="teller", pool="main", revision="r1")
    assert managed_by(operated) == "the InferenceDeployment chat/teller chooses the model of this engine"
    assert "--models-dir" in managed_by(EngineIdentity())
