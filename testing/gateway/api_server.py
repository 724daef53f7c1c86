"""A double of a Kubernetes API server: the embedded cluster's API behind tokens, impersonation and rights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

OWN_TOKEN = "token-of-the-gateway"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
PLACE = re.compile(
    r"^/api(?:s/[^/]+)?/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?"
)
GROUP = re.compile(r"/apis/[^/]+")
VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class User:
    """A user of the cluster."""

    name: str
    groups: tuple[str, ...] = ("system:authenticated",)
    extra: Mapping[str, list[str]] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()
    """Namespaces in which everything is allowed; `*`: all, and the cluster itself."""
    verbs: tuple[str, ...] = ("get", "list", "watch", "create", "patch", "delete")


class ApiServer:
    """ASGI application. Every request but a review of a token must impersonate one of the users."""

    def __init__(self, app: Callable[..., Any], users: Mapping[str, User]) -> None:
        self.app = app
        self.users = users
        """Token -> user."""
        self.reviews = 0
        self.requests: list[tuple[str, str, str]] = []
        """(user, verb, plural) of every request that was let through."""
        self.failing: JSONResponse | None = None
        self.withheld: set[str] = set()
        """Plurals that no caller may read."""
        self.unstarted: set[str] = set()
        """Pods whose container waits: their logs are refused."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if request.headers.get("authorization") != f"Bearer {OWN_TOKEN}":
            await _refused(401, "Unauthorized", "Unauthorized")(scope, receive, send)
        elif self.failing is not None:
            await self.failing(scope, receive, send)
        elif request.url.path == REVIEWS:
            await (await self._review(request))(scope, receive, send)
        else:
            await (self._refusal(request) or self.app)(scope, receive, send)

    async def _review(self, request: Request) -> JSONResponse:
        self.reviews += 1
        user = self.users.get(json.loads(await request.body())["spec"]["token"])
        if user is None:
            return JSONResponse({"status": {"authenticated": False}}, 201)
        facts = {"username": user.name, "groups": list(user.groups), "extra": dict(user.extra)}
        return JSONResponse({"status": {"authenticated": True, "user": facts}}, 201)

    def _refusal(self, request: Request) -> JSONResponse | None:
        """Check the rights of the impersonated user."""
        name = _utf_8(request.headers.get("impersonate-user") or "")
        groups = tuple(map(_utf_8, request.headers.getlist("impersonate-group")))
        user = next((one for one in self.users.values() if one.name == name and one.groups == groups), None)
        if user is not None and GROUP.fullmatch(request.url.path):
            return None  # every user may discover
        found = PLACE.match(request.url.path)
        assert found is not None, request.url.path
        namespace, plural, verb = found["namespace"], found["plural"], _verb(request, found["name"])
        allowed = user is not None and verb in user.verbs and bool({"*", namespace} & set(user.namespaces))
        if not allowed or plural in self.withheld:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            message = f'{plural} is forbidden: User "{name}" cannot {verb} resource "{plural}" {where}'
            return _refused(403, "Forbidden", message)
        self.requests.append((name, verb, plural))
        if request.url.path.endswith("/log") and found["name"] in self.unstarted:
            message = f'container "main" in pod "{found["name"]}" is waiting to start: ContainerCreating'
            return _refused(400, "BadRequest", message)
        return None


def _utf_8(value: str) -> str:
    """The text of a header as an API server reads it: the bytes as they are."""
    return value.encode("latin-1").decode()


def _verb(request: Request, name: str | None) -> str:
    if request.method == "GET" and not name:
        return "watch" if "watch" in request.query_params else "list"
    return VERBS[request.method]


def _refused(code: int, reason: str, message: str) -> JSONResponse:
    status = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return JSONResponse(status, code)
