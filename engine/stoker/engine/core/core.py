"""The core process: one loop that reads messages of fronts, steps the engine and sends deltas. `messages` is the wire.

The model is loaded in a thread, so that fronts get progress meanwhile. Everything else belongs to the loop's thread.

Run by `main` in its own process. Owns the engine; fronts see messages only.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import zmq

from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_engine, build_in_pod, tokenizer_folder, warm_up
from stoker.engine.core.capture_pace import CapturePace
from stoker.engine.core.compiling import CompilingRequests
from stoker.engine.core.deltas import Addressed
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.handover.office import Front
from stoker.engine.core.handover.open_desk import open_desk
from stoker.engine.core.messages import (
    PROTOCOL,
    Abort,
    AddRequest,
    CoreMessage,
    CoreState,
    Delta,
    Drain,
    Finish,
    Forget,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Message,
    ModelFacts,
    Outputs,
    Phase,
    Ping,
    Refused,
    RequestProgress,
    Stop,
    pack,
    request_id_in,
    unpack,
)
from stoker.engine.core.startup import Startup, process_age_s
from stoker.engine.core.stats import Stats
from stoker.engine.core.step_pace import QuietLimits, StepPace
from stoker.engine.errors import BlockAuditFailed, ExecutorLost, ProtocolError, RequestRefused
from stoker.engine.plan import EnginePlan
from stoker.pod.causes import EXIT_CODES, Cause, CauseRule, cause_of_error, is_explained, mentions
from stoker.pod.config_file import ConfigError

log = logging.getLogger("stoker.engine")

HEARTBEAT_S = 1.0
"""Interval of heartbeats and stats."""
FRONT_SILENT_S = 30.0
AWAY_S = 5.0
"""After a pause of the loop this long, the pause does not count as silence of the fronts."""
AUDIT_IDLE_S, AUDIT_BUSY_S = 10.0, 60.0
"""Interval of cache audits while nothing runs, and while requests run."""
AUDIT_SHARE = 0.005
"""Largest share of the loop's time for audits; a large cache is audited less often."""
HELLO_MS = 3000
"""Longest wait of a failed core for a first front, to send it the cause."""
LOADING_CAUSES = (
    CauseRule(RuntimeError, Cause.OUT_OF_MEMORY, mentions("can't allocate memory")),  # torch, on the CPU
    CauseRule(ConfigError, Cause.CONFIG_INVALID),
    CauseRule(CheckpointCorrupt, Cause.CHECKPOINT_CORRUPT),
    CauseRule(ExecutorLost, Cause.RANK_FAILED),
    CauseRule(torch.OutOfMemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(MemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(ValueError, Cause.MODEL_ERROR),
    CauseRule(OSError, Cause.MODEL_ERROR),
)
"""Causes of a model that could not be loaded; any other error is Internal."""
SPIN_S = 0.001
"""Waits below it are shorter than a poll can be."""
TELL_S = 0.1
"""Shortest time between two reports of changes at the desk."""
BUSY_MS = 1
"""Longest wait for a message while blocks are on their way to another engine."""
COMPILING_MS = 1
"""Longest wait for a message while a grammar is being compiled."""
IDLE_MS = 50
"""Longest wait for a message while nothing runs, and so the interval of checks for loading, drains and a lost
parent."""

SHOWN = 8
"""Most findings of an audit that one message lists."""
QUIET = QuietLimits()

Build = Callable[[EngineConfig, Callable[[str], None]], tuple[LLMEngine, EnginePlan]]


def run_core(
    config: EngineConfig,
    address: str,
    work_dir: str,
    parent: int | None = None,
    quiet: QuietLimits = QUIET,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Serve until `Stop`, a failure or the parent's death, then exit with the code of the cause.

    `address`: what the ROUTER socket binds, `ipc://...`; `work_dir`: an existing folder for files that fronts read;
    `parent`: pid of the process that started this one. It is passed in, because the parent may die while torch is being
    imported, and `getppid()` would then name another process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent drains and stops its core by messages
    parent = os.getppid() if parent is None else parent
    alive = lambda: os.getppid() == parent  # noqa: E731
    build = partial(build_in_pod, environment)
    core = Core(config, address, Path(work_dir), build=build, parent_alive=alive, quiet=quiet)
    cause = core.serve()
    logging.shutdown()
    sys.exit(EXIT_CODES[cause])


class Core:
    """The loop and its sockets. Lives in the thread that calls `serve`."""

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
    ) -> None:
        self.config, self.address, self.work_dir, self.build = config, address, work_dir, build
        self.parent_alive, self.clock = parent_alive, clock
        self.startup = Startup(clock, process_age_s())
        self.startup.enter("Planning")
        self.state = CoreState("Loading", "starting")
        self.engine: LLMEngine | None = None
        self.desk: Desk | None = None
        """The hand-over to and from other engines; None where `transfer.listen` is not set."""
        self.cause: Cause | None = None
        """The cause of the end; once set, the loop ends."""
        self._progress = self.state.message
        self._seen_s: dict[str, float] = {}
        """Time of the last message by front, the hex of its socket identity."""
        self._drain_until_s: float | None = None
        self._beat_s = self._listened_s = self._audit_due_s = clock()
        self._compiling = CompilingRequests(clock)
        self._captures = False
        """Graphs are left to capture in idle time."""
        self.pace = StepPace(quiet)
        self.capture_pace = CapturePace()
        self._promised_s = quiet.first_s
        """The longest silence that the last heartbeat announced."""
        self._told_changes, self._told_s = 0, clock()
        """Changes at the desk that fronts know of, and since when."""
        self._step_tokens = [0, 0]
        """Tokens of the last two steps: with overlap, `engine.step` waits for the first of them."""

    def serve(self) -> Cause:
        """Run the loop to its end and return the cause."""
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would lose deltas; a stuck front is forgotten
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(self.address)
        loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        loading = loader.submit(self.build, self.config, self._set_progress)
        try:
            while self.cause is None:
                self._turn(loading)
            self._inform_late_front()
            return self.cause
        finally:
            self._close(loader)
            self._socket.close()
            context.term()

    def _turn(self, loading: Future[tuple[LLMEngine, EnginePlan]]) -> None:
        """One turn of the loop: read messages, then load, step or capture, then regular duties."""
        self._listen(wait=self.engine is None or not (self.engine.has_unfinished or self._captures))
        if self.desk is not None:
            self._turn_desk(self.desk)
        if self.engine is not None and self.engine.has_unfinished:
            self._listen_until(self.engine.open_until_s)
        self._add_compiled()
        if self.engine is None:
            self._follow_loading(loading)
        elif self.engine.has_unfinished:
            self._step(self.engine)
            self._capture_when_due(self.engine)
        else:
            self._rest(self.engine)
        self._check_ranks()
        self._follow_drain()
        self._audit_when_due()
        self._tick()

    def _capture_when_due(self, engine: LLMEngine) -> None:
        """Capture a graph that steps lack, although requests run; rarely. In idle time more are captured."""
        self._captures = True
        if self.capture_pace.due(self.clock()):
            began_s = self.clock()
            if self._capture(engine, wanted=True):
                self.capture_pace.record(began_s, self.clock())

    def _capture(self, engine: LLMEngine, *, wanted: bool = False) -> bool:
        began_s = self.clock()
        if not wanted:
            self._promise(self.pace.limits.first_s)
        captured = engine.executor.capture_next_graph(wanted=wanted)
        if not wanted:
            self._beat(self.pace.limits.floor_s)  # else a silence soon after it would be excused for as long
        if captured:
            engine.timeline.captured(began_s)
        return captured

    def _close(self, loader: ThreadPoolExecutor) -> None:
        loader.shutdown(wait=self.engine is not None, cancel_futures=True)
        if self.desk is not None:
            self._send_deltas(self.desk.abort_all())
        if self.engine is not None:
            self._send_deltas(self.engine.end_everything("abort"))
        if self.desk is not None:
            self.desk.close()
        if self.engine is not None:
            self.engine.close()

    def _inform_late_front(self) -> None:
        """Send the cause to a front that connects only after the failure."""
        if self.state.phase == "Failed" and not self._seen_s and self._socket.poll(HELLO_MS):
            identity, _ = self._socket.recv_multipart()
            self._send(identity.hex(), self.state)

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
            engine, plan = loading.result()
            torch.set_num_threads(plan.threads)  # the loader's thread has set only its own
            facts = self._facts(engine, plan)
            self.startup.enter("Warming")
            self._change("Warming", "the first step", facts)
            warm_up(engine.executor)
            front = Front(self._add, self._withdraw, self._send)
            self.desk = open_desk(self.config, engine, plan, self.work_dir, front, self.clock)
        except Exception as error:  # noqa: BLE001 - whatever it is, the fronts must hear it
            self._fail(cause_of_error(error, LOADING_CAUSES, Cause.INTERNAL), error)
            return
        engine.before_step = self._before_step
        self.engine, self._captures = engine, True
        self.startup.enter("")
        self._change("Serving", "", facts)

    def _facts(self, engine: LLMEngine, plan: EnginePlan) -> ModelFacts:
        return ModelFacts(
            path=plan.model_path,
            tokenizer_folder=str(tokenizer_folder(plan, self.work_dir)),
            digest=plan.digest or plan.source_digest,
            dtype=str(plan.dtype).removeprefix("torch."),
            vocab_size=engine.limits.vocab_size,
            max_model_len=engine.limits.max_model_len,
            eos_token_ids=engine.limits.eos_token_ids,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
        )

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
        self._broadcast(self.state)

    # Working.

    @property
    def _num_handed(self) -> int:
        """Requests whose prompts other engines compute."""
        return 0 if self.desk is None else self.desk.num_open

    def _turn_desk(self, desk: Desk) -> None:
        """Serve other engines; tell the fronts at once what their routers should know."""
        try:
            desk.turn()
        except Exception as error:  # noqa: BLE001 - a defect of the hand-over
            self._fail(Cause.INTERNAL, error)
            return
        now_s, changes = self.clock(), desk.office.tally.changes
        if changes != self._told_changes and now_s - self._told_s >= TELL_S and self.engine is not None:
            self._told_changes, self._told_s = changes, now_s
            self._broadcast(self._stats(self.engine))

    def _stats(self, engine: LLMEngine) -> Stats:
        stats = engine.stats()
        return stats if self.desk is None else replace(stats, transfer=self.desk.stats())

    def _step(self, engine: LLMEngine) -> None:
        began_s = self.clock()
        try:
            deltas = engine.step()
            if not engine.has_unfinished:
                self._broadcast(
                    self._stats(engine)
                )  # before the last answers, so that a reader of both sees an idle engine
            self._send_deltas(deltas)
            engine.timeline.sent()
            self.pace.record(max(self._step_tokens), self.clock() - began_s)
        except ExecutorLost as error:
            self._fail(Cause.RANK_FAILED, error)
        except Exception as error:  # noqa: BLE001 - a defect of the engine itself, not of one request
            self._fail(Cause.INTERNAL, error)

    def _rest(self, engine: LLMEngine) -> None:
        """Use idle time: go on with the tiers' transfers, capture graphs."""
        try:
            engine.rest()
        except Exception as error:  # noqa: BLE001 - a defect of the engine itself
            self._fail(Cause.INTERNAL, error)
        if self._captures:
            self._captures = self._capture(engine)

    def _check_ranks(self) -> None:
        """Notice a lost rank while no step is computed."""
        try:
            if self.engine is not None and self.cause is None:
                self.engine.executor.check()
        except ExecutorLost as error:
            self._fail(Cause.RANK_FAILED, error)

    def _follow_drain(self) -> None:
        if self.state.phase != "Draining" or self.engine is None:
            return
        assert self._drain_until_s is not None
        if self.clock() >= self._drain_until_s:
            self._send_deltas(self.desk.abort_all() if self.desk is not None else ())
            self._send_deltas(self.engine.end_everything("abort"))
        if not self.engine.has_unfinished and not self._num_handed:
            self._change("Drained", "")

    def _before_step(self, num_tokens: int) -> None:
        """Announce a step that may take longer than fronts expect."""
        self._step_tokens = [self._step_tokens[1], num_tokens]
        self._promise(self.pace.quiet_s(max(self._step_tokens)))

    def _promise(self, quiet_s: float) -> None:
        if quiet_s > self._promised_s:
            self._beat(quiet_s)

    def _beat(self, quiet_s: float) -> None:
        self._promised_s = quiet_s
        self._broadcast(Heartbeat(quiet_s, self.pace.usual_step_s))

    def _audit_when_due(self) -> None:
        """Audit the cache between two steps: repair leaks, end the core on faults."""
        now_s = self.clock()
        if self.engine is None or self.cause is not None:
            return
        if now_s < self._audit_due_s + (AUDIT_BUSY_S - AUDIT_IDLE_S if self.engine.has_unfinished else 0):
            return
        audit = self.engine.audit()
        if self.desk is not None:
            audit = replace(audit, faults=(*audit.faults, *self.desk.faults()))
        self._audit_due_s = now_s + max(AUDIT_IDLE_S, (self.clock() - now_s) / AUDIT_SHARE)
        if audit.leaked:
            log.error(
                "cache audit: %d blocks were lost and are given back: %s", len(audit.leaked), audit.leaked[:SHOWN]
            )
        if audit.faults:
            more = f" and {len(audit.faults) - SHOWN} more" if len(audit.faults) > SHOWN else ""
            self._fail(Cause.INTERNAL, BlockAuditFailed(f"cache audit: {'; '.join(audit.faults[:SHOWN])}{more}"))

    def _tick(self) -> None:
        """Do once a second: send heartbeat and stats, forget silent fronts, check the parent."""
        now_s = self.clock()
        if now_s - self._beat_s < HEARTBEAT_S:
            return
        self._beat_s = now_s
        self._beat(self.pace.limits.first_s if self.engine is None else self.pace.limits.floor_s)
        if self.engine is not None:
            self._broadcast(self._stats(self.engine))
        silent = [front for front, seen_s in self._seen_s.items() if self._listened_s - seen_s > FRONT_SILENT_S]
        for front in silent:
            self._forget(front, "is silent")
        if not self.parent_alive():
            log.error("the parent process is gone")
            self.cause = Cause.INTERNAL

    def _forget(self, front: str, reason: str) -> None:
        log.warning("front %s %s: its requests are aborted", bytes.fromhex(front), reason)
        del self._seen_s[front]
        self._compiling.drop(front)
        self._send_deltas(self.desk.drop(front) if self.desk is not None else ())
        for owner, request_id in list(self.engine.requests) if self.engine is not None else ():
            if owner == front:
                self._send_deltas(self._abort(front, request_id))  # its process may only have been suspended

    def _abort(self, front: str, request_id: str) -> list[Addressed]:
        """Abort a request and return its last deltas."""
        self._compiling.drop(front, request_id)
        if self.desk is not None and (deltas := self.desk.abort(front, request_id)):
            return deltas
        return [] if self.engine is None else self.engine.abort_request(request_id, front=front)

    def _withdraw(self, front: str, request_id: str) -> None:
        """End a request that is computed for another engine."""
        self._compiling.drop(front, request_id)
        if self.engine is not None:
            self.engine.withdraw(request_id, front=front)

    # The wire.

    def _wait(self, timeout_ms: int) -> bool:
        """Wait for a message of a front, or for a letter of another engine. Whether one of a front has come."""
        if self.desk is None or self.desk.office.post.wake_fd is None:
            return bool(self._socket.poll(timeout_ms))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.desk.office.post.wake_fd, zmq.POLLIN)
        return self._socket in dict(poller.poll(BUSY_MS if self.desk.busy else timeout_ms))

    def _listen(self, *, wait: bool) -> None:
        """Handle every waiting message; with `wait`, wait a moment for the first."""
        self._excuse_fronts()
        if wait and not self._wait(COMPILING_MS if self._compiling else IDLE_MS):
            return
        while self.cause is None and self._read_one():
            pass

    def _listen_until(self, until_s: float) -> None:
        """Handle messages until a time shortly before the device needs its next step."""
        while self.cause is None and (left_s := until_s - self.clock()) > 0:
            if not self._read_one() and left_s > SPIN_S:
                self._socket.poll(int(1000 * left_s))  # whole milliseconds; the rest passes in turns of this loop

    def _read_one(self) -> bool:
        """Handle one waiting message. False: there is none."""
        try:
            identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        front = identity.hex()
        self._seen_s[front] = self.clock()
        self._read(front, frame)
        return True

    def _excuse_fronts(self) -> None:
        """After a long step or a stop of this process, excuse the fronts: their pings wait to be read."""
        now_s = self.clock()
        away_s, self._listened_s = now_s - self._listened_s, now_s
        if away_s > AWAY_S:
            self._seen_s = {front: seen_s + away_s for front, seen_s in self._seen_s.items()}

    def _read(self, front: str, frame: bytes) -> None:
        try:
            message = unpack(frame)
        except ProtocolError as error:
            log.error("front %s: %s", front, error)
        except RequestRefused as refused:
            self._refuse(front, request_id_in(frame), refused)
        else:
            self._handle(front, message)

    def _handle(self, front: str, message: Message) -> None:
        match message:
            case Hello(protocol=protocol):
                self._greet(front, protocol)
            case AddRequest():
                self._add(front, message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._abort(front, request_id)
            case Finish(request_id=request_id, choice=choice):
                if self.desk is not None and self.desk.finish_choice(front, request_id, choice):
                    return
                if self.engine is not None:
                    self.engine.finish_choice(request_id, choice, front=front)
            case Inspect(query=query, request_ids=request_ids):
                self._send(front, Inspected(query, tuple(self._progress_of(front, request_ids))))
            case Forget(front=other):
                if other in self._seen_s:
                    self._forget(other, "has ended")
            case Drain(deadline_s=deadline_s):
                self._drain(deadline_s)
            case Stop():
                self.cause = Cause.COMPLETED
            case Ping():
                pass
            case _:
                log.error("front %s sent %s, which only a core may send", front, type(message).__name__)

    def _progress_of(self, front: str, request_ids: Iterable[str]) -> Iterator[RequestProgress]:
        """How far those requests are that have not ended. One whose grammar is being compiled is queued."""
        for request_id in request_ids:
            progress = None if self.engine is None else self.engine.progress(request_id, front=front)
            if progress is None and self.desk is not None:
                progress = self.desk.progress(front, request_id)
            if progress is None and self._compiling.holds(front, request_id):
                progress = RequestProgress(request_id, "QUEUED", 0, 0)
            if progress is not None:
                yield progress

    def _greet(self, front: str, protocol: int) -> None:
        if protocol != PROTOCOL:
            wrong = f"this core speaks protocol {PROTOCOL}, the front {protocol}"
            self._send(front, CoreState("Failed", wrong))
            return
        self._send(front, self.state)
        self._send(front, Heartbeat(self._promised_s, self.pace.usual_step_s))
        if self.engine is not None:
            self._send(front, self._stats(self.engine))

    def _add(self, front: str, request: AddRequest) -> None:
        try:
            if self.engine is None:
                raise RequestRefused("not_ready", f"the engine is not ready: {self.state.message}")
            if self.state.phase != "Serving":
                raise RequestRefused("draining", "the engine is draining and takes no new requests")
            if self._compile_first(self.engine, front, request):
                return
            if request.beginning and self.engine.beginnings is not None:
                self.engine.beginnings.watch(request.beginning, request.prompt_tokens)
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
        except RequestRefused as refused:
            self._refuse(front, request.request_id, refused)

    def _compile_first(self, engine: LLMEngine, front: str, request: AddRequest) -> bool:
        """Begin to compile the request's grammar in a thread. False: it has none, or it is known.

        Raises:
            RequestRefused: too many requests wait for their grammars.
        """
        grammar, grammars = request.params.grammar, engine.grammars
        if grammar is None or grammars is None or grammars.knows(grammar):
            return False
        if len(self._compiling) >= engine.scheduler.max_queued_requests:
            raise RequestRefused("queue_full", f"{len(self._compiling)} requests wait for their grammars")
        self._compiling.add(front, request, grammars.submit(grammar))
        return True

    def _add_compiled(self) -> None:
        """Give the engine those requests whose grammars are compiled, refuse those that failed."""
        for one, refused in self._compiling.ready():
            if refused is not None:
                self._refuse(one.front, one.request.request_id, refused)
            else:
                self._add(one.front, one.request)

    def _drain(self, deadline_s: float) -> None:
        until_s = self.clock() + deadline_s
        self._drain_until_s = until_s if self._drain_until_s is None else min(self._drain_until_s, until_s)
        if self.state.phase in ("Loading", "Warming"):
            self.cause = Cause.COMPLETED  # no request has been accepted yet
        elif self.state.phase == "Serving":
            self._change("Draining", "no new requests")

    def _refuse(self, front: str, request_id: str, refused: RequestRefused) -> None:
        self._send(front, Refused(request_id, refused.kind, str(refused), refused.field))

    def _send_deltas(self, addressed: Iterable[Addressed]) -> None:
        by_front: dict[str, list[Delta]] = defaultdict(list)
        for front, delta in sorted(addressed, key=lambda one: one[1].facts is None):  # first tokens and last ones first
            by_front[front].append(delta)
        for front, deltas in by_front.items():
            self._send(front, Outputs(tuple(deltas)))

    def _broadcast(self, message: CoreMessage) -> None:
        for front in self._seen_s:
            self._send(front, message)

    def _send(self, front: str, message: CoreMessage) -> None:
        if self.desk is not None and self.desk.is_peer(front):
            self.desk.deliver(front, message)
            return
        self._socket.send_multipart([bytes.fromhex(front), pack(message)])
