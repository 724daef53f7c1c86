"""A cluster of the current kubeconfig context, call by call: what `SupervisorClient` is for the embedded cluster.

Every call raises a `ClusterError`. Decides nothing about objects. Called by the verbs of a cluster and by `progress`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from stoker.cli.cluster_logs import SILENCE_S, Choose, ClusterLogs
from stoker.cli.follow_scope import Name
from stoker.cli.log_selection import LogSelection
from stoker.cli.object_source import Missing
from stoker.cli.rank_tail import RankTail
from stoker.cli.run_history import PathError
from stoker.cli.targets import Target
from stoker.operator.cluster.interface import (
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unauthorized,
    Unserved,
)
from stoker.operator.cluster.kinds import KINDS, Kind, device_kinds
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
from stoker.pod.followed_logs import FollowedLogs
from stoker.pod.log_position import LogRequest
from stoker.pod.log_source import LogSource
from stoker.pod.resources.device import GROUP, readable_version

MANAGER = "stoker-cli"
QPS, BURST = 50, 100
REQUEST = re.compile(r"^[A-Z]+ /\S+: ")
"""The request that an error names first; a refusal names the object and the field itself."""
T = TypeVar("T")


class ClusterClient:
    """A client of one API server. `namespace` is that of the context, unless another is given; None: all."""

    def __init__(self, access: Access, namespace: str | None = None, *, all_namespaces: bool = False) -> None:
        self.problems: list[str] = []
        """Always empty: a state folder has problems, an API server answers or not."""
        self.access = access
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

    def explain(self, error: ClusterError) -> str:
        """A message for people about what this cluster refused, or why it does not answer."""
        where = f"context {self.access.context}" if self.access.context else "the current context"
        source = f"{where} of {self.access.kubeconfig}" if self.access.kubeconfig else "the pod's service account"
        if isinstance(error, Unauthorized):
            return f"{error}: the credentials of {source} are not accepted; log in again, or choose another --context"
        if isinstance(error, Unserved):
            return (
                f"{error}: the cluster of {source} does not know this kind; install Stoker's definitions "
                "(docs/install.md), or choose another --context"
            )
        if type(error) is ClusterError:
            return f"the API server of {source} does not answer: {error}"
        return REQUEST.sub("", str(error)) if isinstance(error, Invalid) else str(error)

    def objects(self, kind: str, *, namespace: str | None = None) -> list[Object]:
        """List the objects of a kind."""
        where = namespace or self.namespace
        return list(self._run(self._cluster.list(kind, namespace=where if KINDS[kind].namespaced else None)).items)

    @property
    def place(self) -> str:
        """Name where it looks, for messages."""
        return "any namespace" if self.namespace is None else f"namespace {self.namespace}"

    def listed(self, kind: Kind, labels: Mapping[str, str]) -> list[Object]:
        """List the objects of a kind that have these labels."""
        namespace = self.namespace if kind.namespaced else None
        return list(self._run(self._cluster.list(kind.name, namespace=namespace, labels=labels)).items)

    def find(self, target: Target) -> Object | Missing:
        """Find the object that a target names, in the client's own namespace unless it has one."""
        namespace = target.namespace or self.own_namespace
        try:
            return self.get(target.kind.name, target.name or "", namespace)
        except Unserved:
            raise
        except NotFound:
            where = f" in namespace {namespace}" if target.kind.namespaced else ""
            return Missing(f"{target.kind.name.lower()}/{target.name} does not exist{where}")

    def begin_deletion(self, found: Object) -> bool:
        """Begin to delete an object; True when it is gone already."""
        try:
            return self._run(self._cluster.delete(_ref(found))) is None
        except (NotFound, Conflict):
            return True

    def is_gone(self, found: Object) -> bool:
        """Whether the object does not exist any more; a new one of the same name does not count."""
        metadata = found["metadata"]
        try:
            now = self.get(found["kind"], metadata["name"], metadata.get("namespace"))
        except NotFound:
            return True
        return bool(now["metadata"]["uid"] != metadata["uid"])

    def everywhere(self, kind: str) -> list[Object]:
        """List the objects of a kind in all namespaces."""
        return list(self._run(self._cluster.list(kind)).items)

    def devices_and_claims(self, *, everywhere: bool) -> tuple[list[Object], list[Object]]:
        """List ResourceSlices and ResourceClaims; none where the API server has no such kinds.

        Without `everywhere` only the claims of the client's namespaces are listed, and no devices of nodes.
        """
        version = self._run(self._device_version())
        if not version:
            return [], []
        self._cluster.more_kinds = device_kinds(version)
        if everywhere:
            return self.everywhere("ResourceSlice"), self.everywhere("ResourceClaim")
        return [], list(self._run(self._cluster.list("ResourceClaim", namespace=self.namespace)).items)

    async def _device_version(self) -> str:
        try:
            found = await self._cluster.connection.request("GET", f"/apis/{GROUP}", resource="apis")
        except NotFound:
            return ""
        return readable_version([str(one["version"]) for one in found.get("versions") or ()])

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        return self._run(self._cluster.get(kind, namespace or self.own_namespace, name))

    def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """Read an object; None where there is none, the user may not read it, or its kind is not known here."""
        if kind not in KINDS:
            return None
        try:
            return self.get(kind, name, namespace)
        except (NotFound, Forbidden):
            return None

    def apply(self, body: Object, *, dry_run: bool = False) -> tuple[str, Object]:
        """Apply an object: `created`, `configured` or `unchanged`, and the object as it is stored.

        With `dry_run` the server checks it and answers with what it would store.
        """
        metadata = body["metadata"]
        try:
            before = self.get(body["kind"], metadata["name"], metadata["namespace"])
        except NotFound:
            before = None
        stored = self._run(self._cluster.apply(body, manager=MANAGER, dry_run=dry_run))
        same = before is not None and _content(stored) == _content(before)
        return "created" if before is None else "unchanged" if same else "configured", stored

    def create(self, body: Object) -> Object:
        """Create an object."""
        return self._run(self._cluster.create(body))

    def patch(self, found: Object, body: Mapping[str, Any]) -> Object:
        """Patch an object by JSON merge."""
        return self._run(self._cluster.patch(_ref(found), body))

    def log(self, pod: Object, request: LogRequest) -> bytes:
        """Read the log of a pod. Raises Invalid while its container has not started."""
        return self._run(self._whole(self._log(pod, request.query)))

    def follow_logs(
        self, owner: Name, choose: Choose, selection: LogSelection, say: Callable[[str], None]
    ) -> Iterator[tuple[str, list[str], bool]]:
        """Yield (pod, lines, whether there are several pods) of an object's pods as they come.

        Args:
            choose: from all pods and the object (None: it is gone), the pods to read, and whether no others will come.
            selection: which lines; the caller chooses those of a rank.
            say: called when the cluster does not answer, and when it does again.
        """

        async def find() -> tuple[list[Object], Object | None]:
            pods = list((await self._cluster.list("Pod", namespace=owner.namespace)).items)
            try:
                return pods, await self._cluster.get(owner.kind, owner.namespace, owner.name)
            except NotFound:
                return pods, None

        source: LogSource = ClusterLogs(find, self._followed_log, choose, self.explain)
        if selection.counts_here:
            source = RankTail(source, self._timed_log, selection)
        logs = FollowedLogs(source, LogRequest(selection.tail, selection.since_s), say)
        lines = logs.lines()
        try:
            while True:
                pod, found = self._run(_next(lines))
                yield pod, [line.text for line in found], logs.several
        except StopAsyncIteration:
            return
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
        return (await self._whole(parts)).decode(errors="replace")

    async def _whole(self, parts: AsyncIterator[bytes]) -> bytes:
        return b"".join([part async for part in parts])

    def _followed_log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        return self._log(pod, {**request.query, "follow": "true", "timestamps": "true"}, silence_s=SILENCE_S)

    async def _timed_log(self, pod: Object, request: LogRequest) -> bytes:
        return await self._whole(self._log(pod, {**request.query, "timestamps": "true"}))

    def _log(self, pod: Object, query: Mapping[str, str], *, silence_s: float | None = None) -> AsyncIterator[bytes]:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{quote(metadata['namespace'])}/pods/{quote(metadata['name'])}/log"
        return self._cluster.connection.parts(path, resource="pods", query=query, silence_s=silence_s, accept="*/*")

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)


async def _next(lines: AsyncIterator[T]) -> T:
    return await anext(lines)


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


def _content(found: Object) -> Object:
    """What a user wrote of an object: a dry run changes neither its version nor what the server keeps."""
    kept = {name: found["metadata"].get(name) for name in ("labels", "annotations", "finalizers")}
    return {**{name: value for name, value in found.items() if name not in ("metadata", "status")}, "metadata": kept}


def _ref(found: Object) -> Ref:
    metadata = found["metadata"]
    return Ref(found["kind"], metadata.get("namespace", ""), metadata["name"], metadata["uid"])
