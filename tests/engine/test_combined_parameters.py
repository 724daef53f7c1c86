"""Completions with any combination of parameters, from a real engine: a stream is the whole answer in pieces, the first
of several choices is that of a request for one, and each choice is what its parameters mean."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.engine.served_engine import served_engine
from tests.engine.test_server_real import write_model

PROMPTS = ["The quick brown", "Naïve €", "fox jumps over the lazy dog. 漢字"]
STOPS = ["e", "o", "th", "fox", "€", " ", "qu"]
PET = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"], "additionalProperties": False}
GRAMMARS = [{"choice": ["fox", "the lazy dog", "€"]}, {"regex": "[a-f]{2,9}"}, {"json": PET}]
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS),
        "max_tokens": st.sampled_from([6, 12, 24]),
        "seed": st.integers(0, 99),
        "temperature": st.sampled_from([0.0, 0.7, 1.6]),
    },
    optional={
        "n": st.sampled_from([2, 3]),
        "best_of": st.just(4),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.just(1),
        "echo": st.just(True),
        "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.sampled_from([1, 3, 6]),
        "bad_words": st.lists(st.sampled_from(["e", "qu", "a", "The"]), min_size=1, max_size=2),
        "structured_outputs": st.sampled_from(GRAMMARS),
        "return_token_ids": st.just(True),
        "stop_token_ids": st.lists(st.integers(3, 300), min_size=9, max_size=30),
        "presence_penalty": st.just(1.5),
    },
)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
Choices = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model: Path = tmp_path_factory.mktemp("engine") / "tiny"
    write_model(model)
    with served_engine(model) as served, httpx.Client(base_url=served.url, timeout=120) as http:
        yield http


def whole(http: httpx.Client, request: dict[str, Any]) -> tuple[str, Choices]:
    """The error, or the choices of an answer in one piece."""
    answer = http.post("/v1/completions", json=request)
    if answer.status_code == 400:
        return answer.json()["error"]["message"], {}
    assert answer.status_code == 200, answer.text
    return "", {choice["index"]: choice for choice in answer.json()["choices"]}


def streamed(http: httpx.Client, request: dict[str, Any]) -> tuple[str, Choices]:
    """The error, or the choices of a stream, put together again."""
    answer = http.post("/v1/completions", json={**request, "stream": True})
    if answer.status_code == 400:
        return answer.json()["error"]["message"], {}
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices: Choices = {}
    for event in map(json.loads, lines[:-1]):
        if "error" in event:
            return event["error"]["message"], {}
        for piece in event["choices"]:
            choices[piece["index"]] = joined(choices.get(piece["index"]), piece)
    return "", choices


def joined(choice: dict[str, Any] | None, piece: dict[str, Any]) -> dict[str, Any]:
    """A choice so far, and its next piece."""
    if choice is None:
        return piece
    both = {**choice, **{key: value for key, value in piece.items() if value is not None}}
    both["text"] = choice["text"] + piece["text"]
    if "token_ids" in piece:
        both["token_ids"] = (choice["token_ids"] or []) + (piece["token_ids"] or [])
    if choice["logprobs"] and piece["logprobs"]:
        both["logprobs"] = {key: choice["logprobs"][key] + piece["logprobs"][key] for key in LISTS}
    return both


def plain(choices: Choices) -> Choices:
    """The choices with log-probabilities that can be compared: a cached prefix changes their last digits."""
    return json.loads(json.dumps(choices), parse_float=lambda digits: round(float(digits), 3))  # type: ignore[no-any-return]


@settings(max_examples=30)
@given(request=REQUESTS)
def test_any_request_answers_as_its_twins(http: httpx.Client, request: dict[str, Any]) -> None:
    error, choices = whole(http, request)
    if request.get("best_of", 0) <= request.get("n", 1) and "prompt_logprobs" not in request:
        assert streamed(http, request)[0] == error
        assert plain(streamed(http, request)[1]) == plain(choices)
    if error:
        return
    assert list(choices) == list(range(request.get("n", 1)))
    for choice in choices.values():
        check_meaning(request, choice)
    if "best_of" in request:
        check_best_of(http, request, choices)
        return
    alone = whole(http, {key: value for key, value in request.items() if key != "n"})[1]
    assert plain(alone) == plain({0: choices[0]})
    if request["temperature"] == 0:
        assert {choice["text"] for choice in choices.values()} == {choices[0]["text"]}


def check_meaning(request: dict[str, Any], choice: dict[str, Any]) -> None:
    """Check what the parameters promise about one choice."""
    text = choice["text"]
    if request.get("echo"):
        assert text.startswith(request["prompt"])
        text = text.removeprefix(request["prompt"])
    stops, found = request.get("stop", []), choice["stop_reason"]
    if isinstance(found, str) and request.get("include_stop_str_in_output"):
        assert text.endswith(found)
    elif "min_tokens" not in request and "structured_outputs" not in request:
        assert not any(stop in text for stop in stops)
    if choice.get("token_ids") is not None:
        least = (
            0 if "structured_outputs" in request else request.get("min_tokens", 0)
        )  # a complete grammar ends earlier
        assert least <= len(choice["token_ids"]) <= request["max_tokens"]


def check_best_of(http: httpx.Client, request: dict[str, Any], choices: Choices) -> None:
    """Check that the choices are the best of as many whole ones: by the mean log-probability of a generated token."""
    scored = {key: value for key, value in request.items() if key != "echo"} | {"logprobs": 0, "return_token_ids": True}
    best = whole(http, scored)[1]
    echoed = request["prompt"] if request.get("echo") else ""
    assert [echoed + choice["text"] for choice in best.values()] == [choice["text"] for choice in choices.values()]
    every = whole(http, {key: value for key, value in scored.items() if key != "best_of"} | {"n": request["best_of"]})[
        1
    ]
    assert means_of(http, best) == pytest.approx(sorted(means_of(http, every), reverse=True)[: len(best)], abs=1e-3)


def means_of(http: httpx.Client, choices: Choices) -> list[float]:
    return [mean(choice["logprobs"]["token_logprobs"] + score_of_end(http, choice)) for choice in choices.values()]


def score_of_end(http: httpx.Client, choice: dict[str, Any]) -> list[float]:
    """The log-probability of a choice's end token, which is not listed: that of a prompt with all of its tokens."""
    if len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]):
        return []
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    scored = whole(http, {"prompt": tokens, "echo": True, "max_tokens": 0, "logprobs": 0})[1][0]
    last: float = scored["logprobs"]["token_logprobs"][-1]
    return [last]


def mean(scores: list[float]) -> float:
    return sum(scores) / len(scores) if scores else -math.inf
