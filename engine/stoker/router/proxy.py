"""The data path: read the request, have a backend answer it, stream the answer.

A request may be sent again until the first byte of an answer's body arrives. A later break is reported to the client in
the stream itself. The answer's head is held until then: an event stream sends its head long before its first token.

Made by `Router`, called for each client request. `Dispatch` finds who answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from stoker.pod.asgi import (
    BodyTooLarge,
    ClientLeft,
    Receive,
    Scope,
    Send,
    read_body,
    request_id,
)
from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent, BodyShare
from stoker.pod.client_presence import while_present
from stoker.pod.direct_body import direct_body
from stoker.pod.marked_streams import RESUME_HEADER
from stoker.pod.stream_comments import StreamComments
from stoker.pod.tracing import NoTracer, Tracer
from stoker.router.admission import Admission
from stoker.router.answer import BackendAnswer, body_message, event_of, lost, start_message
from stoker.router.backends import Backends
from stoker.router.by_model import ByModel, OwnAnswer
from stoker.router.carrier import Carrier
from stoker.router.client import Client
from stoker.router.connection import BackendError, Outgoing
from stoker.router.dispatch import Dispatch
from stoker.router.endpoint import Endpoint
from stoker.router.exchange import ask
from stoker.router.heads import answer_headers, of_class, outgoing
from stoker.router.kept_stream import RAW_BYTES, KeptStream
from stoker.router.limits import ProxyLimits
from stoker.router.metrics import RouterMetrics
from stoker.router.refusal import RETRY_AFTER_S, Refused
from stoker.router.relay import Relay
from stoker.router.request_span import RequestSpan, traced
from stoker.router.waiting_stream import WaitingStream, may_have_comments

LATE_BYTES = 64 * 1024
"""Of an answer's body that becomes an event."""


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
        self.new_id = new_id
        self.clock = clock
        self.bodies = BodyBudget(max(limits.max_body_bytes_in_flight, limits.max_body_bytes))
        self.kept = BodyBudget(limits.max_resume_bytes)
        """For requests whose streams can go on elsewhere."""
        self.keeps_streams = limits.max_resume_bytes > 0
        self.dispatch = Dispatch(backends, limits, metrics, deployment=deployment, admission=admission, clock=clock)
        self.by_model = ByModel(backends, self.dispatch.begin, limits, metrics, deployment)
        self.carrier = Carrier(
            backends, ask, metrics, max_attempts=limits.max_attempts, wait_s=limits.resume_wait_s, clock=clock
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
        client = Client(send, own_id, direct_body(scope))
        interval_s = self.limits.comment_interval_s if may_have_comments(scope) else 0.0
        with self.bodies.share() as share:
            try:
                self.dispatch.check_backends()
                request = outgoing(scope, await self._read_body(receive, share), own_id, marked=self.keeps_streams)
            except Refused as refused:
                await self._refuse(refused, client)
            except ClientLeft:
                self.metrics.left.inc()
            else:
                self.metrics.request_bytes.observe(len(request.body))
                work = self._forward(request, share, client, interval_s)
                del request  # its body is freed when the answer begins
                if not await while_present(work, scope, receive):
                    self.metrics.left.inc()

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

    async def _forward(self, request: Outgoing, share: BodyShare, client: Client, interval_s: float) -> None:
        """Have the request answered. `interval_s`: silence after which a stream gets a comment; 0: never."""
        if not self.tracer.on:
            await self._answer(request, share, client, interval_s)
            return
        with traced(self.tracer, request, self.clock) as (span, own_request):
            del request  # its body is freed when the answer begins
            await self._answer(own_request.pop(), share, client, interval_s, span)

    async def _answer(
        self, request: Outgoing, share: BodyShare, client: Client, interval_s: float, span: RequestSpan | None = None
    ) -> None:
        arrived = self.clock()
        waiting = WaitingStream(request, client)
        try:
            async with StreamComments(interval_s, lambda: client.sent, waiting.comment):
                answer = await self.by_model.begin(request)
        except Refused as refused:
            if span is not None:
                span.refused(refused.status)
            await self._refuse(refused, client)
            return
        finally:
            del waiting  # it holds the request
        if isinstance(answer, OwnAnswer):
            await self._send_own(answer, client)
            return
        if span is not None:
            span.answered(answer)
        first_byte_s = self.clock() - arrived
        self.metrics.first_byte.observe(first_byte_s)
        self.metrics.requests.labels(answer.head.status).inc()
        if not isinstance(answer.backend, Endpoint):
            self.metrics.revisions.answered(
                answer.backend.entry, answer.head.status, first_byte_s if answer.is_stream else None
            )
        with self.kept.share() as kept_share:
            kept = self._kept(request, answer, kept_share)
            del request  # it is not sent again as it is
            share.release()
            interval_s = interval_s if answer.is_stream else 0.0
            async with StreamComments(interval_s, lambda: client.sent, client.comment):
                if kept is not None:
                    await self._carry(answer, kept, client)
                else:
                    await self._pass_on(answer, client)
            await client.send(body_message(b"", more=False))

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
        return KeptStream(of_class(request, answer.place), request.target.partition(b"?")[0].decode())

    async def _carry(self, answer: BackendAnswer, kept: KeptStream, client: Client) -> None:
        """Send a stream that other backends can go on with."""
        try:
            await self._begin(answer, client)
        except BaseException:
            answer.connection.close()
            raise
        size = await self.carrier.carry(answer, kept, client)
        self.metrics.response_bytes.observe(size)

    async def _pass_on(self, answer: BackendAnswer, client: Client) -> None:
        try:
            with answer.candidate.request():
                await self._relay(answer, client)
        except BaseException:
            answer.connection.close()
            raise
        answer.backend.give_back(answer.connection)

    async def _relay(self, answer: BackendAnswer, client: Client) -> None:
        """Send the answer to the client as it arrives."""
        if client.begun and not (answer.head.status == 200 and answer.is_stream):
            await self._send_late(answer, client)
            return
        await self._begin(answer, client)
        relay = Relay(answer, client, self.clock, self.metrics.revisions)
        try:
            await relay.run()
        except BackendError as error:
            self.metrics.cut.inc()
            self.metrics.revisions.broke_off(answer.backend.entry)
            answer.backend.suspect(str(error))
            if not answer.is_stream:
                raise  # a body of known length has begun: only a cut connection can show that it is not complete
            self.metrics.lost.labels("not_resumable").inc()
            await client.send(body_message(lost(), more=True))
            answer.connection.close()
        self.metrics.response_bytes.observe(relay.sent)

    async def _begin(self, answer: BackendAnswer, client: Client) -> None:
        """Send the head, unless a comment has sent one."""
        if not client.begun:
            head = answer.head
            await client.send(start_message(head.status, answer_headers(head.headers, client.request_id)))

    async def _send_late(self, answer: BackendAnswer, client: Client) -> None:
        """Send an answer that is no stream to a client whose stream a comment has begun: its error, as an event."""
        body = bytearray()
        try:
            async for part in answer.body():
                body += part[: LATE_BYTES - len(body)]
        except BackendError as error:
            answer.backend.suspect(str(error))
            answer.connection.close()
        await client.pass_on(event_of(answer.head.status, bytes(body), answer.head.headers))

    async def _send_own(self, answer: OwnAnswer, client: Client) -> None:
        self.metrics.requests.labels(answer.status).inc()
        if client.begun:
            await client.send(body_message(event_of(answer.status, answer.body, answer.headers), more=False))
            return
        await client.send(start_message(answer.status, answer_headers(answer.headers, client.request_id)))
        await client.send(body_message(answer.body, more=False))

    async def _refuse(self, refused: Refused, client: Client) -> None:
        self.metrics.requests.labels(refused.status).inc()
        headers = refused.headers(client.request_id)
        if client.begun:
            await client.send(body_message(event_of(refused.status, refused.body(), headers), more=False))
            return
        await client.send(start_message(refused.status, headers))
        await client.send(body_message(refused.body(), more=False))
