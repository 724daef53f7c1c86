"""A small client of an API server for tests: JSON in, JSON out.

It shares no code with the operator's, so neither hides a mistake of the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp

from e2e.api.access import Access
from e2e.api.sockets import Sockets

Object = dict[str, Any]

GROUPS = {
    "TrainingJob": "apis/stoker.dev/v1alpha1",
    "Checkpoint": "apis/stoker.dev/v1alpha1",
    "InferenceDeployment": "apis/stoker.dev/v1alpha1",
    "EnginePool": "apis/stoker.dev/v1alpha1",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1",
    "Lease": "apis/coordination.k8s.io/v1",
    "Job": "apis/batch/v1",
    "JobSet": "apis/jobset.x-k8s.io/v1alpha2",
    "PodDisruptionBudget": "apis/policy/v1",
    "NetworkPolicy": "apis/networking.k8s.io/v1",
    "ExternalArtifact": "apis/source.toolkit.fluxcd.io/v1",
    "Kustomization": "apis/kustomize.toolkit.fluxcd.io/v1",
}
"""API paths of the kinds outside the core group."""
STARTS_STORAGE = "storage is (re)initializing"
"""Message while the API server takes over a definition; it asks clients to come again after a second."""
STORAGE_TRIES = 30
CLUSTER_WIDE = frozenset({"Namespace", "Node", "PersistentVolume", "CustomResourceDefinition"})


class ApiRefused(Exception):
    """The API server answered with an error; its Status is in `status`."""

    def __init__(self, status: Object) -> None:
        super().__init__(str(status.get("message")))
        self.status = status

    @property
    def code(self) -> int:
        return int(self.status.get("code", 0))


class ApiClient:
    """The client as an async context manager."""

    def __init__(self, access: Access) -> None:
        self.access = access

    async def __aenter__(self) -> ApiClient:
        self._sockets = Sockets()
        self._connector = aiohttp.TCPConnector(limit=64, ssl=self.access.tls or False, socket_factory=self._sockets)
        self._session = aiohttp.ClientSession(
            connector=self._connector, headers=self.access.headers, read_bufsize=8 << 20
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connector.close(abort_ssl=True)
        await self._session.close()
        await self._sockets.closed()

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self.ask("GET", path_of(kind, namespace, name))

    async def list(self, kind: str, namespace: str = "", **query: str) -> list[Object]:
        listed = await self.ask("GET", path_of(kind, namespace), query=query)
        return [{"kind": kind, "apiVersion": listed["apiVersion"], **item} for item in listed["items"]]

    async def create(self, body: Object, **query: str) -> Object:
        return await self.ask("POST", path_of(body["kind"], _namespace(body)), body, query=query)

    async def replace(self, body: Object, **query: str) -> Object:
        return await self.ask("PUT", _path(body), body, query=query)

    async def apply(self, body: Object, manager: str, *, force: bool = False, subresource: str = "") -> Object:
        """Apply an object (server-side apply)."""
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self.ask("PATCH", _path(body, subresource), body, query=query, kind="apply-patch+yaml")

    async def patch(self, kind: str, namespace: str, name: str, body: Object, subresource: str = "") -> Object:
        """Patch an object (JSON merge patch)."""
        return await self.ask("PATCH", path_of(kind, namespace, name, subresource), body, kind="merge-patch+json")

    async def delete(self, kind: str, namespace: str, name: str, **options: Any) -> Object:
        return await self.ask("DELETE", path_of(kind, namespace, name), options or None)

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield events until the server ends the watch."""
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        url = f"{self.access.url}/{path_of(kind, namespace)}"
        async with self._session.get(url, params=query, timeout=aiohttp.ClientTimeout(None)) as answer:
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"]

    async def follow(self, kind: str, namespace: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield events without end, over as many watches as it takes.

        The server ends watches, and those of slow readers early; the next watch goes on from the last event.
        """
        while True:
            async for change, found in self.watch(kind, namespace, version):
                if change == "ERROR":
                    raise ApiRefused(found)
                version = found["metadata"]["resourceVersion"]
                if change != "BOOKMARK":
                    yield change, found

    async def ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None, kind: str = "json"
    ) -> Object:
        """Send one request and return the answer's JSON.

        Raises:
            ApiRefused: an answer of 400 or above.
        """
        headers = {"Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body)
        url = f"{self.access.url}/{path}"
        for left in reversed(range(STORAGE_TRIES)):
            async with self._session.request(method, url, data=data, params=query, headers=headers) as answer:
                found: Object = json.loads(await answer.read())
            if answer.status < 400:
                break
            if not left or found.get("message") != STARTS_STORAGE:
                raise ApiRefused(found)
            await asyncio.sleep(1)
        return found


def path_of(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """Return the path of an object: `api/v1/namespaces/default/pods/one/status`."""
    scope = ["namespaces", namespace] if namespace and kind not in CLUSTER_WIDE else []
    parts = [GROUPS.get(kind, "api/v1"), *scope, kind.lower() + "s", name, subresource]
    return "/".join(part for part in parts if part)


def _path(body: Object, subresource: str = "") -> str:
    return path_of(body["kind"], _namespace(body), body["metadata"]["name"], subresource)


def _namespace(body: Object) -> str:
    return str(body["metadata"].get("namespace", ""))
