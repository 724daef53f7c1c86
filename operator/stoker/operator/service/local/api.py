"""The supervisor's HTTP API, for the command line of the same user only (Unix socket, mode 0600).

Objects are applied as with `kubectl`; errors carry the message that an API server would give.

Made by the supervisor; called by `stoker local`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from stoker.operator.cluster.interface import AlreadyExists, ClusterError, Conflict, Invalid, NotFound
from stoker.operator.cluster.kinds import KINDS, find_kind
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.object_storage import StateFolderError
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.loop.store import key_of

log = logging.getLogger(__name__)

MANAGER = "stoker-cli"
MAX_LOG_BYTES = 1 << 20
STATUS_CODES: Mapping[type[Exception], int] = {
    NotFound: 404,
    AlreadyExists: 409,
    Conflict: 409,
    Invalid: 422,
    StateFolderError: 507,
    ValueError: 400,
}

Endpoint = Callable[[Request], Awaitable[JSONResponse]]


class SupervisorControl(Protocol):
    """The supervisor as the API uses it."""

    def stop(self, grace_s: float | None = None) -> None: ...

    def detach(self) -> None: ...

    def facts(self) -> Mapping[str, object]: ...

    def problems(self) -> list[str]: ...

    @property
    def writable(self) -> bool: ...


def make_app(
    objects: ObjectStore,
    addresses: Addresses,
    folders: StateFolders,
    control: SupervisorControl,
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """Build the app with all routes; `more` are those of the Kubernetes API."""
    api = _Api(objects, addresses, folders, control)
    routes: list[tuple[str, str, Endpoint]] = [
        ("GET", "/livez", api.alive),
        ("GET", "/readyz", api.ready),
        ("GET", "/v1/status", api.status),
        ("POST", "/v1/apply", api.apply),
        ("GET", "/v1/objects/{kind}", api.objects_of),
        ("DELETE", "/v1/objects/{kind}/{namespace}/{name}", api.delete),
        ("GET", "/v1/logs/{namespace}/{pod}", api.logs),
        ("POST", "/v1/detach", api.detach),
        ("POST", "/v1/down", api.down),
    ]
    own = [Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in routes]
    return Starlette(routes=[*own, *more])


class _Api:
    def __init__(
        self, objects: ObjectStore, addresses: Addresses, folders: StateFolders, control: SupervisorControl
    ) -> None:
        self.objects = objects
        self.addresses = addresses
        self.folders = folders
        self.control = control

    async def alive(self, _: Request) -> JSONResponse:
        return JSONResponse({"alive": True})

    async def ready(self, _: Request) -> JSONResponse:
        """Answer 503 while the state folder cannot be written."""
        ready = self.control.writable
        return JSONResponse({"ready": ready, "problems": self.control.problems()}, status_code=200 if ready else 503)

    async def status(self, _: Request) -> JSONResponse:
        """Answer with the supervisor's facts and the address of every Service."""
        return JSONResponse({**self.control.facts(), "endpoints": self._endpoints()})

    async def apply(self, request: Request) -> JSONResponse:
        """Apply each object on its own: one that is refused does not hold the others back."""
        body = await request.json()
        recreate = bool(body.get("recreate_lost"))
        return JSONResponse({"results": [self._apply(found, recreate=recreate) for found in body["objects"]]})

    async def objects_of(self, request: Request) -> JSONResponse:
        kind = find_kind(request.path_params["kind"])
        name = request.query_params.get("name")
        items = self.objects.of_kind(kind.name, request.query_params.get("namespace"))
        chosen = [item for item in items if name in (None, item["metadata"]["name"])]
        if name and not chosen:
            lost = [key for key in self.objects.lost if (key.kind, key.name) == (kind.name, name)]
            raise NotFound(self.objects.lost_message(lost[0]) if lost else f"{kind.name} {name} does not exist")
        return JSONResponse({"items": chosen, "problems": self.control.problems()})

    async def delete(self, request: Request) -> JSONResponse:
        given = request.path_params
        key = Key(find_kind(given["kind"]).name, given["namespace"], given["name"])
        if self.objects.find(key) is None and key in self.objects.lost:
            self.objects.give_up(key)
            return JSONResponse({"gone": True})
        left = self.objects.delete(Ref(*key, self.objects.get(key)["metadata"]["uid"]))
        return JSONResponse({"gone": left is None})

    async def logs(self, request: Request) -> JSONResponse:
        """Answer with a part of a pod's log from a byte offset; `ended` when the log is complete."""
        key = Key("Pod", request.path_params["namespace"], request.path_params["pod"])
        file = self.folders.log(key.namespace, key.name)
        pod = self.objects.find(key)
        if pod is None and not file.exists():
            raise NotFound(f"pod {key.namespace}/{key.name} does not exist")
        ended = pod is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        offset = int(request.query_params.get("offset", 0))
        content = await asyncio.to_thread(_read, file, offset)
        return JSONResponse(
            {"text": content.decode(errors="replace"), "offset": offset + len(content), "ended": ended and not content}
        )

    async def detach(self, _: Request) -> JSONResponse:
        self.control.detach()
        return JSONResponse({}, status_code=202)

    async def down(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.control.stop(body.get("grace_s"))
        return JSONResponse({}, status_code=202)

    def _apply(self, body: Object, *, recreate: bool) -> dict[str, object]:
        metadata = body.get("metadata") if isinstance(body, dict) else None
        names = (
            {name: (metadata or {}).get(name) for name in ("name", "namespace")} if isinstance(metadata, dict) else {}
        )
        about: dict[str, object] = {"kind": body.get("kind") if isinstance(body, dict) else None, **names}
        try:
            if not recreate:
                self._check_not_lost(body)
            before, known = self.objects.version, self._uid_of(body)
            applied = self.objects.apply(body, MANAGER)
        except StateFolderError as error:
            return {**about, "result": "failed", "error": f"{error}; nothing of it was stored"}
        except ClusterError as error:
            return {**about, "result": "refused", "error": str(error)}
        key = key_of(applied)
        if applied["metadata"]["uid"] != known:
            return {**key._asdict(), "result": "created"}
        return {**key._asdict(), "result": "unchanged" if self.objects.version == before else "configured"}

    def _uid_of(self, body: Any) -> str | None:
        """Return the uid of the stored object that a manifest names; None where there is none."""
        key = _named(body)
        found = self.objects.find(key) if key else None
        return str(found["metadata"]["uid"]) if found else None

    def _check_not_lost(self, body: Object) -> None:
        """Refuse to recreate a lost object beside what the old one left, such as its checkpoints.

        Claims, ConfigMaps and other objects whose identity does not matter are recreated.

        Raises:
            Conflict: with the file and the ways out.
        """
        key = _named(body)
        if key is not None and key in self.objects.lost and KINDS[key.kind].ours:
            raise Conflict(self.objects.lost_message(key))

    def _endpoints(self) -> dict[str, str]:
        """Map `namespace/name:port` of each Service to the URL on this machine."""
        found = {}
        for service in self.objects.of_kind("Service"):
            key = key_of(service)
            if service["spec"].get("clusterIP") == "None":
                continue
            host = Host("service", key.namespace, key.name)
            for port in service["spec"].get("ports") or ():
                local = self.addresses.port(host, int(port["port"]))
                found[f"{key.namespace}/{key.name}:{port['port']}"] = f"http://{self.addresses.ip(host)}:{local}"
        return found


def _answering(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint: errors become `{"error": message}` with their status code."""

    async def answer(request: Request) -> JSONResponse:
        try:
            return await endpoint(request)
        except (ClusterError, ValueError) as error:
            code = next((code for kind, code in STATUS_CODES.items() if isinstance(error, kind)), 500)
            return JSONResponse({"error": str(error)}, status_code=code)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.url.path)
            message = f"the supervisor failed: {error!r} (supervisor.log has the traceback)"
            return JSONResponse({"error": message}, status_code=500)

    return answer


def _named(body: Any) -> Key | None:
    """Return the key that a manifest names; None where it has no metadata."""
    metadata = body.get("metadata") if isinstance(body, dict) else None
    if not isinstance(metadata, dict):
        return None
    return Key(str(body.get("kind")), str(metadata.get("namespace") or "default"), str(metadata.get("name")))


def _read(file: Path, offset: int) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(MAX_LOG_BYTES)
