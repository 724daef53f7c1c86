"""Streams that outlive their engine: whole updates are passed on, and when a backend fails, another one goes on.

The client gets the same tokens as from one engine, with a gap. It gets `backend_lost` only when no backend could go on.

Made by `Proxy`, which opens the exchanges with backends and sends the answer's head.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.answer import BackendAnswer, body_message, lost
from stoker.router.backend import Candidate
from stoker.router.backends import Backends
from stoker.router.client import Client
from stoker.router.connection import BackendError, Outgoing
from stoker.router.kept_stream import DONE, KeptStream, NotResumable
from stoker.router.metrics import RouterMetrics
from stoker.router.passing import Passing

log = logging.getLogger("stoker.router")

Ask = Callable[[Candidate, Outgoing], Awaitable[BackendAnswer]]


class Lost(Exception):
    """No backend can go on with a stream; the message has the reason."""


class Carrier:
    """Passes on resumable streams."""

    def __init__(
        self, backends: Backends, ask: Ask, metrics: RouterMetrics, *, max_attempts: int, wait_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.backends = backends
        self.ask = ask
        self.metrics = metrics
        self.max_attempts = max_attempts
        self.wait_s = wait_s
        self.clock = clock

    async def carry(self, answer: BackendAnswer, kept: KeptStream, client: Client) -> int:
        """Send the body of a stream, from as many backends as it takes; return its bytes. The head has been sent."""
        size = idle_breaks = 0
        while True:
            passing = Passing(answer, kept, client, self.clock, self.metrics.revisions)
            try:
                problem = await self._pass_on(passing)
            finally:
                size += passing.sent
            if problem is None:
                return size
            if kept.complete:
                await client.send(body_message(DONE, more=True))
                return size + len(DONE)
            self.metrics.cut.inc()
            self.metrics.revisions.broke_off(answer.backend.entry)
            idle_breaks = 0 if passing.sent else idle_breaks + 1
            try:
                if idle_breaks >= self.max_attempts:
                    raise self._lost("no_progress", f"{idle_breaks} engines failed at the same token")
                answer = await self._go_on(answer, kept, problem)
            except Lost as reason:
                end = lost(str(reason))
                await client.send(body_message(end, more=True))
                return size + len(end)

    async def _pass_on(self, passing: Passing) -> str | None:
        """Send the updates of one backend; return the reason if it cannot finish the stream."""
        answer = passing.answer
        try:
            with answer.candidate.request(), answer.backend.carrying(answer.connection, passing.kept):
                problem = await passing.run()
        except BackendError as error:
            problem = str(error)
        except BaseException:
            answer.connection.close()
            raise
        if problem is None:
            answer.backend.give_back(answer.connection)
        else:
            answer.connection.close()
            answer.backend.suspect(problem)
        return problem

    async def _go_on(self, answer: BackendAnswer, kept: KeptStream, problem: str) -> BackendAnswer:
        """Begin the rest of a stream at another backend of the same revision.

        Raises:
            Lost: there is none, or none could.
        """
        broke_s, revision = self.clock(), answer.backend.entry.revision
        log.warning("a stream of %s broke: %s", answer.backend.entry.url, problem)
        try:
            request = kept.next_request()
        except NotResumable as reason:
            raise self._lost("not_resumable", f"it cannot go on at another engine: {reason}") from reason
        refused: set[tuple[str, str]] = set()
        for _ in range(self.max_attempts):
            left_s = max(broke_s + self.wait_s - self.clock(), 0)
            pair = await self.backends.wait_for_one(refused, left_s, fits=lambda one: one.entry.revision == revision)
            if pair is None:
                break
            backend = pair.answers.backend
            try:
                found = await self.ask(pair.answers, request)
            except BackendError as error:
                problem = str(error)
                backend.suspect(problem)
                continue
            if found.head.status == 200 and found.head.header(RESUME_HEADER) == b"1":
                self.metrics.resumed.inc()
                self.metrics.resume_gap.observe(self.clock() - broke_s)
                return found
            found.connection.close()
            refused.add(backend.entry.key)
            problem = f"{backend.entry.url} answered {found.head.status}: {found.first[:300]!r}"
            log.warning("a stream cannot go on at %s", problem)
        raise self._lost("no_backend", "no other engine could go on")

    def _lost(self, kind: str, reason: str) -> Lost:
        self.metrics.lost.labels(kind).inc()
        return Lost(reason)
