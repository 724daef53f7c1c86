"""Probe routes and guarded control routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from stoker.pod.control_key import ControlVerifier, new_private_key, public_key, sign
from stoker.pod.http import MAX_BODY_BYTES, ControlRoute, control_routes, probe_routes

KEY = new_private_key()


def call(routes: Sequence[BaseRoute], method: str, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=list(routes)))
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


@pytest.mark.parametrize(("good", "code", "text"), [(True, 200, "ok\n"), (False, 503, "no\n")])
def test_probes_answer_with_the_state(good: bool, code: int, text: str) -> None:
    registry = CollectorRegistry()
    alive = probe_routes(alive=lambda: good, ready=lambda: not good, status=dict, registry=registry)
    ready = probe_routes(alive=lambda: not good, ready=lambda: good, status=dict, registry=registry)
    assert (call(alive, "GET", "/livez").status_code, call(alive, "GET", "/livez").text) == (code, text)
    assert (call(ready, "GET", "/readyz").status_code, call(ready, "GET", "/readyz").text) == (code, text)


def test_status_is_json_and_metrics_are_prometheus_text() -> None:
    registry = CollectorRegistry()
    Counter("steps", "Steps done", registry=registry).inc(3)
    routes = probe_routes(alive=bool, ready=bool, status=lambda: {"step": 3}, registry=registry)
    assert call(routes, "GET", "/status").json() == {"step": 3}
    answer = call(routes, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "steps_total 3.0" in answer.text


def test_private_fields_of_the_status_are_for_holders_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(public_key(KEY))
    page = {"phase": "Serving", "backends": [{"url": "http://10.0.0.7:8000"}]}

    def routes(verifier: ControlVerifier | None) -> list[BaseRoute]:
        return probe_routes(
            alive=bool, ready=bool, status=lambda: page, registry=CollectorRegistry(),
            private=frozenset(("backends",)), verifier=verifier,
        )  # fmt: skip

    def token(method: str = "GET", path: str = "/status", token_id: str = "t") -> dict[str, str]:
        text = sign(KEY, pod_uid="pod-1", method=method, path=path, body=b"", now=1000, token_id=token_id)
        return {"authorization": f"Bearer {text}"}

    guarded_status = routes(ControlVerifier(tmp_path, "pod-1", lambda: 1000.0))
    assert call(guarded_status, "GET", "/status").json() == {"phase": "Serving"}
    assert call(guarded_status, "GET", "/status", headers=token()).json() == page
    for wrong in (token(), token(method="POST", token_id="2"), token(path="/drain", token_id="3")):
        assert call(guarded_status, "GET", "/status", headers=wrong).status_code == 401
    assert call(routes(None), "GET", "/status", headers=token(token_id="4")).json() == {"phase": "Serving"}


async def drain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "id" not in message:
        raise ValueError("id is missing")
    return {"accepted": message["id"]}


ROUTES = [ControlRoute("POST", "/drain", drain)]


@pytest.fixture
def guarded(tmp_path: Path) -> list[BaseRoute]:
    (tmp_path / "key.pem").write_bytes(public_key(KEY))
    return control_routes(ROUTES, ControlVerifier(tmp_path, "pod-1", lambda: 1000.0))


def header(body: bytes, *, path: str = "/drain", token_id: str = "t") -> dict[str, str]:
    text = sign(KEY, pod_uid="pod-1", method="POST", path=path, body=body, now=1000, token_id=token_id)
    return {"authorization": f"Bearer {text}"}


def test_a_signed_call_reaches_its_handler(guarded: list[BaseRoute]) -> None:
    body = b'{"id": "a"}'
    answer = call(guarded, "POST", "/drain", content=body, headers=header(body))
    assert (answer.status_code, answer.json()) == (202, {"accepted": "a"})


def test_a_call_is_not_repeated(guarded: list[BaseRoute]) -> None:
    body, headers = b'{"id": "a"}', header(b'{"id": "a"}')
    assert call(guarded, "POST", "/drain", content=body, headers=headers).status_code == 202
    answer = call(guarded, "POST", "/drain", content=body, headers=headers)
    assert (answer.status_code, answer.json()) == (401, {"error": "the token was used before"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Basic eDp5"},
        {"authorization": "Bearer nonsense"},
        header(b"other"),
    ],
)
def test_an_unsigned_or_forged_call_is_401(guarded: list[BaseRoute], headers: dict[str, str]) -> None:
    answer = call(guarded, "POST", "/drain", content=b'{"id": "a"}', headers=headers)
    assert answer.status_code == 401
    assert "error" in answer.json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "id is missing"),
        (b"", "id is missing"),
        (b"[]", "must be a JSON object"),
        (b"{", "Expecting"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_body_that_cannot_be_used_is_400(guarded: list[BaseRoute], body: bytes, message: str) -> None:
    answer = call(guarded, "POST", "/drain", content=body, headers=header(body))
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_body_without_end_is_refused_before_it_fills_the_memory(guarded: list[BaseRoute]) -> None:
    answer = call(guarded, "POST", "/drain", content=bytes(MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


def test_other_methods_are_refused(guarded: list[BaseRoute]) -> None:
    assert call(guarded, "GET", "/drain").status_code == 405


def test_on_the_private_socket_no_token_is_needed() -> None:
    answer = call(control_routes(ROUTES, None), "POST", "/drain", content=b'{"id": "a"}')
    assert (answer.status_code, answer.json()) == (202, {"accepted": "a"})


def test_the_bodies_of_all_control_calls_are_bounded_together(guarded: list[BaseRoute]) -> None:
    async def scenario() -> tuple[int, str]:
        app = Starlette(routes=list(guarded))
        stop = asyncio.Event()

        async def half_a_body() -> Any:
            first = {"type": "http.request", "body": bytes(MAX_BODY_BYTES), "more_body": True}
            yield first
            await stop.wait()
            yield {"type": "http.disconnect"}

        async def hang(messages: Any) -> None:
            scope = {"type": "http", "method": "POST", "path": "/drain", "headers": [], "query_string": b""}
            await app(scope, messages.__anext__, lambda _: asyncio.sleep(0))

        hanging = [asyncio.create_task(hang(half_a_body())) for _ in range(4)]
        await asyncio.sleep(0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as client:
            answer = await client.post("/drain", content=b"{}")
            stop.set()
            await asyncio.gather(*hanging)
            again = await client.post("/drain", content=b"{}")
        assert again.status_code == 401
        return answer.status_code, answer.headers["retry-after"]

    assert asyncio.run(scenario()) == (503, "1")
