"""The core process: one loop that reads messages of fronts, steps the engine and sends deltas. `messages` is the wire.

The model is loaded in a thread, so that fronts get progress meanwhile. Everything else belongs to the loop's thread.

Run by `main` in its own process. Owns the engine; fronts see messages only.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from stoker.engine.config import EngineConfig
from stoker.engine.core.audit_pace import SHOWN, AuditPace, failure_of
from stoker.engine.core.build import build_engine, warm_up
from stoker.engine.core.deltas import Addressed
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.front_requests import FrontRequests, refusal
from stoker.engine.core.front_wire import FrontWire, Waker
from stoker.engine.core.graph_captures import GraphCaptures
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.handover.office import Front
from stoker.engine.core.handover.open_desk import open_desk
from stoker.engine.core.heartbeats import Heartbeats
from stoker.engine.core.loaded_model import cause_of_loading, facts_of
from stoker.engine.core.messages import (
    PROTOCOL,
    Abort,
    AddRequest,
    CoreMessage,
    CoreState,
    Delta,
    Drain,
    Finish,
    FinishReason,
    Forget,
    Hello,
    Inspect,
    Inspected,
    Message,
    ModelFacts,
    Outputs,
    Phase,
    Ping,
    Stop,
    request_id_in,
    unpack,
)
from stoker.engine.core.startup import Startup, process_age_s
from stoker.engine.core.stats import Stats
from stoker.engine.core.step_pace import QuietLimits
from stoker.engine.errors import ExecutorLost, ProtocolError, RequestRefused
from stoker.engine.plan import EnginePlan
from stoker.pod.causes import Cause, is_explained

log = logging.getLogger("stoker.engine")

HEARTBEAT_S = 1.0
"""Interval of heartbeats and stats."""
HELLO_MS = 3000
"""Longest wait of a failed core for a first front, to send it the cause."""
SPIN_S = 0.001
"""Waits below it are shorter than a poll can be."""
TELL_S = 0.1
"""Shortest time between two reports of changes at the desk."""
DESK_S = 0.002
"""Before the device needs its next step other engines are not served: a push of blocks takes the host that long."""
BUSY_MS = 1
"""Longest wait for a message while blocks are on their way to another engine."""
COMPILING_MS = 1
"""Longest wait for a message while a grammar is being compiled."""
IDLE_MS = 50
"""Longest wait for a message while nothing runs, and so the interval of checks for loading, drains and a lost
parent."""
QUIET = QuietLimits()

Build = Callable[[EngineConfig, Callable[[str], None]], tuple[LLMEngine, EnginePlan]]
RequestMessage = AddRequest | Abort | Finish | Inspect


class Core:
    """The loop. Lives in the thread that calls `serve`."""

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        work_dir: Path,
        *,
        build: Build = build_engine,
        parent_alive: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        quiet: QuietLimits = QUIET,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`address`: what the ROUTER socket binds, `ipc://...`; `work_dir`: an existing folder for files that fronts
        read; `on_loaded`: called once, before the first request is taken."""
        self.on_loaded = on_loaded
        self.config, self.work_dir, self.build = config, work_dir, build
        self.parent_alive, self.clock = parent_alive, clock
        self.startup = Startup(clock, process_age_s())
        self.startup.enter("Planning")
        self.state = CoreState("Loading", "starting")
        self.wire = FrontWire(address, clock)
        self.engine: LLMEngine | None = None
        self.requests: FrontRequests | None = None
        """Set with the engine."""
        self.desk: Desk | None = None
        """The hand-over to and from other engines; None where `transfer.listen` is not set."""
        self.cause: Cause | None = None
        """The cause of the end; once set, the loop ends."""
        self._progress = self.state.message
        self._drain_until_s: float | None = None
        self._ticked_s = clock()
        self._heartbeats = Heartbeats(quiet, self.wire.broadcast)
        self._captures = GraphCaptures(self._heartbeats, clock)
        self._audit_pace = AuditPace(clock())
        self._told_changes, self._told_s = 0, clock()
        """Changes at the desk that fronts know of, and since when."""

    @property
    def address(self) -> str:
        return self.wire.address

    def serve(self) -> Cause:
        """Run the loop to its end and return the cause."""
        self.wire.open()
        loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        loading = loader.submit(self.build, self.config, self._set_progress)
        try:
            while self.cause is None:
                self._turn(loading)
            if self.state.phase == "Failed":
                self.wire.tell_first(self.state, HELLO_MS)
            return self.cause
        finally:
            self._close(loader)
            self.wire.close()

    def _turn(self, loading: Future[tuple[LLMEngine, EnginePlan]]) -> None:
        """One turn of the loop: read messages, then load, step or capture, then regular duties."""
        self._listen(wait=self.engine is None or not (self.engine.has_unfinished or self._captures.follows))
        self._turn_desk()
        if self.engine is not None and self.engine.has_unfinished:
            self._listen_until(self.engine.open_until_s)
        if self.requests is not None:
            self.requests.add_compiled()
        if self.engine is None:
            self._follow_loading(loading)
        else:
            self._work(self.engine)
            self._tell_changes(self.engine)
        self._check_ranks()
        self._follow_drain()
        self._audit_when_due()
        self._tick()

    def _close(self, loader: ThreadPoolExecutor) -> None:
        loader.shutdown(wait=self.engine is not None, cancel_futures=True)
        self._end_everything("abort")
        if self.desk is not None:
            self.desk.close()
        if self.engine is not None:
            self.engine.close()

    # Loading and ending.

    def _set_progress(self, message: str) -> None:
        self.startup.enter(message.partition(" ")[0])
        self._progress = message  # by the loader's thread; sent by the loop's

    def _follow_loading(self, loading: Future[tuple[LLMEngine, EnginePlan]]) -> None:
        if not loading.done():
            if self._progress != self.state.message:
                self._change("Loading", self._progress)
            return
        try:
            self._begin_serving(*loading.result())
        except Exception as error:  # noqa: BLE001 - whatever it is, the fronts must hear it
            self._fail(cause_of_loading(error), error)

    def _begin_serving(self, engine: LLMEngine, plan: EnginePlan) -> None:
        torch.set_num_threads(plan.threads)  # the loader's thread has set only its own
        facts = facts_of(engine, plan, self.work_dir)
        self.startup.enter("Warming")
        self._change("Warming", "the first step", facts)
        warm_up(engine.executor)
        requests = FrontRequests(engine, self._send, self._closed, self.clock)
        front = Front(requests.add, requests.withdraw, self._send)
        self.desk = requests.desk = open_desk(self.config, engine, plan, self.work_dir, front, self.clock)
        engine.before_step = self._heartbeats.before_step
        self.engine, self.requests = engine, requests
        self.on_loaded()
        self.startup.enter("")
        self.wire.broadcast(self._stats(engine))  # before the state, so that no ready front lacks them
        self._change("Serving", "", facts)

    def _fail(self, cause: Cause, error: BaseException) -> None:
        """End every request with an error and the loop with `cause`."""
        defect = not is_explained(cause)
        log.log(logging.ERROR if defect else logging.DEBUG, "the core fails: %s", error, exc_info=error)
        message = f"{cause}: {error}"
        if self.engine is not None:
            self._send_deltas(self.engine.end_everything("error", message))
        self._change("Failed", message, self.state.model)
        self.cause = cause

    def _change(self, phase: Phase, message: str, model: ModelFacts | None = None) -> None:
        self.state = CoreState(phase, message, model or self.state.model, self.startup.seconds)
        self.wire.broadcast(self.state)

    def _drain(self, deadline_s: float) -> None:
        until_s = self.clock() + deadline_s
        self._drain_until_s = until_s if self._drain_until_s is None else min(self._drain_until_s, until_s)
        if self.state.phase in ("Loading", "Warming"):
            self.cause = Cause.COMPLETED  # no request has been accepted yet
        elif self.state.phase == "Serving":
            self._change("Draining", "no new requests")

    def _follow_drain(self) -> None:
        if self.state.phase != "Draining" or self.engine is None:
            return
        assert self._drain_until_s is not None
        if self.clock() >= self._drain_until_s:
            self._end_everything("abort")
        num_handed = 0 if self.desk is None else self.desk.num_open
        if not self.engine.has_unfinished and not num_handed:
            self._change("Drained", "")

    def _end_everything(self, reason: FinishReason) -> None:
        if self.desk is not None:
            self._send_deltas(self.desk.abort_all())
        if self.engine is not None:
            self._send_deltas(self.engine.end_everything(reason))

    # Working.

    def _turn_desk(self) -> None:
        """Serve other engines, where there are any."""
        if self.desk is None:
            return
        try:
            self.desk.turn()
        except ExecutorLost as error:
            self._fail(Cause.RANK_FAILED, error)
        except Exception as error:  # noqa: BLE001 - a defect of the hand-over
            self._fail(Cause.INTERNAL, error)

    def _tell_changes(self, engine: LLMEngine) -> None:
        """Tell the fronts at once what their routers should know of the desk; behind a step, which is not to wait."""
        if self.desk is None or self.cause is not None:
            return
        now_s, changes = self.clock(), self.desk.office.tally.changes
        if changes != self._told_changes and now_s - self._told_s >= TELL_S:
            self._told_changes, self._told_s = changes, now_s
            self.wire.broadcast(self._stats(engine))

    def _stats(self, engine: LLMEngine) -> Stats:
        stats = engine.stats()
        return stats if self.desk is None else replace(stats, transfer=self.desk.stats())

    def _work(self, engine: LLMEngine) -> None:
        """Step, or use idle time; where that began no step, take part in one of other ranks."""
        begun = engine.num_steps
        if engine.has_unfinished:
            self._step(engine)
            self._captures.after_step(engine)
        else:
            self._rest(engine)
        if engine.shared_steps is not None and engine.num_steps == begun and self.cause is None:
            with self._failing():
                engine.shared_steps.take_part()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error in the block ends the core: it is a lost rank or a defect of the engine, never of one request."""
        try:
            yield
        except ExecutorLost as error:
            self._fail(Cause.RANK_FAILED, error)
        except Exception as error:  # noqa: BLE001 - a defect of the engine itself
            self._fail(Cause.INTERNAL, error)

    def _step(self, engine: LLMEngine) -> None:
        began_s = self.clock()
        with self._failing():
            deltas = engine.step()
            if not engine.has_unfinished:  # before the last answers, so that a reader of both sees an idle engine
                self.wire.broadcast(self._stats(engine))
            self._send_deltas(deltas)
            engine.timeline.sent()
            self._heartbeats.after_step(self.clock() - began_s)

    def _rest(self, engine: LLMEngine) -> None:
        """Use idle time: go on with the tiers' transfers, capture graphs."""
        with self._failing():
            engine.rest()
        self._captures.at_rest(engine, awaited=self.desk is not None and self.desk.num_open > 0)

    def _check_ranks(self) -> None:
        """Notice a lost rank while no step is computed."""
        try:
            if self.engine is not None and self.cause is None:
                self.engine.executor.check()
        except ExecutorLost as error:
            self._fail(Cause.RANK_FAILED, error)

    def _audit_when_due(self) -> None:
        """Audit the cache between two steps: repair leaks, end the core on faults."""
        began_s = self.clock()
        if self.engine is None or self.cause is not None:
            return
        if not self._audit_pace.due(began_s, busy=self.engine.has_unfinished):
            return
        audit = self.engine.audit()
        faults = (*audit.faults, *(self.desk.faults() if self.desk is not None else ()))
        self._audit_pace.record(began_s, self.clock())
        if audit.leaked:
            log.error(
                "cache audit: %d blocks were lost and are given back: %s", len(audit.leaked), audit.leaked[:SHOWN]
            )
        if faults:
            self._fail(Cause.INTERNAL, failure_of(faults))

    def _tick(self) -> None:
        """Do once a second: send heartbeat and stats, forget silent fronts, check the parent."""
        now_s = self.clock()
        if now_s - self._ticked_s < HEARTBEAT_S:
            return
        self._ticked_s = now_s
        self._heartbeats.beat(loading=self.engine is None)
        if self.engine is not None:
            self.wire.broadcast(self._stats(self.engine))
        for front in self.wire.silent():
            self._forget(front, "is silent")
        if not self.parent_alive():
            log.error("the parent process is gone")
            self.cause = Cause.INTERNAL

    # Messages.

    def _listen(self, *, wait: bool) -> None:
        """Handle every waiting message; with `wait`, wait a moment for the first."""
        self.wire.excuse()
        if wait and not self._wait():
            return
        while self.cause is None and self._read_one():
            pass

    def _wait(self) -> bool:
        """Wait for a message of a front, for a letter of another engine, or until another rank asks for a step. Whether
        a message of a front has come."""
        timeout_ms = COMPILING_MS if self.requests is not None and self.requests.compiling else IDLE_MS
        wakers: list[Waker] = []
        if self.engine is not None and self.engine.shared_steps is not None:
            wakers.append(self.engine.shared_steps.wake_fd)
        if self.desk is not None:
            timeout_ms = BUSY_MS if self.desk.busy else timeout_ms
            wakers += self.desk.office.post.wakers
        return self.wire.wait(timeout_ms, *wakers)

    def _listen_until(self, until_s: float) -> None:
        """Handle messages, and serve other engines, until a time shortly before the device needs its next step."""
        while self.cause is None and (left_s := until_s - self.clock()) > 0:
            if self._read_one() or left_s <= SPIN_S:
                continue  # the last moment passes in turns of this loop
            if self.desk is None or left_s <= DESK_S:
                self.wire.wait(int(1000 * left_s))  # whole milliseconds
            else:
                self._serve_peers(self.desk, left_s - DESK_S)

    def _serve_peers(self, desk: Desk, most_s: float) -> None:
        """Wait so long for a message or a letter, and see to the letters."""
        timeout_ms = BUSY_MS if desk.busy else math.ceil(1000 * most_s)
        self.wire.wait(timeout_ms, *desk.office.post.wakers)
        self._turn_desk()

    def _read_one(self) -> bool:
        """Handle one waiting message. False: there is none."""
        if (found := self.wire.read()) is None:
            return False
        self._read(*found)
        return True

    def _read(self, front: str, frame: bytes) -> None:
        try:
            message = unpack(frame)
        except ProtocolError as error:
            log.error("front %s: %s", front, error)
        except RequestRefused as refused:
            self._send(front, refusal(request_id_in(frame), refused))
        else:
            self._handle(front, message)

    def _handle(self, front: str, message: Message) -> None:
        match message:
            case Hello(protocol=protocol):
                self._greet(front, protocol)
            case Drain(deadline_s=deadline_s):
                self._drain(deadline_s)
            case Stop():
                self.cause = Cause.COMPLETED
            case Forget(front=other):
                if self.wire.knows(other):
                    self._forget(other, "has ended")
            case Ping():
                pass
            case AddRequest() | Abort() | Finish() | Inspect():
                if self.requests is None:
                    self._answer_early(front, message)
                else:
                    self._handle_request(front, message, self.requests)
            case _:
                log.error("front %s sent %s, which only a core may send", front, type(message).__name__)

    def _answer_early(self, front: str, message: RequestMessage) -> None:
        """Answer before there is an engine, and so a request."""
        if isinstance(message, AddRequest):
            refused = RequestRefused("not_ready", f"the engine is not ready: {self.state.message}")
            self._send(front, refusal(message.request_id, refused))
        elif isinstance(message, Inspect):
            self._send(front, Inspected(message.query, ()))

    def _handle_request(self, front: str, message: RequestMessage, requests: FrontRequests) -> None:
        match message:
            case AddRequest():
                requests.add(front, message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    requests.abort(front, request_id)
            case Finish(request_id=request_id, choice=choice):
                requests.finish_choice(front, request_id, choice)
            case Inspect(query=query, request_ids=request_ids):
                self._send(front, Inspected(query, tuple(requests.progress(front, request_ids))))

    def _greet(self, front: str, protocol: int) -> None:
        if protocol != PROTOCOL:
            wrong = f"this core speaks protocol {PROTOCOL}, the front {protocol}"
            self._send(front, CoreState("Failed", wrong))
            return
        if self.engine is not None:
            self._send(front, self._stats(self.engine))
        self._send(front, self.state)
        self._send(front, self._heartbeats.last)

    def _closed(self) -> RequestRefused | None:
        """Why no new request is taken."""
        if self.state.phase == "Serving":
            return None
        return RequestRefused("draining", "the engine is draining and takes no new requests")

    def _forget(self, front: str, reason: str) -> None:
        log.warning("front %s %s: its requests are aborted", bytes.fromhex(front), reason)
        self.wire.forget(front)
        if self.requests is not None:
            self._send_deltas(self.requests.drop(front))

    def _send_deltas(self, addressed: Iterable[Addressed]) -> None:
        by_front: dict[str, list[Delta]] = defaultdict(list)
        for front, delta in sorted(addressed, key=lambda one: one[1].facts is None):  # first tokens and last ones first
            by_front[front].append(delta)
        for front, deltas in by_front.items():
            self._send(front, Outputs(tuple(deltas)))

    def _send(self, front: str, message: CoreMessage) -> None:
        """Send to a front; one that is another engine gets it by the desk."""
        if self.desk is not None and self.desk.is_peer(front):
            self.desk.deliver(front, message)
        else:
            self.wire.send(front, message)
