"""The OpenAPI document is true: requests drawn from it get documented answers and nothing fails inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from stoker.gateway.config import GatewayConfig
from stoker.gateway.http.app import make_app
from testing.gateway.openapi_fuzz import Asked, Operation, check_answer, operations, requests_of
from testing.gateway.world import World, world
from testing.openapi.fuzz import fuzz, labels
from testing.openapi.send import Sender, opened

DOCUMENT: dict[str, Any] = make_app(None).openapi()  # type: ignore[arg-type]
OPERATIONS = list(operations(DOCUMENT))
KNOWN = {
    "job_id": ["run", "done", "00000000-0000-4000-8000-000000000001", "nothing"],
    "checkpoint_id": ["done-10", "nothing"],
    "deployment_id": ["nothing"],
    "namespace": ["default", "team-a", "*"],
    "watch": ["false"],
    "follow": ["false"],
    "if-match": ['"3"', "*", "nonsense"],
}


async def prepared(found: World) -> None:
    """A running job with a pod, and a finished one with a checkpoint."""
    running = found.put_status(found.job(), phase="Running", progress={"step": 3, "totalSteps": 100, "loss": "2.5"})
    found.pod(running, 0, "step 1/100  loss 2.5000  lr 3.0e-04  norm 0.90  310 tokens/s  ETA 2m10s\n")
    done = found.put_status(found.job("done"), phase="Completed")
    found.checkpoint(done, 10)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_answer_is_documented(operation: Operation, tmp_path: Path) -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(requests_of(DOCUMENT, operation, KNOWN))
    def check(asked: Asked) -> None:
        if "true" in (str(asked.query.get("watch")).lower(), str(asked.query.get("follow")).lower()):
            return  # a stream: test_streams.py
        answer = runner.run(
            found.client.request(
                operation.method, asked.path, params=asked.query, headers=asked.headers, json=asked.body
            )
        )
        check_answer(DOCUMENT, operation, answer)

    gateway = world("embedded", tmp_path)  # schemathesis asks the other kind
    with asyncio.Runner() as runner:
        found = runner.run(gateway.__aenter__())
        runner.run(prepared(found))
        check()
        runner.run(gateway.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """A gateway with a running and a finished job, whose streams are asked for once and not followed."""
    with opened(_gateway(tmp_path_factory.mktemp("gateway"))) as send:

        def without_streams(**request: Any) -> httpx.Response:
            given = request.pop("params", None) or {}
            headers = {k: v for k, v in request.pop("headers").items() if k.lower() not in ("accept", "authorization")}
            params = {name: value for name, value in given.items() if name not in ("watch", "follow")}
            return send(**request, params=params, headers=headers)

        yield without_streams


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with world("kubernetes", folder, config=GatewayConfig(metrics_task_wait_s=0)) as found:
        await prepared(found)
        yield found.client


@pytest.mark.parametrize("label", labels(DOCUMENT))
def test_schemathesis_finds_no_undocumented_answer(gateway: Sender, label: str) -> None:
    assert fuzz(DOCUMENT, label, gateway, examples=4)


def test_the_document_is_one_and_names_every_route(tell: Callable[..., None]) -> None:
    async def story(found: World) -> None:
        served = (await found.client.get("/openapi.json", headers={"Authorization": ""})).json()
        assert served == DOCUMENT

    tell(story)
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema({**schema, "$id": name})
    asked = {
        "POST /v1/training/jobs",
        "GET /v1/training/jobs",
        "GET /v1/training/jobs/{job_id}",
        "DELETE /v1/training/jobs/{job_id}",
        "POST /v1/training/jobs/{job_id}/checkpoint",
        "GET /v1/training/jobs/{job_id}/checkpoints",
        "POST /v1/training/jobs/{job_id}/resume",
        "GET /v1/cluster/status",
        "GET /v1/cluster/nodes",
    }
    assert asked <= {str(operation) for operation in OPERATIONS}


def test_unknown_paths_methods_and_bodies_are_problems(tell: Callable[..., None]) -> None:
    async def story(found: World) -> None:
        cases = (
            (await found.client.get("/v1/nothing"), 404),
            (await found.client.put("/v1/training/jobs"), 405),
            (await found.client.post("/v1/training/jobs", content=b"{"), 422),
            (await found.client.post("/v1/training/jobs", content=b"x" * (1 << 20) + b"x"), 413),
            (await found.client.get("/v1/training/jobs/%2e%2e"), 422),
            (await found.client.get("/v1/training/jobs/"), 404),
        )
        for answer, status in cases:
            assert answer.status_code == status, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
        text = (await found.client.get("/metrics")).text
        assert 'stoker_gateway_requests_total{code="413",method="POST",route="none"} 1.0' in text

    tell(story)
