"""Around every request: a bound on its body, a count and a time by route, an answer to what nothing else caught."""

from __future__ import annotations

import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.requests import Request

from stoker.gateway.http.errors import answer
from stoker.gateway.problem import Problem
from stoker.pod.asgi import BodyTooLarge, ClientLeft, Message, Receive, Scope, Send, read_body
from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent

log = logging.getLogger("stoker.gateway")

MAX_BODY_BYTES = 1 << 20
MAX_BODIES_BYTES = 64 << 20
WITH_BODY = ("POST", "PUT", "PATCH", "DELETE")


class RequestGuard:
    """ASGI middleware."""

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self.app = app
        self.budget = BodyBudget(MAX_BODIES_BYTES)
        self.requests = Counter(
            "stoker_gateway_requests", "Requests by route and answer", ("method", "route", "code"), registry=registry
        )
        self.seconds = Histogram(
            "stoker_gateway_request_seconds", "Time to the first byte", ("method", "route"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, code = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                self.seconds.labels(scope["method"], _route(scope)).observe(time.monotonic() - started)
            await send(message)

        try:
            await self._guarded(scope, receive, noted)
        except ClientLeft:
            return
        except Exception:
            if code:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await self._refuse(scope, receive, noted, Problem(500, "internal", "the gateway failed; its log says why"))
        finally:
            self.requests.labels(scope["method"], _route(scope), str(code)).inc()

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in WITH_BODY:
            await self.app(scope, receive, send)
            return
        with self.budget.share() as share:
            try:
                body = await read_body(receive, MAX_BODY_BYTES, share)
            except BodyTooLarge:
                problem = Problem(413, "too-long", f"a body of at most {MAX_BODY_BYTES} bytes is allowed")
                await self._refuse(scope, receive, send, problem)
                return
            except BodyBudgetSpent as spent:
                await self._refuse(scope, receive, send, Problem(503, "busy", str(spent), headers={"Retry-After": "1"}))
                return
            await self.app(scope, _replayed(body, receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, problem: Problem) -> None:
        await answer(Request(scope), problem)(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, then what the client does next."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _route(scope: Scope) -> str:
    """The path of the route, not of the request: metrics have few labels."""
    return str(getattr(scope.get("route"), "path", "") or "none")
