"""Clients other than OpenAI's own: browsers, tools that read an OpenAPI document, unusual keys and numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from stoker.engine.http.errors import from_validation
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from testing.engine.serving import run, serving

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "say:hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PAGE = "https://page.example"

MODEL_CHANGES = ("/v1/models/{model}", "/v1/models/{model}/load")
"""Refused by an engine of one model."""


def test_a_page_of_an_allowed_origin_may_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("k",), allowed_origins=(PAGE,)) as s:
            asked = {
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            preflight = await s.http.options(CHAT, headers=asked)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == PAGE
            assert "POST" in preflight.headers["access-control-allow-methods"]
            assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
            answer = await s.http.post(
                CHAT, json={"messages": MESSAGES}, headers={"Origin": PAGE, "Authorization": "Bearer k"}
            )
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
            refused = await s.http.post(CHAT, json={"messages": MESSAGES}, headers={"Origin": PAGE})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
            other = await s.http.options(CHAT, headers={**asked, "Origin": "https://other.example"})
            assert other.status_code == 400
            assert "access-control-allow-origin" not in other.headers

    run(scenario)


def test_no_origin_is_allowed_unless_configured(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.http.options(CHAT, headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"})
            assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")
            assert "access-control-allow-origin" not in answer.headers

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST, OPTIONS"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
        ("POST", "/version", "GET, HEAD, OPTIONS"),
    ],
)
def test_a_wrong_method_is_answered_with_those_allowed(tmp_path: Path, method: str, path: str, allow: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allow)
            assert answer.json()["error"]["code"] == "method_not_allowed"

    run(scenario)


def test_the_openapi_document_names_every_route_and_its_body(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("k",)) as s:
            document = (await s.http.get("/openapi.json")).json()
            asked = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
            await s.http.post(CHAT, json={"messages": MESSAGES}, headers=asked)
            assert document["openapi"].startswith("3.1")
            for path, methods in document["paths"].items():
                for method in methods:
                    url, key = path.replace("{model}", "tiny").replace("{id}", "mine"), {"Authorization": "Bearer k"}
                    answer = await s.http.request(method, url, headers=key, content="{}" if method == "post" else "")
                    known = (409,) if path in MODEL_CHANGES and method in ("post", "delete") else (200, 400)
                    assert answer.status_code in known, (method, path)
            schemas = document["components"]["schemas"]
            chat = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schemas[chat["$ref"].rpartition("/")[2]]["properties"]["messages"]["minItems"] == 1
            assert _references(document) <= {f"#/components/schemas/{name}" for name in schemas}
            page = await s.http.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "/openapi.json" in page.text

    run(scenario)


def _references(node: Any) -> set[str]:
    """Yield every `$ref` of a document."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(value) for value in node))
    return set()


@pytest.mark.parametrize("key", ["clé", "鍵", "plain"])
def test_an_api_key_may_be_any_utf_8(tmp_path: Path, key: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=(key,)) as s:
            given = b"Bearer " + key.encode()
            assert (await s.http.get("/v1/models", headers={b"authorization": given})).status_code == 200
            assert (await s.http.get("/v1/models", headers={b"authorization": given + b"x"})).status_code == 401

    run(scenario)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("mine-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("", False)],
)
def test_a_request_id_is_kept_up_to_128_characters(tmp_path: Path, given: str, kept: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            own = (await s.http.get("/v1/models", headers={"x-request-id": given})).headers["x-request-id"]
            assert (own == given) is kept
            assert 0 < len(own) <= 128

    run(scenario)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 16.0), ("max_completion_tokens", 16.0), ("n", 1.0), ("seed", 3.0), ("top_k", 5.0),
     ("min_tokens", 0.0), ("priority", 0.0)],
)  # fmt: skip
def test_a_float_that_is_an_integer_is_taken_as_one(tmp_path: Path, field: str, value: float) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            assert (await s.post(CHAT, messages=MESSAGES, **{field: value})).status_code == 200
            wrong = await s.post(CHAT, messages=MESSAGES, **{field: value + 0.5})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == field
            assert f"got {value + 0.5}" in wrong.json()["error"]["message"]

    run(scenario)


def test_completions_take_integral_floats_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = {"prompt": "say:hi", "max_tokens": 2.0, "best_of": 1.0, "logprobs": 2.0}
            assert (await s.post("/v1/completions", **body)).status_code == 200
            assert s.core.requests[0].params.max_tokens == 2
            assert s.core.requests[0].params.logprobs == 2

    run(scenario)


def test_tools_that_may_not_be_called_are_shown_to_the_template(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.post(CHAT, messages=MESSAGES, tools=[TOOL], tool_choice="none")
            assert answer.json()["choices"][0]["message"]["content"] == "hi"
            assert bytes(s.core.requests[0].prompt_tokens) == b"<tool>weather<user>say:hi<assistant>"
            tokens = await s.post("/tokenize", messages=MESSAGES, tools=[TOOL])
            assert tokens.json()["tokens"] == list(s.core.requests[0].prompt_tokens)

    run(scenario)


@pytest.mark.parametrize(
    ("cls", "begin", "item", "end"),
    [
        pytest.param(CompletionBody, '{"prompt": [', "{}", "]}", id="prompts that are objects"),
        pytest.param(CompletionBody, '{"prompt": [', "[]", "]}", id="empty prompts"),
        pytest.param(CompletionBody, '{"prompt": [[', "{}", "]]}", id="prompt of objects"),
        pytest.param(CompletionBody, '{"prompt": "x", "stop": [', "1", "]}", id="stop"),
        pytest.param(CompletionBody, '{"prompt": "x", "stop_token_ids": [', "{}", "]}", id="stop tokens"),
        pytest.param(ChatBody, '{"messages": [{"role": "user", "content": [', "{}", "]}]}", id="content parts"),
        pytest.param(ChatBody, '{"messages": [', "{}", "]}", id="messages"),
        pytest.param(ChatBody, '{"messages": [{"role": "u"}], "tools": [', "1", "]}", id="tools"),
        pytest.param(DetokenizeBody, '{"tokens": [', "{}", "]}", id="tokens"),
        pytest.param(TokenizeBody, '{"messages": [', "{}", "]}", id="messages to tokenise"),
    ],
)
def test_a_body_of_many_wrong_items_makes_few_errors(cls: type[BaseModel], begin: str, item: str, end: str) -> None:
    """Each error takes a kilobyte: 2 MiB of `{}` as prompts took 2.1 GB and 7 s of the event loop."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate_json(begin + ",".join([item] * 5000) + end)
    assert caught.value.error_count() < 10
    assert len(str(from_validation(caught.value))) < 300


def test_a_bias_of_many_wrong_items_makes_few_errors() -> None:
    biases = ",".join(f'"{number}": []' for number in range(20_000))
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate_json(f'{{"prompt": "x", "logit_bias": {{{biases}}}}}')
    assert str(from_validation(caught.value)).startswith("logit_bias: at most 10000 tokens are allowed (got ")


def test_bodies_in_flight_are_bounded_and_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=1 << 16, max_body_bytes_in_flight=1 << 17) as s:
            begin = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60001\r\n\r\n" + b" " * 60_000
            port = httpx.URL(s.url).port
            halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in halves:
                writer.write(begin)
            async with asyncio.timeout(30):
                while s.app.bodies.held_bytes < 120_000:
                    await asyncio.sleep(0.01)
            answer = await s.http.post("/v1/completions", content=b" " * 20_000)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "too_many_body_bytes"
            for _, writer in halves:
                writer.transport.abort()
            async with asyncio.timeout(30):
                while s.app.bodies.held_bytes:
                    await asyncio.sleep(0.01)
            assert (await s.post(CHAT, messages=MESSAGES)).status_code == 200

    run(scenario)


def test_http_sizes_and_process_metrics_are_exposed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            await s.http.post("/v1/completions", content=b'{"prompt": "say:hi"}')
            text = (await s.http.get("/metrics")).text
            assert 'http_request_size_bytes_sum{handler="/v1/completions"} 20.0' in text
            assert 'http_response_size_bytes_count{handler="/v1/completions"} 1.0' in text
            assert "process_cpu_seconds_total" in text

    run(scenario)
