"""Real engine processes: one is killed in the middle of its streams, and clients get what undisturbed runs give."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.router.app import Router
from testing.router.harness import events, routed, run, snapshot, until
from tests.engine.test_server_real import write_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENS = 120
COMMON = {"stream": True, "ignore_eos": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "the quick fox"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "n": 2, "seed": 11, "temperature": 0.9, "presence_penalty": 0.5}),
    (TEXT, {"prompt": "Naïve cafés", "logprobs": 3, "temperature": 0}),
    (TEXT, {"prompt": ["lazy", "brown fox"], "seed": -5, "temperature": 1.1, "stop": ["jumps over"], "echo": True}),
]


class Engine:
    """One engine process with the test's model."""

    def __init__(self, folder: Path, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {
            "model": {"path": str(folder / "tiny"), "dtype": "float32"},
            "listen": {"port": port},
            "threads": 1,
            "cache": {"num_blocks": 200, "block_size": 4},
            "scheduler": {"max_batch_tokens": 64, "max_queued_requests": 40},
        }
        (folder / f"{name}.json").write_text(json.dumps(config))
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stoker.engine", "--config", str(folder / f"{name}.json")],
                env={**os.environ, "STOKER_POD_UID": name, "OMP_NUM_THREADS": "1"}, stderr=log, start_new_session=True,
            )  # fmt: skip

    def entry(self) -> dict[str, object]:
        return {"url": self.url, "pod_uid": self.name}

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    write_model(folder / "tiny")
    made = Engine(folder, "a"), Engine(folder, "b")
    try:
        for engine in made:
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made:
            engine.kill()


class Client:
    """One client: the text of its stream so far."""

    def __init__(self) -> None:
        self.text = ""

    async def read(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", path, json={**COMMON, **body}) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                self.text += text


def answer_of(text: str) -> dict[str, Any]:
    """Text, log-probabilities, tokens and end of each choice, and the usage; ids and times left out."""
    *chunks, done = events(text)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    found: dict[str, Any] = {"usage": chunks[-1]["usage"]["completion_tokens"]}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(str(choice["index"]), {"text": "", "tokens": [], "logprobs": [], "roles": 0})
            delta = choice.get("delta", {})
            one["text"] += choice.get("text", "") + delta.get("content", "")
            one["roles"] += "role" in delta
            one["tokens"] += chunk["stoker"]["tokens"] if choice is chunk["choices"][-1] and "stoker" in chunk else []
            one["logprobs"] += list((choice["logprobs"] or {}).get("token_logprobs", ()))
            one["offsets"] = one.get("offsets", []) + list((choice["logprobs"] or {}).get("text_offset", ()))
            assert "finish" not in one
            if choice["finish_reason"] is not None:
                one["finish"] = choice["finish_reason"]
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for index, choice in expected.items():
        if isinstance(choice, dict):
            assert found[index].pop("logprobs") == pytest.approx(choice.pop("logprobs"), abs=1e-3)
    assert found == expected


def test_streams_of_a_killed_engine_go_on_at_another_one(engines: tuple[Engine, Engine]) -> None:
    """The engine is stopped in the middle of its streams, and killed once the router knows another one."""
    first, second = engines

    async def scenario() -> None:
        async with routed(first) as (router, http):  # type: ignore[arg-type]
            clients = await cut_in_the_middle(router, http, first)
            await http.put("/backends", json=snapshot(2, first.entry(), second.entry()))
            await until(lambda: any(one.ready and one.entry.pod_uid == "b" for one in router.backends.all))
            first.kill()
            await asyncio.gather(*(task for _, task in clients))
            assert router.metrics.resumed._value.get() >= 1
            assert router.metrics.resume_gap._sum.get() / router.metrics.resumed._value.get() < 20
            for (client, _), (path, body) in zip(clients, REQUESTS, strict=True):
                undisturbed = Client()
                await undisturbed.read(http, path, body)
                assert_same(answer_of(client.text), answer_of(undisturbed.text))

    run(scenario, limit_s=180)


async def cut_in_the_middle(
    router: Router, http: httpx.AsyncClient, engine: Engine
) -> list[tuple[Client, asyncio.Task[None]]]:
    """Start the streams and stop the engine while one of them has begun and has not ended."""
    for _ in range(20):
        clients = [Client() for _ in REQUESTS]
        tasks = [
            asyncio.create_task(client.read(http, path, body))
            for client, (path, body) in zip(clients, REQUESTS, strict=True)
        ]
        await until(lambda: any("stoker" in client.text for client in clients))  # noqa: B023 - awaited here
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what is on its way arrives
        if any("stoker" in client.text and "[DONE]" not in client.text for client in clients):
            return list(zip(clients, tasks, strict=True))
        engine.signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
    raise AssertionError("the engine was always faster")
