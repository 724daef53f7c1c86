"""The Kubernetes API of the embedded cluster, as far as the gateway uses it, on the supervisor's Unix socket.

Lists in pages, watches, create, merge patch, `/scale`, delete with preconditions, logs of pods, HTTP to pods and
Services, one Node. Paths, answers and `Status` errors are those of an API server: one client serves both clusters.

Made by the supervisor. It decides nothing: the object store does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from stoker.operator.cluster.interface import ClusterError, Gone, Invalid, NotFound
from stoker.operator.cluster.kinds import KINDS, Kind
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import RESOURCE, Gpus
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.machine import machine_capacity
from stoker.operator.cluster.local.object_body import key_of, matches, with_namespace
from stoker.operator.cluster.local.pod_status import NODE
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.service.local.kube_proxy import KubeProxy
from stoker.operator.service.local.kube_status import failure
from stoker.operator.service.local.page_token import place_of, token_of
from stoker.operator.service.local.pod_log import follow, read_tail

Endpoint = Callable[[Request], Awaitable[Response]]
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
METADATA = "as=PartialObjectMetadata"
MAX_PAGE = 500


def kube_routes(cluster: LocalCluster, folders: StateFolders, gpus: Gpus) -> list[BaseRoute]:
    """Build the routes below `/api` and `/apis`."""
    api, proxy = _KubeApi(cluster, folders, gpus), KubeProxy(cluster)
    pod_log = "/api/v1/namespaces/{namespace}/pods/{name}/log"
    relayed = "/api/v1/namespaces/{namespace}/%s/{name}/proxy/{path:path}"
    routes: list[BaseRoute] = [
        Route(relayed % "services", _answering(proxy.service), methods=["GET", "POST"]),
        Route(relayed % "pods", _answering(proxy.pod), methods=["GET", "POST"]),
        Route(pod_log, _answering(api.log)),
        Route("/api/v1/nodes", _answering(api.nodes)),
        Route("/api/v1/nodes/{name}", _answering(api.node)),
    ]
    for root in ("/api/{version}", "/apis/{group}/{version}"):
        inside = root + "/namespaces/{namespace}/{plural}"
        routes += [
            Route(inside + "/{name}/scale", _answering(api.scale), methods=["GET", "PUT", "PATCH"]),
            Route(inside + "/{name}", _answering(api.get), methods=["GET"]),
            Route(inside + "/{name}", _answering(api.patch), methods=["PATCH"]),
            Route(inside + "/{name}", _answering(api.delete), methods=["DELETE"]),
            Route(inside, _answering(api.create), methods=["POST"]),
            Route(inside, _answering(api.collection), methods=["GET"]),
            Route(root + "/{plural}", _answering(api.collection), methods=["GET"]),
        ]
    return routes


class _KubeApi:
    def __init__(self, cluster: LocalCluster, folders: StateFolders, gpus: Gpus) -> None:
        self.cluster = cluster
        self.objects = cluster.objects
        self.folders = folders
        self.gpus = gpus

    async def collection(self, request: Request) -> Response:
        kind = _kind(request)
        if request.query_params.get("watch") in ("1", "true"):
            return self._watch(kind, request)
        return JSONResponse(self._page(kind, request))

    def _page(self, kind: Kind, request: Request) -> Object:
        """A page begins behind the object that `continue` names: an object that is made meanwhile may show up."""
        query, namespace = request.query_params, request.path_params.get("namespace")
        listed = f"{namespace or '*'}/{kind.plural}"
        behind = place_of(listed, query.get("continue", ""))
        limit = min(_number(query.get("limit")) or MAX_PAGE, MAX_PAGE)
        found = self.objects.of_kind(kind.name, namespace, _labels(query))
        chosen = [item for item in found if _place(item) > behind and _named(item, query)]
        page = chosen[:limit]
        metadata = {"resourceVersion": str(self.objects.version)}
        if len(chosen) > limit:
            metadata["continue"] = token_of(listed, _place(page[-1]))
        shown = [_shown(item, request) for item in page]
        return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": shown}

    def _watch(self, kind: Kind, request: Request) -> Response:
        version = str(_number(request.query_params.get("resourceVersion")) or self.objects.version)
        self.objects.since(int(version))  # raises Gone before the answer begins
        return StreamingResponse(self._changes(kind, version, request), media_type="application/json")

    async def _changes(self, kind: Kind, version: str, request: Request) -> AsyncIterator[bytes]:
        """Yield one JSON document per line, until `timeoutSeconds` have passed."""
        query = request.query_params
        changes = self.cluster.watch(kind.name, version, namespace=request.path_params.get("namespace"))
        seconds = _number(query.get("timeoutSeconds")) or None
        try:
            async with asyncio.timeout(seconds):
                async for change in changes:
                    found = change.object
                    if change.type == "BOOKMARK" or (matches(found, _labels(query)) and _named(found, query)):
                        yield _line({"type": change.type, "object": change.object})
        except TimeoutError:
            return
        except Gone as error:
            yield _line({"type": "ERROR", "object": failure(error)})

    async def get(self, request: Request) -> Response:
        return JSONResponse(self.objects.get(_key(request)))

    async def create(self, request: Request) -> Response:
        body = await _body(request)
        kind = _kind(request)
        namespace = request.path_params["namespace"]
        placed = {**body, "metadata": {"namespace": namespace, **_section(body, "metadata")}}
        if (placed.get("kind"), placed["metadata"]["namespace"]) != (kind.name, namespace):
            raise Invalid(f"the object does not fit the path: a {kind.name} of namespace {namespace} is needed")
        objects = self.objects.twin(key_of(with_namespace(placed))) if _is_dry_run(request) else self.objects
        return JSONResponse(objects.create(placed), status_code=201)

    async def patch(self, request: Request) -> Response:
        """Patch by JSON merge, or apply."""
        form = request.headers.get("content-type", "").partition(";")[0]
        if form not in (MERGE_PATCH, APPLY_PATCH):
            raise Invalid(f"Content-Type: only {MERGE_PATCH} and {APPLY_PATCH} (as JSON) are served here")
        body = await _body(request)
        key = _key(request)
        objects = self.objects.twin(key) if _is_dry_run(request) else self.objects
        if form == APPLY_PATCH:
            placed = {
                **body,
                "metadata": {**_section(body, "metadata"), "namespace": key.namespace, "name": key.name},
            }
            return JSONResponse(objects.apply(placed, request.query_params.get("fieldManager", "unknown")))
        uid = _section(body, "metadata").get("uid") or objects.get(key)["metadata"]["uid"]
        return JSONResponse(objects.patch(Ref(*key, uid), body))

    async def scale(self, request: Request) -> Response:
        """Read or write the `/scale` of an EnginePool."""
        key = _key(request)
        if not KINDS[key.kind].scale:
            raise NotFound(f"{key.kind} has no /scale")
        found = self.objects.get(key)
        if request.method != "GET":
            body = await _body(request)
            replicas = _section(body, "spec").get("replicas")
            if type(replicas) is not int:
                raise Invalid(f"spec.replicas: a whole number is needed, got {json.dumps(replicas)}")
            uid = _section(body, "metadata").get("uid") or found["metadata"]["uid"]
            objects = self.objects.twin(key) if _is_dry_run(request) else self.objects
            found = objects.scale(Ref(*key, uid), replicas)
        return JSONResponse(_scale(found))

    async def delete(self, request: Request) -> Response:
        key = _key(request)
        found = self.objects.get(key)
        if _is_dry_run(request):
            return JSONResponse(found)
        options = await _body(request) if await request.body() else {}
        wanted = _section(options, "preconditions")
        version = wanted.get("resourceVersion")
        ref = Ref(*key, wanted.get("uid") or found["metadata"]["uid"])
        if version is not None:
            self.objects.patch(ref, {"metadata": {"resourceVersion": version}})  # changes nothing; raises Conflict
        left = self.objects.delete(ref)
        return JSONResponse(left if left is not None else {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    async def log(self, request: Request) -> Response:
        """Answer with a pod's log; `follow` ends with the pod. Lines carry no time here."""
        given, query = request.path_params, request.query_params
        key = Key("Pod", given["namespace"], given["name"])
        file = self.folders.log(key.namespace, key.name)
        hidden = key.namespace.startswith(".") or key.name.startswith(".")
        if hidden or (self.objects.find(key) is None and not file.exists()):
            raise NotFound(f"pod {key.namespace}/{key.name} does not exist")
        tail = _number(query.get("tailLines")) if "tailLines" in query else None
        if query.get("follow") in ("1", "true"):
            return StreamingResponse(follow(file, tail, lambda: self._ended(key)), media_type="text/plain")
        return Response(await asyncio.to_thread(read_tail, file, tail), media_type="text/plain")

    def _ended(self, key: Key) -> bool:
        pod = self.objects.find(key)
        return pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    async def nodes(self, _: Request) -> Response:
        metadata = {"resourceVersion": str(self.objects.version)}
        return JSONResponse({"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": [self._node()]})

    async def node(self, request: Request) -> Response:
        if request.path_params["name"] != NODE:
            raise NotFound(f"Node {request.path_params['name']} does not exist")
        return JSONResponse(self._node())

    def _node(self) -> Object:
        """This machine as a Node."""
        capacity = {**machine_capacity(), RESOURCE: str(len(self.gpus.devices))}
        ready = {"type": "Ready", "status": "True", "reason": "SupervisorRuns"}
        return {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {"name": NODE, "labels": {}},
            "spec": {},
            "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
        }


def _answering(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint: errors become a `Status` with its code."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClusterError, ValueError) as error:
            status = failure(error)
            return JSONResponse(status, status_code=status["code"])

    return answer


def _scale(found: Object) -> Object:
    """The Scale of an object, as HPAs and KEDA read it."""
    metadata, status = found["metadata"], found.get("status") or {}
    named = {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion") if name in metadata}
    counted = {"replicas": status.get("replicas", 0), "selector": status.get("selector", "")}
    spec = {"replicas": found["spec"].get("replicas", 0)}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": named, "spec": spec, "status": counted}


def _is_dry_run(request: Request) -> bool:
    """Whether nothing may be stored. Raises ValueError."""
    wanted = request.query_params.get("dryRun")
    if wanted not in (None, "", "All"):
        raise ValueError(f"dryRun: only All is served, got {wanted!r}")
    return wanted == "All"


def _kind(request: Request) -> Kind:
    given = request.path_params
    api_version = "/".join(part for part in (given.get("group"), given["version"]) if part)
    for kind in KINDS.values():
        if kind.plural == given["plural"] and kind.api_version == api_version and kind.namespaced:
            return kind
    raise NotFound(f"no resource {given['plural']!r} in {api_version}")


def _key(request: Request) -> Key:
    return Key(_kind(request).name, request.path_params["namespace"], request.path_params["name"])


async def _body(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.body())
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("the body is not a JSON object")
    return found


def _section(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a body, empty where it is absent. Raises Invalid where it is no object."""
    found = body.get(name)
    if not isinstance(found, dict | None):
        raise Invalid(f"{name}: an object is needed, got {json.dumps(found)}")
    return found or {}


def _labels(query: Mapping[str, str]) -> dict[str, str]:
    """Parse `labelSelector`; only equality is served. Raises ValueError."""
    found = {}
    for part in filter(None, query.get("labelSelector", "").split(",")):
        name, sign, value = part.partition("=")
        if not sign or name.endswith("!"):
            raise ValueError(f"labelSelector: NAME=VALUE is needed, got {part!r}")
        found[name] = value.removeprefix("=")
    return found


def _named(item: Object, query: Mapping[str, str]) -> bool:
    """Whether the object fits `fieldSelector`; only `metadata.name` is served. Raises ValueError."""
    selector = query.get("fieldSelector", "")
    name, _, value = selector.partition("=")
    if selector and name != "metadata.name":
        raise ValueError(f"fieldSelector: metadata.name=NAME is needed, got {selector!r}")
    return not selector or bool(item["metadata"]["name"] == value)


def _place(item: Object) -> str:
    """The place of an object in a list; `/` sorts before every character of a name."""
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _shown(item: Object, request: Request) -> Object:
    if METADATA not in request.headers.get("accept", ""):
        return item
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}


def _number(text: str | None) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"a whole number is needed, got {text!r}")
    return int(text)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
