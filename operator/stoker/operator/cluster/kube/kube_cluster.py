"""A Kubernetes API server as a `Cluster`: pages, watches with bookmarks, server-side apply, uid preconditions.

Every write names the uid of its object. Objects are plain dicts from end to end. Pods are called at their addresses.

Made by `service/program`, called by the loop. No state beside its connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.operator.cluster.interface import (
    ClusterError,
    Conflict,
    Gone,
    Invalid,
    Keep,
    Listing,
    NotFound,
    PodUnreachable,
    WatchEvent,
)
from stoker.operator.cluster.kinds import FOREIGN, KINDS, Kind
from stoker.operator.cluster.kube.connection import JSON, ApiConnection
from stoker.operator.cluster.kube.errors import error_of
from stoker.operator.cluster.kube.ownership import owned_by_apply
from stoker.operator.cluster.kube.paths import collection, selector, single
from stoker.operator.cluster.kube.pod_addresses import PodAddresses, pod_url
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.plan import ControlCall, Object, Ref

MANAGER = "stoker-operator"
REPLICAS = ("spec", "replicas")
"""The field that is written through /scale and never applied."""
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
METADATA_LIST = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
WATCH_S = 90
"""Time after which the server ends a watch. A kind without changes may get no bookmarks; the end of its watch shows
that the server is alive."""
SILENCE_S = 120.0
"""Longest silence of a connection that is alive."""
TRIES = 5


@dataclass(frozen=True)
class View:
    """The part of the cluster that lists and watches show. Reads of one object are not limited."""

    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Kind -> labels that an object must carry."""
    metadata_only: frozenset[str] = frozenset()
    """Kinds of which the server sends only the metadata."""


class KubeCluster:
    """A cluster in which every call is one request; the exceptions are documented."""

    def __init__(
        self,
        connection: ApiConnection,
        pods: PodHttp,
        *,
        view: View | None = None,
        page_size: int = 100,
        more_kinds: Mapping[str, Kind] | None = None,
        addresses: PodAddresses | None = None,
    ) -> None:
        """`more_kinds`: kinds that only some clusters have, to list and to watch.

        `addresses`: of pods that are polled, shared with other clients of the same API server.
        """
        self.more_kinds = more_kinds or {}
        self.connection = connection
        self.pods = pods
        self.view = view or View()
        self.page_size = page_size
        self.addresses = addresses or PodAddresses()

    async def close(self) -> None:
        await self.pods.close()
        await self.connection.close()

    # Reading

    async def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        keep: Keep | None = None,
    ) -> Listing:
        """List in pages of one consistent view. Raises Gone when the view is compacted meanwhile.

        The version to watch from is the first page's: no page shows anything newer.
        """
        found = self.more_kinds.get(kind) or _kind(kind)
        query = {"limit": str(self.page_size), **self._selection(kind, labels)}
        items: list[Object] = []
        version = ""
        while True:
            path, accept = collection(found, namespace), self._accept(kind, METADATA_LIST)
            page = await self.connection.request("GET", path, resource=found.plural, query=query, accept=accept)
            listed = page.get("items") or []
            for pod in listed if found.name == "Pod" else ():
                self.addresses.note(pod)
            items.extend(_taken(listed, found, keep))
            version = version or str(page["metadata"]["resourceVersion"])
            following = page["metadata"].get("continue")
            if not following:
                return Listing(tuple(items), version)
            query["continue"] = str(following)

    async def watch(
        self, kind: str, resource_version: str, *, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Watch for some minutes; the caller continues at the last version."""
        found = self.more_kinds.get(kind) or _kind(kind)
        query = {
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            **self._selection(kind, None),
        }
        path = collection(found, namespace)
        events = self.connection.stream(
            path, resource=found.plural, query=query, silence_s=SILENCE_S, accept=self._accept(kind, METADATA)
        )
        async for event in events:
            if event.get("type") == "ERROR":
                raise _watch_error(event.get("object") or {}, f"watching {path}")
            if found.name == "Pod":
                self._note_event(event)
            yield WatchEvent(event["type"], _named(event["object"], found))

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        found = _kind(kind)
        return await self.connection.request("GET", single(found, namespace, name), resource=found.plural)

    # Writing

    async def create(self, body: Object) -> Object:
        """Create; fields that the server does not know are refused."""
        kind = _kind_of(body)
        return await self.connection.request(
            "POST",
            collection(kind, _namespace(body)),
            resource=kind.plural,
            query={"fieldManager": MANAGER, "fieldValidation": "Strict"},
            body=body,
        )

    async def apply(self, body: Object, *, manager: str, dry_run: bool = False) -> Object:
        """Apply; with `dry_run` the server checks the object and stores nothing."""
        kind = _kind_of(body)
        if kind.scale and not dry_run:
            await self._take_over(body, manager)
        return await self.connection.request(
            "PATCH",
            single(kind, _namespace(body), body["metadata"]["name"]),
            resource=kind.plural,
            query={"fieldManager": manager, "force": "true", **({"dryRun": "All"} if dry_run else {})},
            body=body,
            content_type=APPLY_PATCH,
        )

    async def _take_over(self, body: Object, manager: str) -> None:
        """Apply. An object with /scale is created by POST, which sets its replicas.

        Before the first apply the ownership of its other fields moves to the applier.
        """
        for _ in range(TRIES):
            try:
                live = await self.get(body["kind"], _namespace(body), body["metadata"]["name"])
            except NotFound:
                return
            metadata = live["metadata"]
            owned = owned_by_apply(metadata.get("managedFields") or (), manager, REPLICAS)
            if owned is None:
                return
            ref = Ref(body["kind"], metadata["namespace"], metadata["name"], metadata["uid"])
            try:
                await self.patch(
                    ref, {"metadata": {"resourceVersion": metadata["resourceVersion"], "managedFields": owned}}
                )
            except Conflict:
                continue
            return
        raise Conflict(f"{body['kind']} {_namespace(body)}/{body['metadata']['name']} changes all the time")

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        guarded = {**body, "metadata": {**(body.get("metadata") or {}), "uid": ref.uid}}
        kind = _kind(ref.kind)
        return await self.connection.request(
            "PATCH",
            single(kind, ref.namespace, ref.name),
            resource=kind.plural,
            query={"fieldManager": MANAGER},
            body=guarded,
            content_type=MERGE_PATCH,
        )

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        """Replace the status. Without a version the newest is read first, and again when it changes meanwhile."""
        if resource_version is not None:
            return await self._put_status(ref, status, resource_version)
        for _ in range(TRIES):
            newest = await self._own(ref)
            try:
                return await self._put_status(ref, status, newest["metadata"]["resourceVersion"])
            except Conflict:
                continue
        raise Conflict(f"the status of {ref.kind} {ref.namespace}/{ref.name} changes all the time")

    async def scale(self, ref: Ref, replicas: int) -> None:
        """Read `/scale` and write it back: a write alone does not check the uid."""
        kind = _kind(ref.kind)
        if not kind.scale:
            raise Invalid(f"{ref.kind} has no /scale")
        path = single(kind, ref.namespace, ref.name, "scale")
        for _ in range(TRIES):
            scale = await self.connection.request("GET", path, resource=kind.plural)
            _check_uid(scale, ref)
            wanted = {**scale, "spec": {"replicas": replicas}}
            try:
                await self.connection.request(
                    "PUT", path, resource=kind.plural, query={"fieldManager": MANAGER}, body=wanted
                )
            except Conflict:  # its status changed meanwhile, as it often does
                continue
            return
        raise Conflict(f"{ref.kind} {ref.namespace}/{ref.name} changes all the time")

    async def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        kind = _kind(ref.kind)
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": ref.uid},
            "propagationPolicy": "Background",
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        left = await self.connection.request(
            "DELETE", single(kind, ref.namespace, ref.name), resource=kind.plural, body=options
        )
        return left if _ending(left) else None

    # Pods

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        url = await self._url(call.pod)
        try:
            return await self.pods.call(url, call)
        except PodUnreachable:
            self.addresses.forget(call.pod.uid)
            raise

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        url = await self._url(pod)
        try:
            return await self.pods.poll(url, pod.uid)
        except PodUnreachable:
            self.addresses.forget(pod.uid)
            raise

    async def _url(self, ref: Ref) -> str:
        """The pod's URL; read where no list or watch has shown it, and again when it does not answer there."""
        known = self.addresses.get(ref.uid)
        if known is not None:
            return known
        try:
            url = pod_url(await self._own(ref))
        except (NotFound, Conflict) as error:
            raise PodUnreachable(f"pod {ref.namespace}/{ref.name} is gone") from error
        self.addresses.put(ref.uid, url)
        return url

    # Inside

    async def _own(self, ref: Ref) -> Object:
        """Read the object with the uid of `ref`. Raises NotFound, Conflict."""
        found = await self.get(ref.kind, ref.namespace, ref.name)
        _check_uid(found, ref)
        return found

    async def _put_status(self, ref: Ref, status: Object, resource_version: str) -> Object:
        kind = _kind(ref.kind)
        metadata = {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid, "resourceVersion": resource_version}
        body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "status": status}
        return await self.connection.request(
            "PUT",
            single(kind, ref.namespace, ref.name, "status"),
            resource=kind.plural,
            query={"fieldManager": MANAGER},
            body=body,
        )

    def _note_event(self, event: Mapping[str, Any]) -> None:
        """Take the address of a pod that came or changed; a bookmark carries no pod."""
        if event["type"] in ("ADDED", "MODIFIED"):
            self.addresses.note(event["object"])
        if event["type"] == "DELETED":
            self.addresses.forget(event["object"]["metadata"]["uid"])

    def _selection(self, kind: str, labels: Mapping[str, str] | None) -> dict[str, str]:
        wanted = {**self.view.labels.get(kind, {}), **(labels or {})}
        return {"labelSelector": selector(wanted)} if wanted else {}

    def _accept(self, kind: str, metadata: str) -> str:
        return metadata if kind in self.view.metadata_only else JSON


def _kind(name: str) -> Kind:
    kind = KINDS.get(name)
    if kind is None:
        raise NotFound(f"no kind {name!r}")
    return kind


def _kind_of(body: Object) -> Kind:
    foreign = FOREIGN.get(body["kind"])
    return replace(foreign, api_version=body["apiVersion"]) if foreign else _kind(body["kind"])


def _check_uid(found: Object, ref: Ref) -> None:
    if found["metadata"]["uid"] != ref.uid:
        raise Conflict(f"{ref.kind} {ref.namespace}/{ref.name} is another object: uid {found['metadata']['uid']}")


def _namespace(body: Object) -> str:
    return str(body["metadata"].get("namespace") or "default")


def _named(item: Object, kind: Kind) -> Object:
    """Add apiVersion and kind, which items of lists and metadata-only objects lack."""
    item["apiVersion"] = kind.api_version
    item["kind"] = kind.name
    return item


def _taken(items: list[Object], kind: Kind, keep: Keep | None) -> list[Object]:
    named = (_named(item, kind) for item in items)
    return [keep(item) for item in named] if keep else list(named)


def _watch_error(status: Mapping[str, Any], where: str) -> ClusterError:
    """An ERROR event carries a Status; a version that is too old comes as 410 with either of two reasons."""
    code = int(status.get("code") or 500)
    if code == 410 or status.get("reason") in ("Gone", "Expired"):
        return Gone(f"{where}: {status.get('message')}")
    return error_of(max(code, 400), status, {}, where)


def _ending(left: Object) -> bool:
    """Whether the object that a delete returned still exists: some servers return what they have just removed."""
    if left.get("kind") == "Status":
        return False
    metadata = left["metadata"]
    waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return bool(metadata.get("deletionTimestamp") and waits)
