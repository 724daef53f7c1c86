"""Models of other deployments behind one endpoint: by the field `model`, with one list, and the client's own key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.config_file import ConfigError
from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.connection import Outgoing
from stoker.router.other_models import PASSED_ON_HEADER, asked_model, for_deployment, was_passed_on
from stoker.router.snapshot import parse_snapshot
from testing.router.fake_engine import Behaviour, Exchange, FakeEngine
from testing.router.harness import routed, run, snapshot, until

KEY = {"Authorization": "Bearer right"}


def serving(*names: str) -> Behaviour:
    """An engine or a deployment's endpoint: it lists its names, takes one key, and says what it was asked."""

    async def answer(exchange: Exchange) -> None:
        if exchange.headers.get("authorization") != KEY["Authorization"]:
            return await exchange.json({"error": {"code": "invalid_api_key"}}, 401)
        if exchange.path == "/v1/models":
            return await exchange.json({"object": "list", "data": [{"id": name, "owned_by": "me"} for name in names]})
        asked = json.loads(exchange.body)
        if asked.get("stream"):
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data(f"data: {json.dumps({'model': asked['model']})}\n\ndata: [DONE]\n\n")
            return await exchange.end()
        passed = exchange.headers.get("x-stoker-passed-on")
        return await exchange.json({"by": names[0], "model": asked.get("model"), "for": passed})

    return answer


def with_models(version: int, big: FakeEngine, *others: dict[str, Any]) -> dict[str, Any]:
    return {**snapshot(version, big.entry()), "own_models": ["big", "large"], "models": list(others)}


def other(name: str, engine: FakeEngine, model: str) -> dict[str, Any]:
    return {
        "name": name,
        "deployment": "tiny-one",
        "endpoint": {"url": engine.url, "deployment": "tiny-one", "model": model},
    }


MISSING = {"name": "gone", "deployment": "nowhere", "problem": "InferenceDeployment nowhere does not exist"}


def test_a_request_goes_where_its_model_is_served_and_the_list_has_all() -> None:
    async def scenario() -> None:
        big, small = (
            await FakeEngine("big", serving("big", "large")).start(),
            await FakeEngine("s", serving("tiny")).start(),
        )
        async with routed(big, deployment="main") as (router, client):
            client.headers.update(KEY)

            async def ask(model: str | None, **more: Any) -> Any:
                fields = {"prompt": "x", **({"model": model} if model else {})}
                return await client.post("/v1/completions", json=fields, **more)

            body = with_models(2, big, other("tiny", small, "tiny"), other("alias", small, "tiny"), MISSING)
            assert (await client.put("/backends", json=body)).json()["accepted"]
            for model, by, seen in [("big", "big", "big"), ("large", "big", "large"), (None, "big", None),
                                    ("tiny", "tiny", "tiny"), ("alias", "tiny", "tiny")]:  # fmt: skip
                answer = await ask(model)
                there = by == "tiny"
                assert answer.json() == {"by": by, "model": seen, "for": "main" if there else None}
                assert answer.headers.get("x-stoker-passed-on") == ("tiny-one" if there else None)
            stream = await client.post("/v1/completions", json={"model": "alias", "prompt": "x", "stream": True})
            assert (stream.status_code, '"model": "tiny"' in stream.text) == (200, True)

            listed = (await client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["big", "large", "tiny", "alias", "gone"]
            assert [card.get("ready", True) for card in listed] == [True, True, True, True, False]
            assert listed[3]["deployment"] == "tiny-one"
            assert (await client.get("/v1/models/alias")).json() == listed[3]
            for path in ("/v1/models", "/v1/models/alias", "/v1/models/nothing"):
                whole, head = await client.get(path), await client.head(path)
                assert (head.status_code, head.content) == (whole.status_code, b""), path
                assert head.headers["content-length"] == whole.headers["content-length"], path

            unknown = await ask("nothing")
            error = unknown.json()["error"]
            assert (unknown.status_code, error["code"], error["param"], error["type"]) == (
                404, "model_not_found", "model", "invalid_request_error",
            )  # fmt: skip
            assert "big, large, tiny, alias, gone" in error["message"]
            assert (await client.get("/v1/models/nothing")).status_code == 404
            missing = await ask("gone")
            assert (missing.status_code, missing.json()["error"]["code"]) == (503, "model_unavailable")
            assert "nowhere does not exist" in missing.json()["error"]["message"]
            assert missing.headers["retry-after"] == "1"
            again = await ask("tiny", headers={"x-stoker-passed-on": "another"})
            assert again.json()["by"] == "big", "what was passed on once is for the own engines"

            for path in ("/v1/models", "/v1/models/tiny"):
                refused = await client.get(path, headers={"Authorization": "Bearer wrong"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            refused = await ask("nothing", headers={"Authorization": "Bearer wrong"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), (
                "no name is shown"
            )

            assert router.metrics.passed_on.labels("tiny-one")._value.get() == 3
            status = (await client.get("/status")).json()["models"]
            assert status[2] == MISSING
        small.kill()

    run(scenario)


def test_each_deployment_is_there_without_the_other() -> None:
    async def scenario() -> None:
        big, small = (
            await FakeEngine("big", serving("big", "large")).start(),
            await FakeEngine("s", serving("tiny")).start(),
        )
        async with routed(big, deployment="main") as (router, client):
            client.headers.update(KEY)
            await client.put("/backends", json=with_models(2, big, other("tiny", small, "tiny")))
            big.ready = False
            await until(lambda: not router.backends.ready)
            assert (await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 200
            lost = await client.post("/v1/completions", json={"model": "big", "prompt": "x"})
            assert (lost.status_code, lost.json()["error"]["code"]) == (503, "no_backend")
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card.get("ready", True)) for card in listed] == [
                ("big", False), ("large", False), ("tiny", True),
            ]  # fmt: skip
            small.kill()
            assert (await client.get("/v1/models")).status_code == 503
            big.ready = True
            await until(lambda: bool(router.backends.ready))
            lost = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert (lost.status_code, lost.json()["error"]["code"]) == (503, "model_unavailable")
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card.get("ready", True)) for card in listed][2:] == [("tiny", False)]

    run(scenario)


TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
"""Halves of surrogate pairs too: JSON can have them, UTF-8 cannot."""
FIELDS = st.dictionaries(st.sampled_from(["model", "a", "prompt"]), st.none() | st.integers() | TEXT)
NESTED = b'{"model": "tiny", "prompt": %b%b}' % (b"[" * 20_000, b"]" * 20_000)


@given(fields=FIELDS, model=st.text(min_size=1, max_size=5))
def test_passing_on_changes_the_model_alone_and_the_same_name_changes_no_byte(
    fields: dict[str, Any], model: str
) -> None:
    body = json.dumps(fields, indent=1).encode()
    request = Outgoing("POST", b"/v1/completions", [(b"a", b"b"), (RESUME_HEADER, b"1")], body)
    assert asked_model(request) == (fields.get("model") if isinstance(fields.get("model"), str) else None)
    passed = for_deployment(request, model, "own")
    assert list(passed.headers) == [(b"a", b"b"), (PASSED_ON_HEADER, b"own")]
    assert was_passed_on(passed)
    assert not was_passed_on(request)
    if fields.get("model") in (None, model):
        assert passed.body == body
    else:
        assert json.loads(passed.body) == {**fields, "model": model}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"not JSON", b"[1]", b'{"model": 3}', b'{"tools": [{"model": "x"}]}',
        pytest.param(NESTED, id="nested too deeply"),
    ],
)  # fmt: skip
def test_what_names_no_model_is_for_the_own_engines(body: bytes) -> None:
    assert asked_model(Outgoing("POST", b"/v1/completions", (), body)) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"own_models": []}, "own_models: needed beside models"),
        ({"own_models": ["gone"]}, "models: listed twice: gone"),
        ({"models": [{**MISSING, "problem": ""}]}, "either endpoint or problem"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_snapshot({"version": 1, "backends": [], "own_models": ["big"], "models": [MISSING], **change})
