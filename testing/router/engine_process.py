"""Real engine processes behind a test's router, and clients that read their streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from testing.free_port import free_port
from testing.router.harness import events

TOKENS = 120
"""Of each stream."""
COMMON = {"stream": True, "ignore_eos": True, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}


class Engine:
    """One engine process with the model in `folder/tiny`; `settings` are further sections of its configuration."""

    def __init__(
        self, folder: Path, name: str, environment: Mapping[str, str] = MappingProxyType({}), **settings: Any
    ) -> None:
        port = free_port()
        config = {
            "model": {"path": str(folder / "tiny"), "dtype": "float32"},
            "listen": {"port": port},
            "threads": 1,
            "cache": {"num_blocks": 200, "block_size": 4},
            "scheduler": {"max_batch_tokens": 64, "max_queued_requests": 40},
            **settings,
        }
        (folder / f"{name}.json").write_text(json.dumps(config))
        self.name, self.role, self.url = name, settings.get("role"), f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stoker.engine", "--config", str(folder / f"{name}.json")],
                env={**os.environ, "STOKER_POD_UID": name, "OMP_NUM_THREADS": "1", **environment}, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def entry(self) -> dict[str, object]:
        return {"url": self.url, "pod_uid": self.name, **({"role": self.role} if self.role else {})}

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/status", timeout=240).json())

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())


class Client:
    """One client: the text of its stream so far."""

    def __init__(self) -> None:
        self.text = ""

    async def read(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", path, json={**COMMON, **body}) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
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
