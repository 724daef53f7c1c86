"""A gateway in front of an in-memory cluster with the real admission, without processes or sockets."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx
from starlette.applications import Starlette

from stoker.gateway.cluster.access import Access, EmbeddedAccess, KubernetesAccess
from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.config import ApiServerConfig, EmbeddedConfig, GatewayConfig
from stoker.gateway.http.app import make_app
from stoker.gateway.http.caller import Gateway
from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.service.local.kube_api import kube_routes
from stoker.pod.control_key import new_private_key
from stoker.pod.serve import Server, bind_tcp, bind_unix
from testing.gateway.api_server import OWN_TOKEN, ApiServer, User
from testing.gateway.device_api import DeviceApi
from testing.operator.fakes import FakeClock

Which = Literal["embedded", "kubernetes"]
PATIENCE_S = 60.0
"""Longest wait for an answer in a world; a busy machine is slow."""
KEY = "k" * 43
ADMIN = User("admin", namespaces=("*",))
USERS = {
    KEY: ADMIN,
    "alice": User("alice", groups=("team-a",), namespaces=("team-a",)),
    "viewer": User("viewer", namespaces=("default",), verbs=("get", "list", "watch")),
    "reader": User("reader", namespaces=("*",), verbs=("list", "watch")),
    "limited": User("limited", extra={"scopes.example.com/only": ["read"]}, namespaces=("*",)),
    "far": User("jürgen@example.com", groups=("größe", "東京"), namespaces=("*",)),
    "pod": User("pod", extra={"authentication.kubernetes.io/pod-name": ["p"]}, namespaces=("*",)),
}
"""Token -> user of the API server. The embedded cluster knows the first alone."""
JOB_SPEC: Mapping[str, Any] = {
    "model": {
        "architecture": "llama",
        "hiddenSize": 64,
        "intermediateSize": 128,
        "numLayers": 2,
        "numHeads": 4,
        "vocabSize": 512,
    },
    "training": {"totalSteps": 100, "globalBatchSize": 8, "microBatchSize": 1, "sequenceLength": 64},
    "data": {"sources": [{"name": "text", "path": "/data/text.txt"}]},
    "checkpoint": {"storage": {"claimName": "claim"}},
}


@cache
def admission() -> Admission:
    """The real admission; compiling its rules takes seconds."""
    return Admission(definition(info) for info in KIND_INFOS)


class ServedAddresses(Addresses):
    """Addresses of 127.0.0.1 alone: a port is the one that a test serves there."""

    def __init__(self) -> None:
        super().__init__("ports", lambda _: True)
        self.served: dict[tuple[Host, int], int] = {}
        """The port of this machine that serves a host's port."""

    def port(self, host: Host, port: int, run: int = 1) -> int:
        return self.served.get((host, port)) or super().port(host, port, run)


@dataclass
class World:
    """The gateway, and what is behind it."""

    which: Which
    objects: ObjectStore
    folders: StateFolders
    access: Access
    client: httpx.AsyncClient
    """A client of the gateway with the administrator's token."""
    server: ApiServer | None
    gateway: Gateway
    addresses: ServedAddresses
    """Where Services and pods of the embedded cluster are reached."""
    api: Any
    """The cluster's API as an ASGI application, without identities."""
    devices: DeviceApi
    """Devices that drivers publish, and claims; none unless a test puts some there."""

    def put_status(self, found: Mapping[str, Any], **status: Any) -> Object:
        """Write the status of a resource, as the operator would."""
        metadata = found["metadata"]
        ref = Ref(found["kind"], metadata["namespace"], metadata["name"], metadata["uid"])
        old = self.objects.get(Key(*ref[:3])).get("status") or {}
        return self.objects.update_status(ref, {**old, **status})

    def job(self, name: str = "run", namespace: str = "default", **spec: Any) -> Object:
        """Create a TrainingJob behind the gateway's back."""
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata}
        return self.objects.create({**body, "spec": {**JOB_SPEC, **spec}})

    def checkpoint(self, job: Object, step: int, *, verified: bool = True) -> Object:
        """Create a Checkpoint of a job that is complete."""
        metadata = job["metadata"]
        save = {
            "jobRef": {"name": metadata["name"], "uid": metadata["uid"]},
            "writer": "0a1b2c3d",
            "storage": {"claimName": "claim"},
            "folder": f"step-{step:08}.0a1b2c3d",
            "step": step,
            "digest": f"blake3:{step:064x}",
        }
        place = {"name": f"{metadata['name']}-{step}", "namespace": metadata["namespace"]}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": place}
        found = self.objects.create({**body, "spec": {"source": {"save": save}}})
        condition = {
            "type": "Verified",
            "status": "True" if verified else "False",
            "reason": "Read",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        return self.put_status(found, phase="Complete", step=step, loss="2.5", conditions=[condition])

    def pod(
        self,
        job: Object,
        rank: int,
        log: str,
        *,
        attempt: int = 0,
        phase: str = "Running",
        gpus: int = 0,
        node: str = "local",
        port: int | None = None,
        claims: tuple[str, ...] = (),
    ) -> Object:
        """Create a trainer's pod of a job with its log."""
        metadata = job["metadata"]
        labels = {
            "stoker.dev/job-uid": metadata["uid"],
            "stoker.dev/attempt": str(attempt),
            "stoker.dev/node-rank": str(rank),
            "stoker.dev/role": "trainer",
        }
        name = f"{metadata['name']}-a{attempt}-{rank}"
        container: dict[str, Any] = {
            "name": "main",
            "command": ["true"],
            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        }
        if port is not None:
            container["ports"] = [{"name": "http", "containerPort": port}]
        entries = [{"name": name, "resourceClaimName": name} for name in claims]
        spec = {"restartPolicy": "Never", "nodeName": node, "containers": [container], "resourceClaims": entries}
        place = {"name": name, "namespace": metadata["namespace"], "labels": labels}
        found = self.objects.create({"apiVersion": "v1", "kind": "Pod", "metadata": place, "spec": spec})
        file = self.folders.log(metadata["namespace"], name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(log)
        return self.put_status(found, phase=phase)


@asynccontextmanager
async def world(
    which: Which,
    folder: Path,
    *,
    sockets: bool = False,
    gpus: tuple[str, ...] = ("0", "1"),
    prometheus: Prometheus | None = None,
    access_options: Mapping[str, Any] | None = None,
    history: int = 5000,
    now: Callable[[], datetime] | None = None,
    config: GatewayConfig | None = None,
) -> AsyncIterator[World]:
    """A gateway and its cluster. With `sockets` both are real servers, which streams need."""
    numbers = itertools.count(1)
    clock = FakeClock()
    objects = ObjectStore(
        now=now or clock.now,
        new_uid=lambda: f"00000000-0000-4000-8000-{next(numbers):012x}",
        admit=admission().admit,
        history=history,
    )
    pods = PodHttp(new_private_key(), SystemClock(), lambda: "token")
    addresses = ServedAddresses()
    cluster = LocalCluster(objects, addresses, pods, SystemClock())
    folders = StateFolders(folder / "state")
    folders.make()
    devices = DeviceApi()
    api: Any = Starlette(routes=[*devices.routes(), *kube_routes(cluster, folders, Gpus(gpus))])
    server = ApiServer(api, USERS) if which == "kubernetes" else None
    async with AsyncExitStack() as stack:
        access = await _access(stack, server or api, folder, sockets, access_options or {}, server is not None)
        stack.push_async_callback(access.close)
        ids = map(str, itertools.count())
        gateway = Gateway(
            config or GatewayConfig(), access, prometheus or Prometheus(None), lambda: next(ids),
            agent_wait_s=PATIENCE_S, program_wait_s=PATIENCE_S,
        )  # fmt: skip
        client = await _client(stack, gateway, sockets)
        yield World(which, objects, folders, access, client, server, gateway, addresses, api, devices)


@asynccontextmanager
async def serve_api(found: World) -> AsyncIterator[str]:
    """The cluster's API on a port of its own; its URL."""
    async with AsyncExitStack() as stack:
        yield await _serve(stack, found.api)


async def _access(
    stack: AsyncExitStack, app: Any, folder: Path, sockets: bool, options: Mapping[str, Any], kubernetes: bool
) -> Access:
    transport = None if sockets else httpx.ASGITransport(app)
    if kubernetes:
        token = folder / "token"
        token.write_text(OWN_TOKEN)
        url = await _serve(stack, app) if sockets else "http://127.0.0.1"
        config = ApiServerConfig(url=url, token_file=str(token), ca_file=None, **options)
        return KubernetesAccess(config, transport=transport, timeout=httpx.Timeout(PATIENCE_S))
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    socket = folder / "api.sock"
    if sockets:
        await _start(stack, Server(app, bind_unix(socket)))
    place = EmbeddedConfig(kind="embedded", socket=str(socket), key_file=str(key))
    return EmbeddedAccess(place, transport=transport, timeout=httpx.Timeout(PATIENCE_S))


async def _client(stack: AsyncExitStack, gateway: Gateway, sockets: bool) -> httpx.AsyncClient:
    app = make_app(gateway)
    url = await _serve(stack, app) if sockets else "http://gateway"
    transport = None if sockets else httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    client = httpx.AsyncClient(
        base_url=url, headers=headers, transport=transport, trust_env=False, timeout=2 * PATIENCE_S
    )
    return await stack.enter_async_context(client)


async def _serve(stack: AsyncExitStack, app: Any) -> str:
    server = Server(app, bind_tcp("127.0.0.1", 0))
    await _start(stack, server)
    return f"http://127.0.0.1:{server.port}"


async def _start(stack: AsyncExitStack, server: Server) -> None:
    await server.start()
    stack.push_async_callback(server.stop, 1.0)
