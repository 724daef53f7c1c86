"""The router as one object: backends, proxy, and the router's own routes. Starts and stops inside an event loop.

Made by `__main__`. The set of backends changes by `PUT /backends` alone, which the operator sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from stoker.pod.api_document import document_route
from stoker.pod.asgi import Message, Receive, Scope, Send
from stoker.pod.control_key import ControlVerifier
from stoker.pod.http import ControlRoute, control_routes, probe_routes
from stoker.pod.tracing import NoTracer, Tracer
from stoker.router.admission import Admission
from stoker.router.api_document import DOCUMENT_PATH, router_document
from stoker.router.backend import Backend, Timeouts
from stoker.router.backends import Backends
from stoker.router.class_metrics import ClassMetrics
from stoker.router.config import RouterConfig
from stoker.router.limits import ProxyLimits
from stoker.router.metrics import RouterMetrics
from stoker.router.node import NOWHERE, Node
from stoker.router.policy import Policy, policy_named
from stoker.router.proxy import Proxy
from stoker.router.refusal import Refused
from stoker.router.snapshot import BackendSnapshot, parse_snapshot

FORWARDED = ("/tokenize", "/detokenize", "/version", "/openapi.json", "/docs")
"""Paths of an engine that clients may use beside `/v1/`. Its control routes and metrics are not among them."""
ADDRESSES = frozenset(("backends",))
"""Fields of `/status` that name the engines' addresses and pods: for the operator's token and the Unix socket."""


class Router:
    """Build it inside a running event loop, `start` it with a snapshot, serve `app`.

    `policy`: another one than the configuration names.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        pod_uid: str,
        verifier: ControlVerifier | None = None,
        home: Node = NOWHERE,
        policy: Policy[Backend] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NoTracer(),  # noqa: B008 - it has no state
    ) -> None:
        self.config = config
        self.pod_uid = pod_uid
        self.stopping = False
        times = Timeouts(
            connect_s=config.connect_timeout_s,
            silence_s=config.request_timeout_s,
            probe_s=max(config.connect_timeout_s, 2 * config.probe_interval_s),
        )
        self.backends = Backends(
            policy=policy or policy_named(config.policy, home),
            times=times,
            probe_interval_s=config.probe_interval_s,
            clock=clock,
            predicts=bool(config.classes),
        )
        registry = CollectorRegistry()
        self.metrics = RouterMetrics(registry, self.backends)
        limits = ProxyLimits(
            config.max_attempts, config.hold_s, config.max_held_requests, config.max_body_bytes,
            config.listen.limits.max_body_bytes_in_flight, config.max_resume_bytes, config.resume_wait_s,
            config.listen.limits.comment_interval_s,
        )  # fmt: skip
        self.admission = self._admission(config, registry, clock)
        self.proxy = Proxy(
            self.backends, limits, self.metrics, deployment=config.deployment, admission=self.admission, clock=clock,
            tracer=tracer,
        )  # fmt: skip
        probes = partial(probe_routes, alive=lambda: True, ready=self._ready, status=self.status, registry=registry)
        health = Route("/health", self._health)
        control = ControlRoute("PUT", "/backends", self._put_backends)
        guarded = control_routes([control], verifier) if verifier is not None else []
        shared = [health, document_route(router_document(), DOCUMENT_PATH)]
        self.app = _App([*probes(private=ADDRESSES, verifier=verifier), *shared, *guarded], self.proxy, self._stopping)
        self.control_app = _App([*probes(), *shared, *control_routes([control], None)], self.proxy, self._stopping)
        """The application of the Unix socket, which its file mode guards."""

    def _admission(
        self, config: RouterConfig, registry: CollectorRegistry, clock: Callable[[], float]
    ) -> Admission | None:
        """Build the admission by class; None without classes."""
        if not config.classes:
            return None
        metrics = ClassMetrics(registry)
        admission = Admission(config.classes, self.backends, metrics, clock)
        metrics.queued = admission.queued
        return admission

    def start(self, snapshot: BackendSnapshot) -> None:
        """Begin to probe the backends of the mounted snapshot."""
        self._apply(snapshot)

    async def drain(self, quiet_s: float, deadline_s: float, *, least_s: float = 0.0) -> None:
        """Turn unready, and serve for `least_s` and until no request has run for `quiet_s`, at most for `deadline_s`.

        Answers close their connections, so that clients open the next ones elsewhere.
        """
        self.stopping = True
        begun = quiet_since = time.monotonic()
        while (now := time.monotonic()) - begun < deadline_s and (now - begun < least_s or now - quiet_since < quiet_s):
            await asyncio.sleep(0.02)
            if self.proxy.running:
                quiet_since = time.monotonic()

    async def stop(self) -> None:
        await self.backends.stop()

    def status(self) -> Mapping[str, Any]:
        """Return the content of `/status`."""
        return {
            "program": "router",
            "pod_uid": self.pod_uid,
            "phase": "Draining" if self.stopping else "Serving",
            "snapshot_version": self.backends.version,
            "ready_backends": len(self.backends.ready),
            "running": self.proxy.running,
            "held": self.metrics.held,
            "queued": self.admission.queued() if self.admission is not None else {},
            "goals": self.admission.goal_counts.as_wire() if self.admission is not None else {},
            "models": self.backends.others.status() if self.backends.others is not None else [],
            "window": self.metrics.revisions.status(),
            "backends": self.backends.status(),
        }

    def _stopping(self) -> bool:
        return self.stopping

    def _ready(self) -> bool:
        """Return whether clients may connect. A router without backends is ready: it holds or refuses requests."""
        return self.backends.version >= 0 and not self.stopping

    async def _health(self, _: Request) -> Response:
        """Answer `/health`: 200 if a request can be answered now."""
        ready, num_ready = self._ready() and bool(self.backends.ready), len(self.backends.ready)
        whole = num_ready == sum(not backend["draining"] for backend in self.backends.status())
        status = "unhealthy" if not ready else "healthy" if whole else "degraded"
        return JSONResponse({"status": status, "ready_backends": num_ready}, status_code=200 if ready else 503)

    async def _put_backends(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        accepted = self._apply(parse_snapshot(body))
        return {"accepted": accepted, "version": self.backends.version}

    def _apply(self, snapshot: BackendSnapshot) -> bool:
        """Use a newer snapshot, and begin the window that it names."""
        accepted = self.backends.apply(snapshot)
        if accepted:
            self.metrics.revisions.begin(snapshot.window)
        return accepted


class _App:
    """The router's own routes, and the proxy for the paths of an engine."""

    def __init__(self, own: list[BaseRoute], proxy: Proxy, stopping: Callable[[], bool]) -> None:
        self.own = Starlette(routes=own, exception_handlers={404: _unknown_path, 405: _wrong_method})
        self.proxy, self.stopping = proxy, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        send = _closing(send) if self.stopping() else send
        if scope["type"] == "http" and (path in FORWARDED or path.startswith("/v1/")):
            await self.proxy(scope, receive, send)
        else:
            await self.own(scope, receive, send)


def _closing(send: Send) -> Send:
    """Tell the client that its connection ends with the answer."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_closing


async def _unknown_path(request: Request, _: Exception) -> Response:
    message = f"Unknown path {request.url.path[:128]}; the API's paths begin with /v1/, and /openapi.json lists them."
    return _own_error(Refused(404, "unknown_path", message))


async def _wrong_method(request: Request, error: Exception) -> Response:
    found = (getattr(error, "headers", None) or {}).get("Allow", "")
    allowed = ", ".join(sorted(found.split(", ")))
    message = f"{request.url.path[:128]} does not take {request.method}; allowed: {allowed}."
    refused = _own_error(Refused(405, "method_not_allowed", message))
    refused.headers["allow"] = allowed
    return refused


def _own_error(refused: Refused) -> Response:
    return Response(refused.body(), status_code=refused.status, media_type="application/json")
