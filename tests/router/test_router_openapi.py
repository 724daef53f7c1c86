"""The OpenAPI document of a router is true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from stoker.router.api_document import DOCUMENT_PATH, router_document
from testing.openapi.fuzz import fuzz, labels
from testing.openapi.send import Sender, opened
from testing.router.fake_engine import FakeEngine
from testing.router.harness import routed

DOCUMENT = router_document()


@pytest.fixture
def router() -> Iterator[Sender]:
    """A router with one engine, on a real port."""
    with opened(_router()) as send:
        yield send


@asynccontextmanager
async def _router() -> Any:
    engine = FakeEngine("engine-0")
    await engine.start()
    async with routed(engine) as (_, client):
        yield client


@pytest.mark.parametrize("label", labels(DOCUMENT))
def test_every_answer_is_documented(router: Sender, label: str) -> None:
    seen = fuzz(DOCUMENT, label, router)
    assert 200 in seen or label == "PUT /backends", seen


def test_the_document_is_served_and_the_engines_own_too(router: Sender) -> None:
    assert router(method="GET", url=DOCUMENT_PATH).json() == DOCUMENT
    assert router(method="GET", url="/openapi.json").json()["pod"] == "engine-0"


def test_an_operators_route_needs_its_token(router: Sender) -> None:
    put = DOCUMENT["paths"]["/backends"]["put"]
    assert put["security"] == [{"operator": []}]
    answer: httpx.Response = router(method="PUT", url="/backends", json={"version": "x", "backends": 3})
    assert answer.status_code == 400
    assert {"version", "backends"} <= set(answer.json()["error"].replace(":", " ").split())
    assert "$ref" not in str(put)
    newer = router(method="PUT", url="/backends", json={"version": 7, "backends": []})
    assert (newer.status_code, newer.json()) == (202, {"accepted": True, "version": 7})
