"""The gateway on a real API server, with the rights that the chart gives it: callers act with their own."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.api.plane import Plane
from e2e.charts.helm import STOKER, rendered
from stoker.gateway.cluster.access import KubernetesAccess
from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.config import ApiServerConfig, GatewayConfig
from stoker.gateway.http.app import make_app
from stoker.gateway.http.caller import Gateway
from stoker.pod.serve import Server, bind_tcp
from tests.gateway.test_jobs import JOBS, WHOLE, changed
from tests.gateway.test_streams import events, take

SYSTEM = "stoker-system"
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
VERBS = ["get", "list", "watch", "create", "patch", "delete"]


@pytest.fixture(scope="module")
def config(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServerConfig]:
    """A gateway's account with the chart's rights and nothing else."""
    tmp_path = tmp_path_factory.mktemp("gateway")
    cluster = yaml.safe_load(plane.kubeconfig.read_text())["clusters"][0]["cluster"]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    plane.kubectl("create", "namespace", SYSTEM)
    chart = rendered(STOKER, {"gateway": {"enabled": True}}, "--skip-tests")
    for item in chart:
        if item["kind"] in RIGHTS and item["metadata"]["name"].endswith("-gateway"):
            plane.kubectl("apply", "-f", "-", stdin=item)
    (tmp_path / "token").write_text(token(plane, SYSTEM, "stoker-gateway"))
    yield ApiServerConfig(url=cluster["server"], ca_file=str(tmp_path / "ca.crt"), token_file=str(tmp_path / "token"))
    plane.kubectl("delete", "namespace", SYSTEM, "--wait=false")


def token(plane: Plane, namespace: str, account: str) -> str:
    return plane.kubectl("create", "token", account, "-n", namespace).strip()


def member(plane: Plane, namespace: str, name: str) -> str:
    """A service account that may do everything with the resources of its namespace; its token."""
    plane.kubectl("create", "serviceaccount", name, "-n", namespace)
    resources = ["trainingjobs", "checkpoints", "inferencedeployments"]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "member", "namespace": namespace},
        "rules": [
            {"apiGroups": ["stoker.dev"], "resources": resources, "verbs": VERBS},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        ],
    }
    plane.kubectl("apply", "-f", "-", stdin=role)
    plane.kubectl(
        "create", "rolebinding", name, "--role=member", f"--serviceaccount={namespace}:{name}", "-n", namespace
    )
    return token(plane, namespace, name)


@asynccontextmanager
async def gateway(config: ApiServerConfig, caller: str, namespace: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway on a real port."""
    async with AsyncExitStack() as stack:
        access = KubernetesAccess(config)
        stack.push_async_callback(access.close)
        made = Gateway(GatewayConfig(namespace=namespace), access, Prometheus(None), lambda: "id")
        server = Server(make_app(made), bind_tcp("127.0.0.1", 0))
        await server.start()
        stack.push_async_callback(server.stop, 1.0)
        headers = {"Authorization": f"Bearer {caller}"}
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=240, trust_env=False
        )
        yield await stack.enter_async_context(client)


def test_a_job_through_the_gateway(plane: Plane, namespace: str, config: ApiServerConfig) -> None:
    async def story() -> None:
        async with gateway(config, member(plane, namespace, "alice"), namespace) as client:
            assert (await client.get("/health")).json()["status"] == "healthy"
            key = {"Idempotency-Key": "one"}
            first, again = [await client.post(JOBS, json=WHOLE, headers=key) for _ in range(2)]
            assert (first.status_code, first.json()) == (201, again.json()), first.text
            job = (await client.get(first.headers["location"])).json()
            assert {name: job["optimization_config"][name] for name in WHOLE["optimization_config"]} == WHOLE[
                "optimization_config"
            ]
            wrong = await client.post(JOBS, json=changed("optimization_config.warmup_steps", 101))
            assert wrong.status_code == 422, wrong.text
            assert "optimization_config.warmup_steps" in [one["field"] for one in wrong.json()["errors"]], wrong.text
            unknown = await client.post(JOBS, json={**WHOLE, "spec": {"colour": "red"}})
            assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "spec.colour"), unknown.text
            other = await client.post(JOBS, json={**WHOLE, "job_name": "second"})
            assert other.status_code == 201
            page = (await client.get(JOBS, params={"limit": 1})).json()
            rest = (await client.get(JOBS, params={"limit": 1, "continue": page["continue"]})).json()
            assert {one["job_name"] for one in page["items"] + rest["items"]} == {job["job_name"], "second"}
            lost = await client.get(JOBS, params={"limit": 1, "continue": "nonsense"})
            assert (lost.status_code, lost.json()["errors"][0]["field"]) == (422, "query.continue"), lost.text
            ahead = await client.get(JOBS, params={"watch": True}, headers={"Last-Event-ID": "9" * 17})
            assert (ahead.status_code, "of another history" in ahead.json()["detail"]) == (410, True), ahead.text
            path = f"{JOBS}/{other.json()['job_id']}"
            async with client.stream("GET", path, params={"watch": True}) as answer:
                stream = events(answer)
                await take(stream, 2)
                assert (await client.delete(path)).json() == {"status": "CANCELLED"}
                ((name, data, _),) = await take(stream, 1)
                assert (name, data["spec"]["run"]["cancel"]) == ("MODIFIED", True)
            stale = await client.delete(path, params={"purge": True}, headers={"If-Match": other.headers["etag"]})
            assert stale.status_code == 412
            assert (await client.delete(path, params={"purge": True})).json() == {"status": "DELETED"}
            assert (await client.get(path)).status_code == 404
            assert (await client.get(f"{JOBS}/{job['job_id']}/logs")).text == ""

    asyncio.run(story())


def test_rights_are_the_callers_own(plane: Plane, namespace: str, config: ApiServerConfig) -> None:
    assert config.token_file is not None
    own = Path(config.token_file).read_text()

    async def story() -> None:
        alice = member(plane, namespace, "alice")
        for caller, path, status in (
            (alice, JOBS, 200),
            (alice, f"{JOBS}?namespace=kube-system", 403),
            (alice, f"{JOBS}?namespace=*", 403),
            (alice, "/v1/cluster/nodes", 403),
            ("nonsense", JOBS, 401),
            (own, JOBS, 403),  # the gateway itself may do nothing
        ):
            async with gateway(config, caller, namespace) as client:
                answer = await client.get(path)
                assert answer.status_code == status, (path, answer.text)

    asyncio.run(story())
