"""Behaviours of a fake engine whose streams another one can carry on, and which breaks where it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.pod.marked_streams import RESUME_PATH
from testing.router.fake_engine import Behaviour, Exchange

FINGERPRINT = "fp_x"
SEED = 41
STREAM_HEADERS = {"content-type": "text/event-stream", "transfer-encoding": "chunked", "x-stoker-resume": "1"}


def marked_stream(tokens: int, sent: int = 0) -> list[bytes]:
    """The updates of a stream behind its first `sent` tokens. An update may have two chunks; the last has no choice."""
    updates = []
    for token in range(sent, tokens):
        text = f'word {token} ,"stoker":{{\n\n'  # nothing in a text looks like a mark
        mark: dict[str, Any] = {"tokens": [token], **({"seed": SEED} if token == sent else {})}
        first = _chunk(text[:4], None) if token % 3 == 0 else b""
        last = _chunk(text[4:] if first else text, "length" if token + 1 == tokens else None, stoker=mark)
        updates.append(first + last)
    return [*updates, _event({**_head(), "choices": [], "usage": {"completion_tokens": tokens}, "stoker": {}})]


def _head() -> dict[str, Any]:
    return {"id": "cmpl-1", "created": 17, "system_fingerprint": FINGERPRINT}


def _chunk(text: str, finish: str | None, **more: Any) -> bytes:
    return _event({**_head(), "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def state_of(exchange: Exchange) -> dict[str, Any]:
    """The state in the body of a request to go on."""
    state: dict[str, Any] = json.loads(exchange.body.partition(b"\n")[0])
    return state


def told(text: str) -> list[Any]:
    """A stream's chunks without the seed, which every engine tells once."""
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
    for chunk in chunks:
        chunk.get("stoker", {}).pop("seed", None)
    return chunks


class Resumable:
    """A behaviour: streams of `tokens` tokens; each later exchange breaks after the next number of bytes of `cuts`."""

    def __init__(self, tokens: int, cuts: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self.cuts = list(cuts)
        self.states: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, exchange: Exchange) -> None:
        sent = 0
        if exchange.path == RESUME_PATH:
            state = state_of(exchange)
            self.states.append(state)
            self.bodies.append(exchange.body.partition(b"\n")[2])
            sent = sum(len(choice["tokens"]) for choice in state["choices"])
            ended = any(choice["ended"] for choice in state["choices"])
            assert sent == self.tokens if ended else sent < self.tokens
        data = b"".join(marked_stream(self.tokens, sent)) + b"data: [DONE]\n\n"
        await exchange.head(200, STREAM_HEADERS)
        if not self.cuts:
            await exchange.data(data.decode())
            await exchange.end()
            return
        await exchange.data(data[: self.cuts.pop(0)].decode())
        raise ConnectionResetError


def answers(status: int, **content: Any) -> Behaviour:
    """Answer with JSON."""

    async def answer(exchange: Exchange) -> None:
        await exchange.json(content, status)

    return answer
