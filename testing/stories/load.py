"""A constant load of streaming requests that records every failed or incomplete answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from testing.stories.waits import TIMEOUT_S


@dataclass(frozen=True)
class Answer:
    """One stream, read to its end."""

    fingerprint: str
    """The model that answered."""
    tokens: int
    text: str


@dataclass
class Load:
    """`clients` threads, each sending one request after another; used as a context."""

    url: str
    model: str
    lengths: tuple[int, ...] = (16, 16, 24, 160)
    """Tokens asked for, one client each."""
    sessions: bool = False
    """Whether each request is a session of its own, so that a canary gets its share of them."""
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(length,)) for length in self.lengths]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sending, and read the open streams to their end."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def fingerprints(self) -> list[str]:
        """Models in the order of their first answers."""
        return list(dict.fromkeys(answer.fingerprint for answer in list(self.answers)))

    def _client(self, length: int) -> None:
        while not self._stop.is_set():
            with httpx.Client(base_url=self.url, timeout=TIMEOUT_S) as client:
                for _ in range(5):
                    try:
                        self.answers.append(self._stream(client, length))
                    except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
                        self.failures.append(f"{length} tokens: {type(error).__name__}: {error}")
                    if self._stop.is_set():
                        return

    def _stream(self, client: httpx.Client, length: int) -> Answer:
        body: dict[str, Any] = {"model": self.model, "prompt": "Then the boiler met", "max_tokens": length}
        if self.sessions:
            body["user"] = f"{threading.get_ident()}-{len(self.answers)}"
        return read_stream(client, body)


def read_stream(client: httpx.Client, body: Mapping[str, Any]) -> Answer:
    """Ask for a greedy completion of exactly `max_tokens` as a stream, and read it to its end.

    Raises:
        AssertionError, httpx.HTTPError: it failed, or is not whole.
    """
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json={**body, **fixed}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line and not line.startswith(":")]
        assert response.status_code == 200, (response.status_code, lines)
    assert lines[-1:] == ["[DONE]"], lines[-3:]
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    tokens = chunks[-1]["usage"]["completion_tokens"]
    assert tokens == body["max_tokens"], f"{tokens} tokens came"
    return Answer(chunks[0]["system_fingerprint"], tokens, "".join(choice["text"] for choice in choices))
