"""Rights that the configuration needs: one that is missing ends the operator with its name, and nothing else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.domain.clock import SystemClock
from stoker.operator.service.config import ApiConfig, LeaseConfig, OperatorConfig, ProbeListenConfig, WatchConfig
from stoker.operator.service.program import OperatorProgram
from stoker.operator.service.rights import check_rights, cluster_wide
from stoker.pod.config_file import ConfigError

NODES = {"/api/v1/nodes": 403}


@asynccontextmanager
async def api_server(folder: Path, answers: Mapping[str, int]) -> AsyncIterator[Path]:
    """Run an API server that has nothing, takes everything and refuses some paths; yield its kubeconfig."""

    async def answer(request: web.BaseRequest) -> web.Response:
        code = answers.get(request.path, 200)
        if code != 200:
            return web.json_response({"message": f"{request.path} is refused"}, status=code)
        if request.method in ("POST", "PUT"):
            body = await request.json()
            body["metadata"] = {**body["metadata"], "uid": "u", "resourceVersion": "1"}
            return web.json_response(body)
        one = request.path.rsplit("/", 2)[-2] in ("leases", "secrets")
        return web.json_response(
            {"message": "none"} if one else {"items": [], "metadata": {}}, status=404 if one else 200
        )

    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    try:
        yield file
    finally:
        await runner.cleanup()


def test_an_operator_that_may_not_list_nodes_ends_and_names_the_right_and_the_value(tmp_path: Path) -> None:
    async def story() -> None:
        async with api_server(tmp_path, NODES) as kubeconfig:
            config = OperatorConfig(
                namespace="stoker",
                api=ApiConfig(kubeconfig=str(kubeconfig)),
                listen=ProbeListenConfig(host="127.0.0.1", port=0),
                lease=LeaseConfig(duration_s=300, renew_deadline_s=200, retry_s=0.4),
                wake_ups=(),
            )
            wanted = r"watch\.nodes is true.* list nodes .*set watch\.nodes to false"
            async with asyncio.timeout(120):  # without the check it waits for ever
                with pytest.raises(ConfigError, match=wanted):
                    await OperatorProgram(config).run(asyncio.Event())

    asyncio.run(story())


@pytest.mark.parametrize(
    ("code", "refused"), [(403, True), (401, False), (503, False), (200, False)], ids=["403", "401", "503", "200"]
)
def test_only_a_refusal_is_a_missing_right(tmp_path: Path, code: int, refused: bool) -> None:
    async def story() -> str:
        async with api_server(tmp_path, {"/api/v1/pods": code}) as kubeconfig:
            access, limit = Access(str(kubeconfig)), RateLimit(SystemClock(), per_second=100, burst=100)
            connection = ApiConnection(access, limit)
            try:
                await check_rights(connection, ("Node", "Pod"))
            except ConfigError as error:
                return str(error)
            finally:
                await connection.close()
        return ""

    assert asyncio.run(story()).startswith("watch.pods is true") is refused


@pytest.mark.parametrize(
    ("watch", "namespaces", "kinds"),
    [
        (WatchConfig(), (), ("Node", "Pod")),
        (WatchConfig(), ("research",), ("Node",)),
        (WatchConfig(pods=False), (), ("Node",)),
        (WatchConfig(nodes=False), (), ()),
    ],
)
def test_the_rights_are_those_of_the_kinds_that_are_listed_in_the_whole_cluster(
    watch: WatchConfig, namespaces: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    assert cluster_wide(OperatorConfig(watch=watch, namespaces=namespaces)) == kinds
