"""Who answers a request: admission, the choice of engines, attempts in turn, the fallback.

Made by `Proxy`, called for each request. Owns the requests that are held; the backends belong to `Backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker.pod.split_requests import PREFILL_HEADER
from stoker.router.admission import Admission
from stoker.router.answer import BackendAnswer
from stoker.router.backend import Candidate
from stoker.router.backends import Backends
from stoker.router.connection import BackendError, Outgoing, Silent
from stoker.router.exchange import ask
from stoker.router.fallback import FALLBACK_HEADER, for_fallback
from stoker.router.heads import named, of_class
from stoker.router.limits import ProxyLimits
from stoker.router.metrics import RouterMetrics
from stoker.router.pairs import Pair
from stoker.router.refusal import RETRY_AFTER_S, Refused
from stoker.router.request_class import CLASS_HEADER
from stoker.router.shares import key_of
from stoker.router.work import NO_WORK, Work, work_of

BUSY = (429, 503)
"""Status codes after which another backend is tried."""
NO_BACKEND = "no_backend"
"""Code of the refusal after which another deployment may answer."""
SPLIT_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"))
"""Requests with a prompt."""


class Dispatch:
    """Begins the answers of requests."""

    def __init__(
        self,
        backends: Backends,
        limits: ProxyLimits,
        metrics: RouterMetrics,
        *,
        deployment: str,
        admission: Admission | None,
        clock: Callable[[], float],
    ) -> None:
        self.backends = backends
        self.limits = limits
        self.metrics = metrics
        self.deployment = deployment
        self.admission = admission
        """None: there are no classes."""
        self.clock = clock

    def check_backends(self) -> None:
        """Refuse a request that no backend can take before its body is read.

        Raises:
            Refused: no backend is ready, and the request may not wait for one.
        """
        full = self.metrics.held >= self.limits.max_held_requests
        elsewhere = self.backends.fallback is not None or self.backends.others is not None
        if not self.backends.ready and not elsewhere and (self.limits.hold_s <= 0 or full):
            raise no_backend("no engine is ready")

    async def begin(self, request: Outgoing) -> BackendAnswer:
        """Begin the request here, or at the fallback where no backend can take it.

        Raises:
            Refused: neither took it.
        """
        try:
            return await self._begin_here(request)
        except Refused as refused:
            fallback = self.backends.fallback
            if refused.code != NO_BACKEND or fallback is None:
                raise
            passed_on = for_fallback(request, fallback.target, self.deployment)
            if passed_on is None:
                raise
            self.metrics.fallbacks.labels(fallback.target.deployment).inc()
            try:
                answer = await ask(fallback, passed_on)
            except BackendError as error:
                raise no_backend(f"{refused}; fallback {fallback.target.deployment}: {error}") from error
            named_by = (FALLBACK_HEADER, fallback.target.deployment.encode())
            return replace(answer, head=replace(answer.head, headers=[*answer.head.headers, named_by]))

    async def _begin_here(self, request: Outgoing) -> BackendAnswer:
        """Admit the request, and send it to backends until one answers.

        Raises:
            Refused: it was not admitted, or no backend took it.
        """
        work = self._work(request)
        request = named(request, self.backends.name_of(work)) if work.may_split else request
        key = key_of(request.body, request.headers) if self.backends.shares.percents else b""
        if self.admission is None or not work.may_split:
            return await self._begin_in_turn(request, work, key, None)
        ticket = await self.admission.admit(request, work, key)
        with self.admission.unanswered(ticket):
            answer = await self._begin_in_turn(of_class(request, ticket.waiting.place), work, key, ticket.pair)
        self.admission.began(ticket, is_stream=answer.is_stream)
        class_named = (CLASS_HEADER, ticket.name.encode())
        head = replace(answer.head, headers=[*answer.head.headers, class_named])
        return replace(answer, head=head, place=ticket.waiting.place)

    async def _begin_in_turn(
        self, request: Outgoing, work: Work, key: bytes, first: Pair[Candidate] | None
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
            backend = pair.answers.backend
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

    async def _ask_pair(self, pair: Pair[Candidate], request: Outgoing) -> BackendAnswer:
        """Send the request to the engine that answers, with the address of the one that computes the prompt.

        Raises:
            BackendError: as `_ask`. A failure of the helper is none: the answering engine computes the prompt then.
        """
        tokens = max(pair.uncached, 0)
        if pair.helper is None:
            with pair.answers.computing(tokens):
                return await ask(pair.answers, request)
        with pair.helper.helping(tokens) as endpoint:
            if endpoint is not None:
                self.metrics.split.inc()
                request = replace(request, headers=[*request.headers, (PREFILL_HEADER, endpoint.encode())])
            return await ask(pair.answers, request)

    async def _hold(self, busy: set[tuple[str, str]], work: Work, hold_s: float) -> Pair[Candidate] | None:
        """Wait for a backend, if this router may hold one more request."""
        if hold_s <= 0 or self.metrics.held >= self.limits.max_held_requests:
            return None
        self.metrics.held += 1
        try:
            return await self.backends.wait_for_one(busy, hold_s, work, self.backends.has_share)
        finally:
            self.metrics.held -= 1


def no_backend(problem: str) -> Refused:
    return Refused(503, NO_BACKEND, f"No engine can serve the request now: {problem}. Try again later.", RETRY_AFTER_S)
