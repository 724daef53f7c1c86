"""Requests of fronts on their way into the engine, to another engine or out again, whichever of them holds them.

A request is in one of three places: its grammar is being compiled, the desk has given its prompt to another engine, or
the engine computes it. Owned by the core; called by its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from stoker.engine.core.compiling import CompilingRequests
from stoker.engine.core.deltas import Addressed
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.messages import AddRequest, CoreMessage, Refused, RequestProgress
from stoker.engine.errors import RequestRefused
from stoker.engine.transfer.fingerprint import salt_digest


class FrontRequests:
    """What fronts ask of their requests."""

    def __init__(
        self,
        engine: LLMEngine,
        send: Callable[[str, CoreMessage], None],
        closed: Callable[[], RequestRefused | None],
        clock: Callable[[], float],
    ) -> None:
        """`closed`: why no new request is taken now; None if they are."""
        self.engine = engine
        self.desk: Desk | None = None
        """The hand-over to and from other engines; None where there is none."""
        self._send, self._closed = send, closed
        self._compiling = CompilingRequests(clock)

    @property
    def compiling(self) -> bool:
        """Whether a grammar is being compiled, which sends no message when it is done."""
        return bool(len(self._compiling))

    def add(self, front: str, request: AddRequest) -> None:
        """Begin a request, or tell its front why not."""
        try:
            self._begin(front, request)
        except RequestRefused as refused:
            self._send(front, refusal(request.request_id, refused))

    def add_compiled(self) -> None:
        """Begin those requests whose grammars are compiled, refuse those that failed."""
        for one, refused in self._compiling.ready():
            if refused is not None:
                self._send(one.front, refusal(one.request.request_id, refused))
            else:
                self.add(one.front, one.request)

    def abort(self, front: str, request_id: str) -> list[Addressed]:
        """Abort a request and return its last deltas."""
        self._compiling.drop(front, request_id)
        if self.desk is not None and (deltas := self.desk.abort(front, request_id)):
            return deltas
        return self.engine.abort_request(request_id, front=front)

    def drop(self, front: str) -> Iterator[Addressed]:
        """Abort all requests of a front and return their last deltas; its process may only have been suspended."""
        self._compiling.drop(front)
        if self.desk is not None:
            yield from self.desk.drop(front)
        for owner, request_id in list(self.engine.requests):
            if owner == front:
                yield from self.abort(front, request_id)

    def withdraw(self, front: str, request_id: str) -> None:
        """End a request that is computed for another engine."""
        self._compiling.drop(front, request_id)
        self.engine.withdraw(request_id, front=front)

    def finish_choice(self, front: str, request_id: str, choice: int) -> None:
        """End one of a request's answers."""
        if self.desk is None or not self.desk.finish_choice(front, request_id, choice):
            self.engine.finish_choice(request_id, choice, front=front)

    def progress(self, front: str, request_ids: Iterable[str]) -> Iterator[RequestProgress]:
        """How far those requests are that have not ended. One whose grammar is being compiled is queued."""
        for request_id in request_ids:
            progress = self.engine.progress(request_id, front=front)
            if progress is None and self.desk is not None:
                progress = self.desk.progress(front, request_id)
            if progress is None and self._compiling.holds(front, request_id):
                progress = RequestProgress(request_id, "QUEUED", 0, 0)
            if progress is not None:
                yield progress

    def _begin(self, front: str, request: AddRequest) -> None:
        """Give a request to the one place that goes on with it. Raises RequestRefused."""
        if (closed := self._closed()) is not None:
            raise closed
        if self._compile_first(front, request):
            return
        if request.beginning and self.engine.beginnings is not None:
            salt = salt_digest(request.params.cache_salt)
            self.engine.beginnings.watch(request.beginning, request.prompt_tokens, salt)
        if request.prefill and self.desk is not None and self.desk.take(front, request):
            return
        self.engine.add_request(
            request.request_id,
            request.prompt_tokens,
            request.params,
            priority=request.priority,
            place=request.place,
            arrival_s=request.arrival_s,
            front=front,
            resumed=request.resumed,
        )

    def _compile_first(self, front: str, request: AddRequest) -> bool:
        """Begin to compile the request's grammar in a thread. False: it has none, or it is known.

        Raises:
            RequestRefused: too many requests wait for their grammars.
        """
        grammar, grammars = request.params.grammar, self.engine.grammars
        if grammar is None or grammars is None or grammars.knows(grammar):
            return False
        if len(self._compiling) >= self.engine.scheduler.max_queued_requests:
            raise RequestRefused("queue_full", f"{len(self._compiling)} requests wait for their grammars")
        self._compiling.add(front, request, grammars.submit(grammar))
        return True


def refusal(request_id: str, refused: RequestRefused) -> Refused:
    """What its front is told of a request that is not taken."""
    return Refused(request_id, refused.kind, str(refused), refused.field)
