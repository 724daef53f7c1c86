"""The proxy of the embedded cluster's API: HTTP to a port of a Service or a Pod, as an API server relays it.

Made by `kube_routes`. It passes no header of the caller on but the kinds of content and a key of the program, and
decides nothing.
"""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stoker.operator.cluster.interface import NotFound
from stoker.operator.cluster.local.addresses import Host
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.pod_address import container_port, host_of
from stoker.operator.domain.plan import Key
from stoker.pod.error_text import text_of

LIMITS = httpx.Timeout(15.0, connect=5.0, read=600.0)
PASSED = ("content-type", "accept", "x-api-key")


class KubeProxy:
    """Relays requests below `.../services/NAME:PORT/proxy/` and `.../pods/NAME:PORT/proxy/`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    async def service(self, request: Request) -> Response:
        key, port = _place("Service", request)
        self.cluster.objects.get(key)
        return await self._relay(request, Host("service", key.namespace, key.name), port)

    async def pod(self, request: Request) -> Response:
        key, port = _place("Pod", request)
        pod = self.cluster.objects.get(key)
        return await self._relay(request, host_of(pod), container_port(pod, port))

    async def _relay(self, request: Request, host: Host, port: int) -> Response:
        """Answer as the program does; 503 where it cannot be reached."""
        addresses = self.cluster.addresses
        url = f"http://{addresses.ip(host)}:{addresses.port(host, port)}/{request.path_params['path']}"
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        outgoing = httpx.Request(
            request.method, url, params=request.query_params, headers=headers, content=await request.body(),
            extensions={"timeout": LIMITS.as_dict()},
        )  # fmt: skip
        return _Relay(outgoing, f"{host.role} {host.namespace}/{host.name}:{port}")


class _Relay(Response):
    """The answer of a program, passed on as it comes; the request ends with the client that waits for it."""

    def __init__(self, outgoing: httpx.Request, place: str) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.ensure_future(self._pass_on(scope, receive, send))
        leaving = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait((relaying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            relaying.cancel()
            leaving.cancel()
            await asyncio.gather(relaying, leaving, return_exceptions=True)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            try:
                answer = await client.send(self.outgoing, stream=True)
            except (httpx.HTTPError, OSError) as error:
                unreachable = _unreachable(f"{self.place}: {text_of(error)}")
                await unreachable(scope, receive, send)
                return
            kind = answer.headers.get("content-type", "").encode("latin-1")
            headers = [(b"content-type", kind)] if kind else []
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for chunk in answer.aiter_bytes():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_left(receive: Receive) -> None:
    """Wait until the client is gone. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _place(kind: str, request: Request) -> tuple[Key, int]:
    """The object and the port of `NAME:PORT`. Raises NotFound."""
    given = request.path_params
    name, _, port = given["name"].rpartition(":")
    if not name or not port.isdigit():
        raise NotFound(f"{given['name']!r}: NAME:PORT is needed")
    return Key(kind, given["namespace"], name), int(port)


def _unreachable(message: str) -> JSONResponse:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503, "reason": "ServiceUnavailable"}
    return JSONResponse({**status, "message": message}, 503)
