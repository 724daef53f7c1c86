"""The routes that every program serves: probes, status and metrics for all, control routes for holders of a key.

Each program passes its own answers as callables; this module imports no program.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stoker.pod.asgi import BodyTooLarge, ClientLeft, read_body
from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent
from stoker.pod.control_key import ControlDenied, ControlVerifier

Status = Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
Question = Callable[[], bool]
ControlHandler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]

MAX_BODY_BYTES = 4 * 2**20
"""Longest body of a control call; a snapshot of thousands of backends fits."""
MAX_BODY_BYTES_IN_FLIGHT = 4 * MAX_BODY_BYTES
"""All bodies of control calls at one time: the token, which covers the body, can be checked only behind it."""


@dataclass(frozen=True)
class ControlRoute:
    """A guarded route: `handler` takes the JSON body and returns the JSON answer (status 202).

    A handler raises ValueError for a body that it cannot use (answered with 400 and the message).
    """

    method: str
    path: str
    handler: ControlHandler


def probe_routes(
    *, alive: Question, ready: Question, status: Status, registry: CollectorRegistry | Callable[[], Awaitable[bytes]],
    private: frozenset[str] = frozenset(), verifier: ControlVerifier | None = None,
) -> list[BaseRoute]:  # fmt: skip
    """Build the routes `/livez`, `/readyz` (200 or 503), `/status` (JSON) and `/metrics` (Prometheus text).

    A process that shares its port with others gives functions that ask for the pages of all.

    Fields of the status named in `private` are shown only to a caller with a control token that `verifier` accepts.
    """

    def answer(question: Question) -> Response:
        good = question()
        return Response("ok\n" if good else "no\n", status_code=200 if good else 503, media_type="text/plain")

    async def livez(_: Request) -> Response:
        return answer(alive)

    async def readyz(_: Request) -> Response:
        return answer(ready)

    async def status_page(request: Request) -> Response:
        answered = status()
        page = dict(answered if isinstance(answered, Mapping) else await answered)
        try:
            trusted = not private or _may_read_all(request, verifier)
        except ControlDenied as denied:
            return JSONResponse({"error": str(denied)}, status_code=401)
        return JSONResponse(page if trusted else {key: page[key] for key in page if key not in private})

    async def metrics(_: Request) -> Response:
        page = generate_latest(registry) if isinstance(registry, CollectorRegistry) else await registry()
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/status", status_page), Route("/metrics", metrics)]


def _may_read_all(request: Request, verifier: ControlVerifier | None) -> bool:
    """Return whether the caller may see the private fields. A wrong token is refused, not treated as no token.

    Raises:
        ControlDenied: the token is not valid for this call.
    """
    if verifier is None or "authorization" not in request.headers:
        return False
    verifier.verify(_bearer(request), request.method, request.url.path, b"")
    return True


def control_routes(routes: Sequence[ControlRoute], verifier: ControlVerifier | None) -> list[BaseRoute]:
    """Build the guarded routes. `verifier=None` is for the Unix socket only, which its file mode guards."""
    budget = BodyBudget(MAX_BODY_BYTES_IN_FLIGHT)
    return [Route(route.path, _guarded(route, verifier, budget), methods=[route.method]) for route in routes]


def _guarded(
    route: ControlRoute, verifier: ControlVerifier | None, budget: BodyBudget
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        with budget.share() as share:
            try:
                body = await read_body(request.receive, MAX_BODY_BYTES, share)
            except BodyTooLarge:
                return JSONResponse({"error": f"a body of at most {MAX_BODY_BYTES} bytes is allowed"}, status_code=413)
            except BodyBudgetSpent as spent:
                return JSONResponse({"error": str(spent)}, status_code=503, headers={"Retry-After": "1"})
            except ClientLeft:
                return Response(status_code=400)  # which nothing receives
            return await answer(request, body)

    async def answer(request: Request, body: bytes) -> Response:
        if verifier is not None:
            try:
                verifier.verify(_bearer(request), request.method, request.url.path, body)
            except ControlDenied as denied:
                return JSONResponse({"error": str(denied)}, status_code=401)
        try:
            message = json.loads(body or b"{}")
            if not isinstance(message, dict):
                raise ValueError("the body must be a JSON object")
            return JSONResponse(dict(await route.handler(message)), status_code=202)
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    return endpoint


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise ControlDenied("a bearer token is needed")
    return token
