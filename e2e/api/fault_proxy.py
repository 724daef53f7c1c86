"""An HTTP proxy before an API server that injects planned faults and counts requests.

Clients speak plain HTTP to it and need no credentials: the proxy has the administrator's.

A call without a planned fault passes unchanged, watches event by event.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from e2e.api.access import Access
from e2e.api.api_call import ApiCall, parse_call
from e2e.api.faults import CutWatch, Drop, Fault, FaultPlan, Hang, Hold, NoFaults, Refuse, Slow
from e2e.api.sockets import Sockets

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length")
MAX_BODY = 64 << 20
MAX_LINE = 8 << 20
"""Longest event of a watch."""


class FaultProxy:
    """The proxy as an async context manager.

    `plan` may be replaced while it runs; the counters go on.
    """

    def __init__(self, upstream: Access, plan: FaultPlan | None = None) -> None:
        self.upstream = upstream
        self.plan: FaultPlan = plan or NoFaults()
        self.counts: Counter[tuple[str, str]] = Counter()
        """(verb, resource) -> calls, failed ones too."""
        self.calls: list[ApiCall] = []
        """Every call but watches, in the order they came."""
        self.injected: list[tuple[ApiCall, Fault]] = []
        self.writes = 0
        self.hung = asyncio.Event()
        self.released = asyncio.Event()
        self.late: list[asyncio.Task[None]] = []
        """Held requests that have not been passed on yet."""
        self.url = ""

    async def __aenter__(self) -> FaultProxy:
        self._sockets = Sockets()
        self._connector = aiohttp.TCPConnector(limit=0, ssl=self.upstream.tls or False, socket_factory=self._sockets)
        self._client = aiohttp.ClientSession(connector=self._connector, auto_decompress=False, read_bufsize=MAX_LINE)
        server = web.Server(self._handle, handler_cancellation=True, access_log=None, keepalive_timeout=300)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connector.close(abort_ssl=True)
        await self._client.close()
        await self._runner.cleanup()
        await self._sockets.closed()

    def clear(self) -> None:
        """Reset the counters; the plan's numbers start again from 1."""
        self.counts.clear()
        self.calls.clear()
        self.injected.clear()
        self.writes = 0
        self.hung.clear()

    def quiet_calls(self) -> list[ApiCall]:
        """Return all counted calls except those of an operator at rest: watches and its Lease."""
        return [call for call in self.calls if call.resource != "leases"]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = parse_call(request.method, request.path, request.query, request.headers.get("Content-Type", ""))
        fault = self._choose(call) if call else None
        if isinstance(fault, Refuse):
            return _status(fault)
        if isinstance(fault, Drop) and not fault.after:
            return self._drop(request)
        if isinstance(fault, Hang) and not fault.after:
            return await self._hang()
        if isinstance(fault, Hold):
            self.late.append(asyncio.create_task(self._deliver_late(request, await request.read())))
            return await self._hang()
        if isinstance(fault, Slow):
            await asyncio.sleep(fault.seconds)
        return await self._pass(request, call, fault)

    def _choose(self, call: ApiCall) -> Fault | None:
        self.counts[call.verb, call.what] += 1
        if call.verb != "watch":
            self.calls.append(call)
        counted = call.writes and call.resource != "leases"
        self.writes += counted
        fault = self.plan.fault(call, self.counts[call.verb, call.what], self.writes if counted else 0)
        if fault is not None:
            self.injected.append((call, fault))
        return fault

    async def _pass(self, request: web.BaseRequest, call: ApiCall | None, fault: Fault | None) -> web.StreamResponse:
        try:
            async with self._ask(request, await request.read()) as answer:
                if call and call.verb == "watch" and answer.status == 200:
                    return await self._watch(request, answer, fault if isinstance(fault, CutWatch) else None)
                content = await answer.read()
        except aiohttp.ClientError:  # the API server is away: so is the proxy
            return self._drop(request)
        if isinstance(fault, Drop):
            return self._drop(request)
        if isinstance(fault, Hang):
            return await self._hang()
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
        return web.Response(status=answer.status, body=content, headers=kept)

    def _ask(self, request: web.BaseRequest, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send the same request to the API server, with the administrator's credentials."""
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP)
        headers.update(self.upstream.headers)
        headers["Accept-Encoding"] = "identity"
        return self._client.request(
            request.method,
            URL(self.upstream.url + request.raw_path, encoded=True),
            data=body or None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(None),
            allow_redirects=False,
        )

    async def _deliver_late(self, request: web.BaseRequest, body: bytes) -> None:
        await self.released.wait()
        async with self._ask(request, body) as answer:
            await answer.read()

    async def _watch(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, cut: CutWatch | None
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
        await stream.prepare(request)
        passed = 0
        if cut and cut.how != "silent" and cut.after_events == 0:
            return await self._end_watch(request, stream, cut)
        async for line in answer.content:
            if cut and cut.how == "silent" and passed >= cut.after_events:
                continue
            await stream.write(line)
            passed += 1
            if cut and cut.how != "silent" and passed >= cut.after_events:
                return await self._end_watch(request, stream, cut)
        await stream.write_eof()
        return stream

    async def _end_watch(
        self, request: web.BaseRequest, stream: web.StreamResponse, cut: CutWatch
    ) -> web.StreamResponse:
        if cut.how == "drop":
            return self._drop(request)
        errors = {"gone": (410, "Expired"), "error": (500, "InternalError")}
        if cut.how in errors:
            code, reason = errors[cut.how]
            await stream.write(
                json.dumps({"type": "ERROR", "object": _status_body(code, reason, "on purpose")}).encode() + b"\n"
            )
        await stream.write_eof()
        return stream

    async def _hang(self) -> web.StreamResponse:
        self.hung.set()
        await asyncio.get_running_loop().create_future()  # until the client goes away
        raise AssertionError

    def _drop(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _status(fault: Refuse) -> web.Response:
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    return web.json_response(_status_body(fault.code, fault.reason, fault.message), status=fault.code, headers=headers)


def _status_body(code: int, reason: str, message: str) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
