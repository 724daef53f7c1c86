"""A cluster of the current kubeconfig context, call by call: what `SupervisorClient` is for the embedded cluster.

Every call raises a `ClusterError`. Decides nothing about objects. Called by the verbs of a cluster and by `progress`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from stoker.cli.run_history import PathError
from stoker.operator.cluster.interface import ClusterError, NotFound
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import (
    Access,
    NoCredentials,
    context_namespace,
    own_namespace,
)
from stoker.operator.cluster.kube.kube_cluster import KubeCluster
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.kube.service_account import SERVICE_ACCOUNT
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Object, Ref
from stoker.pod.control_key import new_private_key

MANAGER = "stoker-cli"
QPS, BURST = 50, 100
T = TypeVar("T")


class ClusterClient:
    """A client of one API server. `namespace` is that of the context, unless another is given; None: all."""

    def __init__(self, access: Access, namespace: str | None = None, *, all_namespaces: bool = False) -> None:
        self.problems: list[str] = []
        """Always empty: a state folder has problems, an API server answers or not."""
        own = namespace or context_namespace(access) or own_namespace(access) or "default"
        self.own_namespace = own
        self.namespace = None if all_namespaces else own
        clock = SystemClock()
        connection = ApiConnection(access, RateLimit(clock, per_second=QPS, burst=BURST))
        self._cluster = KubeCluster(connection, PodHttp(new_private_key(), clock, lambda: ""))  # no pod is called
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._run(self._cluster.close())
        self._runner.close()

    def objects(self, kind: str, *, namespace: str | None = None, name: str | None = None) -> list[Object]:
        """List the objects of a kind, or the one with a name."""
        where = namespace or self.namespace
        if name is not None:
            return [self.get(kind, name, namespace)]
        return list(self._run(self._cluster.list(kind, namespace=where if KINDS[kind].namespaced else None)).items)

    def everywhere(self, kind: str) -> list[Object]:
        """List the objects of a kind in all namespaces."""
        return list(self._run(self._cluster.list(kind)).items)

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        return self._run(self._cluster.get(kind, namespace or self.own_namespace, name))

    def apply(self, body: Object) -> tuple[str, Object]:
        """Apply an object: `created`, `configured` or `unchanged`, and the object as it is stored."""
        metadata = body["metadata"]
        try:
            before = self.get(body["kind"], metadata["name"], metadata["namespace"])["metadata"]["resourceVersion"]
        except NotFound:
            before = None
        stored = self._run(self._cluster.apply(body, manager=MANAGER))
        same = stored["metadata"]["resourceVersion"] == before
        return "created" if before is None else "unchanged" if same else "configured", stored

    def create(self, body: Object) -> Object:
        """Create an object."""
        return self._run(self._cluster.create(body))

    def patch(self, found: Object, body: Mapping[str, Any]) -> Object:
        """Patch an object by JSON merge."""
        return self._run(self._cluster.patch(_ref(found), body))

    def delete(self, found: Object) -> bool:
        """Begin to delete an object; True when it is gone already."""
        return self._run(self._cluster.delete(_ref(found))) is None

    def logs(self, pods: Sequence[Object], *, follow: bool, tail: int | None) -> Iterator[tuple[str, bytes]]:
        """Yield (pod, whole lines): one pod after the other, or with `follow` of all pods as they come."""
        parts = [(str(pod["metadata"]["name"]), self._log(pod, follow=follow, tail=tail)) for pod in pods]
        groups = [parts] if follow else [[part] for part in parts]
        for group in groups:
            lines = _together(group)
            try:
                while True:
                    yield self._run(_next(lines))
            except StopAsyncIteration:
                continue
            finally:
                self._run(lines.aclose())

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request to a path of the API. Raises PathError."""
        try:
            if method == "GET":
                return self._run(self._text(path))
            return json.dumps(self._run(self._cluster.connection.request(method, path, resource="pods", body=body)))
        except ClusterError as error:
            raise PathError(str(error), 404 if isinstance(error, NotFound) else 0) from error

    async def _text(self, path: str) -> str:
        place, _, query = path.partition("?")
        pairs = dict(parse_qsl(query))
        parts = self._cluster.connection.parts(place, resource="pods", query=pairs, silence_s=60.0, accept="*/*")
        return b"".join([part async for part in parts]).decode(errors="replace")

    def _log(self, pod: Object, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
        metadata = pod["metadata"]
        query = {**({"follow": "true"} if follow else {}), **({"tailLines": str(tail)} if tail is not None else {})}
        path = f"/api/v1/namespaces/{quote(metadata['namespace'])}/pods/{quote(metadata['name'])}/log"
        return self._cluster.connection.parts(path, resource="pods", query=query, silence_s=None, accept="*/*")

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)


async def _next(lines: AsyncIterator[T]) -> T:
    return await anext(lines)


async def _together(logs: list[tuple[str, AsyncIterator[bytes]]]) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield the whole lines of several logs as they come, until all have ended. Raises what a log raised."""
    queue: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue(maxsize=100)

    async def pump(name: str, parts: AsyncIterator[bytes]) -> None:
        rest = b""
        try:
            async for part in parts:
                whole, end, rest = (rest + part).rpartition(b"\n")
                if end:
                    await queue.put((name, whole + end))
            if rest:
                await queue.put((name, rest + b"\n"))
        finally:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(name, parts)) for name, parts in logs]
    try:
        for _ in tasks:
            while (lines := await queue.get()) is not None:
                yield lines
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        while not queue.empty():
            queue.get_nowait()
        await asyncio.gather(*tasks, return_exceptions=True)


def find_access(kubeconfig: str | None, context: str | None, environment: Mapping[str, str] | None = None) -> Access:
    """The credentials of the command line: --kubeconfig, $KUBECONFIG, ~/.kube/config, else this pod's own.

    Raises:
        NoCredentials: there are none.
    """
    given = kubeconfig or (os.environ if environment is None else environment).get("KUBECONFIG")
    if given:
        return Access(given, context)
    usual = Path.home() / ".kube" / "config"
    if usual.exists():
        return Access(str(usual), context)
    if SERVICE_ACCOUNT.exists():
        return Access(None, None)
    raise NoCredentials(f"no kubeconfig: neither --kubeconfig nor $KUBECONFIG is given, and there is no {usual}")


def _ref(found: Object) -> Ref:
    metadata = found["metadata"]
    return Ref(found["kind"], metadata["namespace"], metadata["name"], metadata["uid"])
