"""Streams that begin at one engine and go on at another: together they are the stream of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.http.openai.parser_choice import ParserChoice
from stoker.pod.marked_streams import MARK, RESUME_HEADER, RESUME_PATH
from stoker.router.connection import Outgoing
from stoker.router.kept_stream import DONE, KeptStream, UpdateCutter
from testing.engine.serving import Serving, run, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MESSAGE = [
    {"role": "user", "content": 'say:Grüße, 漢字! <tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'}
]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "say:Grüße aus 漢字, schön!"}], "logprobs": True}),
    "choices": (CHAT, {"messages": [{"role": "user", "content": "say:abc def"}], "n": 3, "max_tokens": 6}),
    "tools": (CHAT, {"messages": MESSAGE, "tools": [TOOL]}),
    "stop text": (CHAT, {"messages": [{"role": "user", "content": "say:one two END three"}], "stop": ["END", "wo E"]}),
    "text": (TEXT, {"prompt": "say:über 100 €", "logprobs": 2, "max_tokens": 40}),
    "echo": (TEXT, {"prompt": ["say:first one", "say:second"], "echo": True, "n": 2, "max_tokens": 9}),
    "stop token": (TEXT, {"prompt": "say:x-y-z", "stop_token_ids": [256], "max_tokens": 30}),
}
OPTIONS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def updates(s: Serving, path: str, content: bytes) -> list[bytes]:
    """The updates of a marked stream."""
    answer = await s.http.post(path, content=content, headers={RESUME_HEADER.decode(): "1"})
    assert answer.status_code == 200, answer.text
    assert answer.headers[RESUME_HEADER.decode()] == "1"
    cutter, found = UpdateCutter(), []
    for byte in answer.content:
        if whole := cutter.add(bytes([byte])):
            found.append(whole)
    assert cutter.complete
    return [*found, DONE]


def told(stream: list[bytes]) -> list[Any]:
    """The events without what may differ: seeds are told once by each engine."""
    found = []
    for event in b"".join(stream).split(b"\n\n"):
        if event and event != DONE.strip():
            chunk = json.loads(event.removeprefix(b"data: "))
            chunk.get(MARK, {}).pop("seed", None)
            if chunk.get("usage"):
                chunk["usage"].pop("prompt_tokens_details")
            for choice in chunk["choices"]:
                for call in choice.get("delta", {}).get("tool_calls", ()):
                    call.pop("id", None)
            found.append(chunk)
    return found


def kept(path: str, content: bytes, stream: list[bytes]) -> KeptStream:
    made = KeptStream(Outgoing("POST", path.encode(), (), content), path)
    for part in stream:
        made.add(part)
    return made


@pytest.mark.parametrize("kind", sorted(REQUESTS))
def test_the_rest_of_a_stream_is_what_the_first_engine_would_have_sent(tmp_path: Path, kind: str) -> None:
    """Cut behind each update, and the rest once more in its middle."""
    path, fields = REQUESTS[kind]
    content = json.dumps({**fields, **OPTIONS, "model": "tiny"}, ensure_ascii=False).encode()

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.front.parsers = ParserChoice(tool_calls="hermes")
            whole = await updates(s, path, content)
            for cut in range(1, len(whole)):
                first = whole[:cut]
                rest = await updates(s, RESUME_PATH, kept(path, content, first).next_request().body)
                assert by_choice(first + rest) == by_choice(whole)
                second = [*first, *rest[: len(rest) // 2]]
                last = await updates(s, RESUME_PATH, kept(path, content, second).next_request().body)
                assert by_choice(second + last) == by_choice(whole)
            begun = {request.params.seed for request in s.core.requests if request.resumed}
            assert begun <= {request.params.seed for request in s.core.requests if not request.resumed}
            assert begun

    run(scenario)


def by_choice(stream: list[bytes]) -> dict[str, list[Any]]:
    """The chunks of each choice, and the usage at the end."""
    found: dict[str, list[Any]] = {}
    for chunk in told(stream):
        usage = chunk.pop("usage")
        if not chunk["choices"]:
            found["usage"] = [usage, chunk]
        for choice in chunk["choices"]:
            found.setdefault(str(choice["index"]), []).append(chunk)
    return found


def test_updates_without_text_are_told_with_the_next_chunk(tmp_path: Path) -> None:
    """A character of three bytes is three tokens of this tokenizer; a cut never falls between them."""
    content = json.dumps({"prompt": "say:漢字", "stream": True, "model": "tiny"}).encode()

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            tokens = [json.loads(update[6:])[MARK]["tokens"] for update in (await updates(s, TEXT, content))[:-1]]
            assert tokens == [list("漢".encode()), list("字".encode()), []]

    run(scenario)


BODY = {"prompt": "say:abc", "stream": True, "model": "tiny"}
STATE = {"path": TEXT, "id": "cmpl-1", "created": 5, "fingerprint": "fp_abcdef0123",
         "choices": [{"index": 0, "tokens": [97], "seed": 1}]}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "body", "status", "message"),
    [
        pytest.param({"fingerprint": "fp_other"}, {}, 409, "fp_other", id="another model"),
        pytest.param({"path": "/v1/responses"}, {}, 400, "path", id="path"),
        pytest.param({"choices": [{"index": 1, "tokens": []}]}, {}, 400, "1 choices, got index 1", id="choice"),
        pytest.param({"choices": [{"index": 0, "tokens": [9999]}]}, {}, 400, "got 9999", id="token"),
        pytest.param({"choices": [{"index": 0, "tokens": []}] * 2}, {}, 400, "once", id="twice"),
        pytest.param({"colour": 1}, {}, 400, "colour", id="unknown field"),
        pytest.param({}, {"stream": False}, 400, "stream", id="no stream"),
        pytest.param({}, {"echo": True, "logprobs": 1}, 400, "echo with logprobs", id="echoed scores"),
        pytest.param({}, {"prompt": 3}, 400, "prompt", id="body"),
    ],
)
def test_what_cannot_go_on_is_refused(
    tmp_path: Path, state: dict[str, Any], body: dict[str, Any], status: int, message: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            content = json.dumps({**STATE, **state}) + "\n" + json.dumps({**BODY, **body})
            answer = await s.http.post(RESUME_PATH, content=content)
            assert answer.status_code == status, answer.text
            assert message in answer.json()["error"]["message"]

    run(scenario)


def test_only_streams_that_can_go_on_are_marked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            asked = {RESUME_HEADER.decode(): "1"}
            for more, headers in (({}, {}), ({"stream": False}, asked), ({"echo": True, "logprobs": 1}, asked)):
                answer = await s.http.post(TEXT, json={**BODY, **more}, headers=headers)
                assert answer.status_code == 200
                assert RESUME_HEADER.decode() not in answer.headers
                assert f'"{MARK}"' not in answer.text

    run(scenario)
