"""Callers: who they are, and that they can do what their rights allow and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from stoker.gateway.cluster.access import read_key
from stoker.gateway.cluster.interface import ApiError
from stoker.gateway.config import ApiServerConfig, GatewayConfig
from stoker.pod.config_file import ConfigError, parse
from testing.gateway.world import World, world

JOBS = "/v1/training/jobs"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("headers", [{"Authorization": ""}, bearer("wrong"), {"Authorization": "Basic a2s="}])
def test_a_caller_without_a_known_token_is_refused(tell: Callable[..., None], headers: dict[str, str]) -> None:
    async def story(found: World) -> None:
        answer = await found.client.get(JOBS, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="stoker"')
        assert answer.json()["type"] == "urn:stoker:problem:unauthenticated"

    tell(story)


def kubernetes(folder: Path, story: Callable[[World], object], **options: object) -> None:
    async def told() -> None:
        async with world("kubernetes", folder, **options) as found:  # type: ignore[arg-type]
            await story(found)  # type: ignore[misc]

    asyncio.run(told())


def test_rights_are_the_callers_own(tmp_path: Path) -> None:
    async def story(found: World) -> None:
        found.job("theirs", namespace="team-a")
        found.job("ours")
        own = await found.client.get(JOBS, params={"namespace": "team-a"}, headers=bearer("alice"))
        assert [job["job_name"] for job in own.json()["items"]] == ["theirs"]
        for request in (
            found.client.get(JOBS, headers=bearer("alice")),
            found.client.get(JOBS, params={"namespace": "*"}, headers=bearer("alice")),
            found.client.get("/v1/cluster/status", headers=bearer("alice")),
            found.client.delete(f"{JOBS}/ours", headers=bearer("viewer")),
        ):
            refused = await request
            assert (refused.status_code, refused.json()["type"]) == (403, "urn:stoker:problem:forbidden")
            assert "cannot" in refused.json()["detail"]
        assert found.server is not None
        assert {name for name, _, _ in found.server.requests} == {"alice", "viewer"}

    kubernetes(tmp_path, story)


def test_names_of_callers_may_have_any_letters(tmp_path: Path) -> None:
    async def story(found: World) -> None:
        answer = await found.client.get(JOBS, headers=bearer("far"))
        assert answer.status_code == 200, answer.text
        assert found.server is not None
        assert {name for name, _, _ in found.server.requests} == {"jürgen@example.com"}

    kubernetes(tmp_path, story)


def test_attributes_that_may_limit_a_caller_are_never_dropped(tmp_path: Path) -> None:
    async def story(found: World) -> None:
        limited = await found.client.get(JOBS, headers=bearer("limited"))
        assert (limited.status_code, "scopes.example.com/only" in limited.json()["detail"]) == (403, True)
        assert (await found.client.get(JOBS, headers=bearer("pod"))).status_code == 200

    kubernetes(tmp_path, story)

    async def passed(found: World) -> None:
        assert (await found.client.get(JOBS, headers=bearer("limited"))).status_code == 200

    kubernetes(tmp_path, passed, access_options={"passed_extras": ("scopes.example.com/only",)})


def test_a_token_is_not_reviewed_for_each_request(tmp_path: Path) -> None:
    async def story(found: World) -> None:
        for _ in range(3):
            await found.client.get(JOBS)
        assert found.server is not None
        assert found.server.reviews == 1

    kubernetes(tmp_path, story, access_options={"identity_cache_s": 300.0})

    async def never_kept(found: World) -> None:
        for _ in range(3):
            await found.client.get(JOBS)
        assert found.server is not None
        assert found.server.reviews == 3

    kubernetes(tmp_path, never_kept, access_options={"identity_cache_s": 0.0})


def test_a_failing_cluster_is_no_fault_of_the_caller(tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.client.get(JOBS)
        assert found.server is not None
        for code, status, headers in ((500, 502, {}), (401, 502, {}), (429, 429, {"Retry-After": "3"})):
            found.server.failing = JSONResponse({"message": "no"}, code, headers)
            answer = await found.client.get(JOBS)
            assert (answer.status_code, answer.headers.get("retry-after")) == (status, headers.get("Retry-After"))
        health = await found.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")

    kubernetes(tmp_path, story)


def test_the_key_of_the_embedded_cluster_is_its_users_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 43)
    key.chmod(0o640)
    with pytest.raises(ApiError, match="mode 0640 lets others read it"):
        read_key(str(key))
    key.chmod(0o600)
    assert read_key(str(key)) == "k" * 43
    key.write_text("short")
    with pytest.raises(ApiError, match="at least 32 characters"):
        read_key(str(key))
    with pytest.raises(ApiError, match="No such file"):
        read_key(str(tmp_path / "none"))


def test_a_cluster_that_does_not_answer_is_503(tmp_path: Path) -> None:
    async def story() -> None:
        async with world("embedded", tmp_path, sockets=True) as found:
            (tmp_path / "api.sock").unlink()
            answer = await found.client.get(JOBS)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json()["type"] == "urn:stoker:problem:cluster-unreachable"

    asyncio.run(story())


def test_tokens_leave_this_machine_only_over_tls() -> None:
    with pytest.raises(ConfigError, match="https:// is needed beyond this machine"):
        parse(GatewayConfig, {"cluster": {"kind": "kubernetes", "url": "http://api.example.com"}})
    config = parse(GatewayConfig, {"cluster": {"kind": "kubernetes", "url": "http://127.0.0.1:8001"}})
    assert isinstance(config.cluster, ApiServerConfig)
