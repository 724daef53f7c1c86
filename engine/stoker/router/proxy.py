"""The data path: choose a backend, send the request, stream the answer.

A request may be sent again until the first byte of an answer's body arrives. A later break is reported to the client in
the stream itself. The answer's head is held until then: an event stream sends its head long before its first token.

Made by `Router`, called for each client request. Owns the requests that are held; the backends belong to `Backends`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.pod.asgi import (
    BodyTooLarge,
    ClientLeft,
    Receive,
    Scope,
    Send,
    client_gone,
    read_body,
    request_id,
)
from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent, BodyShare
from stoker.pod.marked_streams import RESUMABLE_PATHS, RESUME_HEADER
from stoker.pod.split_requests import PREFILL_HEADER
from stoker.pod.tracing import NoTracer, Tracer
from stoker.router.admission import Admission
from stoker.router.answer import BackendAnswer, body_message, lost, start_message, whole_events
from stoker.router.backend import Backend
from stoker.router.backends import Backends
from stoker.router.carrier import Carrier
from stoker.router.connection import (
    BackendError,
    Connection,
    Headers,
    Outgoing,
    Silent,
    Unreachable,
)
from stoker.router.fallback import FALLBACK_HEADER, for_fallback
from stoker.router.kept_stream import RAW_BYTES, KeptStream
from stoker.router.metrics import RouterMetrics
from stoker.router.pairs import Pair
from stoker.router.refusal import RETRY_AFTER_S, Refused
from stoker.router.request_class import CLASS_HEADER
from stoker.router.request_span import RequestSpan, traced
from stoker.router.shares import key_of
from stoker.router.work import NO_WORK, Work, work_of

BUSY = (429, 503)
"""Status codes after which another backend is tried."""
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip
NO_BACKEND = "no_backend"
"""Code of the refusal after which another deployment may answer."""
SPLIT_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"))
"""Requests with a prompt."""


@dataclass(frozen=True)
class ProxyLimits:
    """Limits on what the proxy does for one request, and holds for all."""

    max_attempts: int
    hold_s: float
    max_held_requests: int
    max_body_bytes: int
    max_body_bytes_in_flight: int
    max_resume_bytes: int
    resume_wait_s: float


class Proxy:
    """An ASGI application that forwards every HTTP request to a backend."""

    def __init__(
        self,
        backends: Backends,
        limits: ProxyLimits,
        metrics: RouterMetrics,
        *,
        deployment: str = "",
        admission: Admission | None = None,
        new_id: Callable[[], str] = lambda: f"req-{uuid.uuid4().hex}",
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NoTracer(),  # noqa: B008 - it has no state
    ) -> None:
        self.tracer = tracer
        self.backends = backends
        self.limits = limits
        self.metrics = metrics
        self.deployment = deployment
        self.admission = admission
        """None: there are no classes."""
        self.new_id = new_id
        self.clock = clock
        self.bodies = BodyBudget(max(limits.max_body_bytes_in_flight, limits.max_body_bytes))
        self.kept = BodyBudget(limits.max_resume_bytes)
        """For requests whose streams can go on elsewhere."""
        self.keeps_streams = limits.max_resume_bytes > 0
        self.carrier = Carrier(
            backends, self._ask, metrics, max_attempts=limits.max_attempts, wait_s=limits.resume_wait_s, clock=clock
        )
        self.running = 0
        """Requests that have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self.running -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, then forward it."""
        own_id = request_id(scope, self.new_id)
        with self.bodies.share() as share:
            try:
                self._check_backends()
                request = outgoing(scope, await self._read_body(receive, share), own_id, marked=self.keeps_streams)
            except Refused as refused:
                await self._refuse(refused, own_id, send)
            except ClientLeft:
                self.metrics.left.inc()
            else:
                self.metrics.request_bytes.observe(len(request.body))
                work = asyncio.create_task(self._forward(request, share, own_id, send))
                del request  # its body is freed when the answer begins
                await self._until_client_leaves(work, receive)

    async def _until_client_leaves(self, work: asyncio.Task[None], receive: Receive) -> None:
        gone = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.metrics.left.inc()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()  # a failure of ours is uvicorn's to log

    def _check_backends(self) -> None:
        """Refuse a request that no backend can take before its body is read.

        Raises:
            Refused: no backend is ready, and the request may not wait for one.
        """
        full = self.metrics.held >= self.limits.max_held_requests
        if not self.backends.ready and self.backends.fallback is None and (self.limits.hold_s <= 0 or full):
            raise no_backend("no engine is ready")

    async def _read_body(self, receive: Receive, share: BodyShare) -> bytes:
        """Read the request's body.

        Raises:
            Refused: it is too large, or the bodies of all requests are.
            ClientLeft: the client closed its connection.
        """
        try:
            return await read_body(receive, self.limits.max_body_bytes, share)
        except BodyTooLarge as error:
            raise Refused(413, "request_too_large", str(error)) from error
        except BodyBudgetSpent as error:
            raise Refused(503, "too_many_body_bytes", f"Try again later: {error}.", RETRY_AFTER_S) from error

    async def _forward(self, request: Outgoing, share: BodyShare, request_id: bytes, send: Send) -> None:
        if not self.tracer.on:
            await self._answer(request, share, request_id, send)
            return
        with traced(self.tracer, request, self.clock) as (span, own_request):
            del request  # its body is freed when the answer begins
            await self._answer(own_request.pop(), share, request_id, send, span)

    async def _answer(
        self, request: Outgoing, share: BodyShare, request_id: bytes, send: Send, span: RequestSpan | None = None
    ) -> None:
        arrived = self.clock()
        try:
            answer = await self._begin_anywhere(request)
        except Refused as refused:
            if span is not None:
                span.refused(refused.status)
            await self._refuse(refused, request_id, send)
            return
        if span is not None:
            span.answered(answer)
        first_byte_s = self.clock() - arrived
        self.metrics.first_byte.observe(first_byte_s)
        self.metrics.requests.labels(answer.head.status).inc()
        if answer.backend is not self.backends.fallback:
            self.metrics.revisions.answered(
                answer.backend.entry, answer.head.status, first_byte_s if answer.is_stream else None
            )
        with self.kept.share() as kept_share:
            kept = self._kept(request, answer, kept_share)
            del request  # it is not sent again as it is
            share.release()
            if kept is not None:
                await self._carry(answer, kept, request_id, send)
            else:
                await self._pass_on(answer, request_id, send)

    def _kept(self, request: Outgoing, answer: BackendAnswer, share: BodyShare) -> KeptStream | None:
        """What another engine needs to go on with the stream; None where it is none or cannot go on."""
        marked = answer.head.status == 200 and answer.head.header(RESUME_HEADER) == b"1"
        if not (marked and self.keeps_streams):
            return None
        try:
            share.take(len(request.body) + RAW_BYTES)
        except BodyBudgetSpent:
            self.metrics.not_kept.inc()
            return None
        return KeptStream(request, request.target.partition(b"?")[0].decode())

    async def _carry(self, answer: BackendAnswer, kept: KeptStream, request_id: bytes, send: Send) -> None:
        """Send a stream that other backends can go on with."""
        head = answer.head
        try:
            await send(start_message(head.status, answer_headers(head.headers, request_id)))
        except BaseException:
            answer.connection.close()
            raise
        size = await self.carrier.carry(answer, kept, send)
        self.metrics.response_bytes.observe(size)
        await send(body_message(b"", more=False))

    async def _pass_on(self, answer: BackendAnswer, request_id: bytes, send: Send) -> None:
        try:
            with answer.backend.request():
                await self._relay(answer, request_id, send)
        except BaseException:
            answer.connection.close()
            raise
        answer.backend.give_back(answer.connection)

    async def _begin_anywhere(self, request: Outgoing) -> BackendAnswer:
        """Begin the request here, or at the fallback where no backend can take it.

        Raises:
            Refused: neither took it.
        """
        try:
            return await self._begin(request)
        except Refused as refused:
            fallback = self.backends.fallback
            if refused.code != NO_BACKEND or fallback is None:
                raise
            passed_on = for_fallback(request, fallback.target, self.deployment)
            if passed_on is None:
                raise
            self.metrics.fallbacks.labels(fallback.target.deployment).inc()
            try:
                answer = await self._ask(fallback, passed_on)
            except BackendError as error:
                raise no_backend(f"{refused}; fallback {fallback.target.deployment}: {error}") from error
            named = (FALLBACK_HEADER, fallback.target.deployment.encode())
            return replace(answer, head=replace(answer.head, headers=[*answer.head.headers, named]))

    async def _begin(self, request: Outgoing) -> BackendAnswer:
        """Admit the request, and send it to backends until one answers.

        Raises:
            Refused: it was not admitted, or no backend took it.
        """
        work = self._work(request)
        key = key_of(request.body, request.headers) if self.backends.shares.percents else b""
        if self.admission is None or not work.may_split:
            return await self._begin_in_turn(request, work, key, None)
        ticket = await self.admission.admit(request, work, key)
        with self.admission.unanswered(ticket):
            answer = await self._begin_in_turn(request, work, key, ticket.pair)
        self.admission.began(ticket, is_stream=answer.is_stream)
        named = (CLASS_HEADER, ticket.name.encode())
        return replace(answer, head=replace(answer.head, headers=[*answer.head.headers, named]))

    async def _begin_in_turn(
        self, request: Outgoing, work: Work, key: bytes, first: Pair[Backend] | None
    ) -> BackendAnswer:
        """Send the request to backends in turn until one answers; return that answer.

        Args:
            first: the engines of the first attempt, where they are chosen already.

        Raises:
            Refused: no backend took the request.
        """
        busy: set[tuple[str, str]] = set()
        held_until = self.clock() + self.limits.hold_s
        problem = "no engine is ready"
        for attempt in range(self.limits.max_attempts):
            if attempt:
                self.metrics.retries.inc()
            pair, first = first or self.backends.choose_shared(busy, work, key), None
            pair = pair or await self._hold(busy, work, held_until - self.clock())
            if pair is None:
                break
            backend = pair.answers
            try:
                answer = await self._ask_pair(pair, request)
            except Silent as silence:
                self.metrics.revisions.unanswered(backend.entry)
                raise Refused(
                    504, "timeout", f"The engine did not answer: {silence}. The request was not sent to another one."
                ) from silence
            except BackendError as error:
                problem = str(error)
                backend.suspect(problem)
                self.metrics.revisions.unanswered(backend.entry)
                continue
            tried = {*busy, backend.entry.key}
            ready = filter(self.backends.has_share, self.backends.ready)
            others = [other for other in ready if other.entry.key not in tried]
            if answer.head.status not in BUSY or not others or attempt + 1 == self.limits.max_attempts:
                return answer
            answer.connection.close()
            busy.add(backend.entry.key)
        raise no_backend(problem)

    def _work(self, request: Outgoing) -> Work:
        """Estimate the work, if the choice looks at it."""
        if not self.backends.weighs_work:
            return NO_WORK
        return work_of(request.body, request.headers, may_split=request.target.partition(b"?")[0] in SPLIT_PATHS)

    async def _ask_pair(self, pair: Pair[Backend], request: Outgoing) -> BackendAnswer:
        """Send the request to the engine that answers, with the address of the one that computes the prompt.

        Raises:
            BackendError: as `_ask`. A failure of the helper is none: the answering engine computes the prompt then.
        """
        endpoint = pair.helper.peer_endpoint if pair.helper is not None else None
        if endpoint is not None:
            self.metrics.split.inc()
            request = replace(request, headers=[*request.headers, (PREFILL_HEADER, endpoint.encode())])
        with pair.computes.unstarted(max(pair.uncached, 0)):
            return await self._ask(pair.answers, request)

    async def _hold(self, busy: set[tuple[str, str]], work: Work, hold_s: float) -> Pair[Backend] | None:
        """Wait for a backend, if this router may hold one more request."""
        if hold_s <= 0 or self.metrics.held >= self.limits.max_held_requests:
            return None
        self.metrics.held += 1
        try:
            return await self.backends.wait_for_one(busy, hold_s, work, self.backends.has_share)
        finally:
            self.metrics.held -= 1

    async def _ask(self, backend: Backend, request: Outgoing) -> BackendAnswer:
        """Send the request and wait for the first part of the answer's body.

        Raises:
            BackendError: nothing of an answer has come, so the request may go elsewhere.
        """
        with backend.request():
            connection = await self._connect(backend)
            stale = not connection.fresh
            try:
                return await self._exchange(backend, connection, request)
            except Unreachable:
                if not stale or backend.stalled:
                    raise
            connection = await self._connect(backend, fresh=True)  # the kept one was closed meanwhile: no fault
            return await self._exchange(backend, connection, request)

    async def _connect(self, backend: Backend, *, fresh: bool = False) -> Connection:
        try:
            return await backend.connect(fresh=fresh)
        except Silent as silence:  # the request itself was not sent: another backend may have it
            raise Unreachable(str(silence)) from silence

    async def _exchange(self, backend: Backend, connection: Connection, request: Outgoing) -> BackendAnswer:
        silence_s = backend.times.silence_s
        try:
            with backend.unanswered(connection):
                head = await connection.exchange(request, silence_s)
                rest = connection.chunks(silence_s)
                first = await anext(rest, None)
        except BaseException:
            connection.close()
            raise
        return BackendAnswer(backend, connection, head, first, rest)

    async def _relay(self, answer: BackendAnswer, request_id: bytes, send: Send) -> None:
        """Send the answer to the client as it arrives."""
        head, events = answer.head, answer.is_stream
        await send(start_message(head.status, answer_headers(head.headers, request_id)))
        body = whole_events(answer.body()) if events else answer.body()
        size, last_s = 0, 0.0
        try:
            async for chunk in body:
                now_s = self.clock()
                if size and events:
                    self.metrics.revisions.gap(answer.backend.entry, now_s - last_s)
                last_s = now_s
                size += len(chunk)
                await send(body_message(chunk, more=True))
        except BackendError as error:
            self.metrics.cut.inc()
            self.metrics.revisions.broke_off(answer.backend.entry)
            answer.backend.suspect(str(error))
            if not events:
                raise  # a body of known length has begun: only a cut connection can show that it is not complete
            self.metrics.lost.labels("not_resumable").inc()
            await send(body_message(lost(), more=True))
            answer.connection.close()
        self.metrics.response_bytes.observe(size)
        await send(body_message(b"", more=False))

    async def _refuse(self, refused: Refused, request_id: bytes, send: Send) -> None:
        self.metrics.requests.labels(refused.status).inc()
        await send(start_message(refused.status, refused.headers(request_id)))
        await send(body_message(refused.body(), more=False))


def no_backend(problem: str) -> Refused:
    return Refused(503, NO_BACKEND, f"No engine can serve the request now: {problem}. Try again later.", RETRY_AFTER_S)


def outgoing(scope: Scope, body: bytes, request_id: bytes, *, marked: bool = False) -> Outgoing:
    """Build the request for the backend: credentials and unknown headers pass, hop-by-hop headers do not.

    `marked`: ask for a stream that another backend could go on with.

    Raises:
        Refused: its head is one that servers take and clients may not send.
    """
    dropped = HOP_BY_HOP | {b"host", b"content-length", b"x-request-id", RESUME_HEADER, PREFILL_HEADER}
    headers = [(key, value.strip(b" \t")) for key, value in scope["headers"] if key not in dropped]
    headers.append((b"x-request-id", request_id))
    if marked and scope["path"] in RESUMABLE_PATHS:
        headers.append((RESUME_HEADER, b"1"))
    if scope.get("client"):
        headers.append((b"x-forwarded-for", str(scope["client"][0]).encode()))
    target = scope.get("raw_path") or scope["path"].encode()
    if scope.get("query_string"):
        target += b"?" + scope["query_string"]
    request = Outgoing(scope["method"], target, headers, body)
    if problem := request.problem:
        raise Refused(400, "invalid_request", f"The head of the request cannot be passed on: {problem}.")
    return request


def answer_headers(headers: Headers, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Build the headers for the client from the backend's, with the request's id once."""
    dropped = HOP_BY_HOP | {b"x-request-id", RESUME_HEADER, b"date"}  # the server writes a date of its own
    kept = [(key, value) for key, value in headers if key not in dropped]
    return [*kept, (b"x-request-id", request_id)]
