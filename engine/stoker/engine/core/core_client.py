"""A front's link to the core: sends requests, hands each its own messages, and watches the core's progress.

Owns the socket and the open requests of one front. Called by `front` and `generation`; made by `program`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import zmq
import zmq.asyncio

from stoker.engine.core.core_watch import LISTEN_S, CoreWatch, WatchLimits
from stoker.engine.core.joined_deltas import MOST_JOINED, joined
from stoker.engine.core.messages import (
    Abort,
    AddRequest,
    CoreState,
    Delta,
    Drain,
    Finish,
    Forget,
    Hello,
    Inspect,
    Inspected,
    Message,
    Outputs,
    Ping,
    Refused,
    RequestProgress,
    Stop,
    pack,
    unpack,
)
from stoker.engine.core.stats import Stats, TransferStats
from stoker.engine.errors import ProtocolError, RequestRefused

log = logging.getLogger("stoker.engine")
PING_S = 5.0
INSPECT_S = 5.0
"""Longest wait for the progress of requests: a core reads messages between two steps."""
PATIENCE = WatchLimits()


class CoreLost(RuntimeError):
    """The core process ended while a request was running."""


News = Delta | Refused | CoreLost
Join = Callable[[Sequence[Delta]], list[Delta]]


class CoreClient:
    """The front's end of the wire, in one event loop. `state` and `stats` are the newest from the core."""

    def __init__(
        self,
        address: str,
        watch_limits: WatchLimits = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        identity: bytes = b"",
        join: Join = joined,
    ) -> None:
        """`identity`: the socket's, by which another process can name this front; empty: the core draws one. `join`:
        what becomes of the deltas of a request that wait."""
        self.address, self.identity, self._join = address, identity, join
        self.watch = CoreWatch(watch_limits)
        """The core's silence and progress."""
        self._clock = clock
        self.state = CoreState("Loading", "starting the core")
        self.stats: Stats | None = None
        self.on_state: Callable[[CoreState], None] = lambda _: None
        self._news: dict[str, asyncio.Queue[News]] = {}
        self._queries: dict[str, asyncio.Future[tuple[RequestProgress, ...]]] = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: str | None = None

    async def start(self) -> None:
        """Connect. The core may start later."""
        self._socket = self._context.socket(zmq.DEALER)
        if self.identity:
            self._socket.setsockopt(zmq.IDENTITY, self.identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self.address)
        self.send(Hello())
        self._tasks = [
            asyncio.create_task(self._receive(), name="messages of the core"),
            asyncio.create_task(self._keep_pinging(), name="pings to the core"),
            asyncio.create_task(self._keep_watching(), name="watch on the core"),
        ]

    async def close(self) -> None:
        """Disconnect; running requests see the core as lost."""
        self.lose("the front is closing")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    @property
    def alive(self) -> bool:
        """Whether the core has neither ended nor failed; it may be stalled."""
        return self._lost is None and self.state.phase != "Failed"

    @property
    def dead(self) -> bool:
        """Whether the core should be restarted."""
        return self.watch.dead

    @property
    def serving(self) -> bool:
        """Whether the core takes requests and makes progress."""
        return self.alive and self.state.phase == "Serving" and not self.watch.stalled

    @property
    def problem(self) -> str:
        """The reason why the core takes no requests now; empty while it takes them."""
        return self.watch.reason or self.state.message

    @property
    def running(self) -> int:
        """Number of this front's requests that have not ended."""
        return len(self._news)

    def lose(self, reason: str) -> None:
        """Treat the core as gone: end every running request with `CoreLost`, refuse new ones."""
        if self._lost is None:
            self._lost = reason
            for queue in self._news.values():
                queue.put_nowait(CoreLost(reason))

    @property
    def num_ranks(self) -> int:
        """Data ranks: cores that answer as one."""
        return 1

    @property
    def next_rank(self) -> int:
        """The data rank that a request should go to: there is one."""
        return 0

    def transfer_of(self, rank: int) -> TransferStats | None:  # noqa: ARG002 - there is one
        """What a rank exchanges with other engines, by its newest report."""
        return self.stats.transfer if self.stats is not None else None

    @contextmanager
    def request(self, request: AddRequest, rank: int = 0) -> Iterator[RunningRequest]:  # noqa: ARG002 - there is one
        """Send a request whose deltas arrive inside the block. Leaving the block early aborts it.

        Raises:
            CoreLost: the core has ended.
        """
        if self._lost is not None:
            raise CoreLost(self._lost)
        running = RunningRequest(self.send, request, self._join)
        self._news[request.request_id] = running.news
        try:
            self.send(request)
            yield running
        finally:
            self._news.pop(request.request_id, None)
            if running.open_choices and self._lost is None:
                self.send(Abort((request.request_id,)))

    async def inspect(self, request_ids: Sequence[str]) -> tuple[RequestProgress, ...]:
        """How far those of the requests are that have not ended.

        Raises:
            CoreLost: the core has ended or does not answer.
        """
        if self._lost is not None:
            raise CoreLost(self._lost)
        query = uuid.uuid4().hex
        answer: asyncio.Future[tuple[RequestProgress, ...]] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.send(Inspect(query, tuple(request_ids)))
        try:
            async with asyncio.timeout(INSPECT_S):
                return await answer
        except TimeoutError as error:
            raise CoreLost(f"no answer in {INSPECT_S:g} s") from error
        finally:
            del self._queries[query]

    def drain(self, deadline_s: float) -> None:
        """Let running requests end within `deadline_s` seconds and take no new ones."""
        self.send(Drain(deadline_s))

    def forget(self, identity: bytes) -> None:
        """Abort the requests of another front, whose process has ended."""
        self.send(Forget(identity.hex()))

    def stop(self) -> None:
        """End the core process."""
        self.send(Stop())

    def send(self, message: Message) -> None:
        """Queue one message without waiting (the queue is unbounded), so that a cancelled request can still send its
        abort."""
        if self._socket is not None and not self._socket.closed:
            self._socket.send(pack(message))

    async def _keep_pinging(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self.send(Ping())

    async def _keep_watching(self) -> None:
        stalled = False
        while True:
            self.watch.listen(self._clock())
            if stalled != self.watch.stalled:
                stalled = self.watch.stalled
                log.log(logging.ERROR if stalled else logging.INFO, "core: %s", self.watch.reason or "it goes on")
            await asyncio.sleep(LISTEN_S)

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frame = await self._socket.recv()
            try:
                message = unpack(frame)
            except (ProtocolError, RequestRefused) as error:
                log.error("core: %s", error)
                continue
            self.watch.take(message)
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Outputs):
            for delta in message.deltas:
                self._hand_over(delta.request_id, delta)
        elif isinstance(message, Refused):
            self._hand_over(message.request_id, message)
        elif isinstance(message, Inspected):
            answer = self._queries.get(message.query)
            if answer is not None and not answer.done():
                answer.set_result(message.requests)
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, CoreState):
            self.state = message
            self.on_state(message)
            if message.phase == "Failed":
                self.lose(message.message)

    def _hand_over(self, request_id: str, news: News) -> None:
        queue = self._news.get(request_id)
        if queue is not None:  # else: aborted meanwhile
            queue.put_nowait(news)


class RunningRequest:
    """One request at the core, seen from its front."""

    def __init__(self, send: Callable[[Message], None], request: AddRequest, join: Join = joined) -> None:
        self.news: asyncio.Queue[News] = asyncio.Queue()
        ended = {choice for choice, tokens in enumerate(request.resumed) if tokens is None}
        self.open_choices = set(range(request.params.n)) - ended
        self._send, self._join = send, join
        self._id = request.request_id

    async def deltas(self) -> AsyncIterator[Delta]:
        """The core's deltas, until each choice has ended or was finished here. Those that wait come joined.

        Raises:
            RequestRefused: the core did not take it.
            CoreLost: the core ended.
        """
        while self.open_choices:
            deltas, end = await self._waiting()
            for delta in self._join(deltas):
                if delta.choice in self.open_choices:
                    if delta.finish_reason is not None:
                        self.open_choices.discard(delta.choice)
                    yield delta
            if isinstance(end, CoreLost) and self.open_choices:
                raise end
            if isinstance(end, Refused):
                self.open_choices.clear()
                raise end.to_error()

    async def _waiting(self) -> tuple[list[Delta], Refused | CoreLost | None]:
        """The deltas that wait, or the first of them, and what ends the request behind them."""
        deltas: list[Delta] = []
        news = await self.news.get()
        while isinstance(news, Delta):
            deltas.append(news)
            if self.news.empty() or len(deltas) == MOST_JOINED:
                return deltas, None
            news = self.news.get_nowait()
        return deltas, news

    def finish(self, choice: int) -> None:
        """End a choice whose text is complete, because a stop text was found."""
        if choice in self.open_choices:
            self.open_choices.discard(choice)
            self._send(Finish(self._id, choice))
