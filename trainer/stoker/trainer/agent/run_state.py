"""The state of the run, folded from the ranks' events: the source of `/status`, `/metrics` and the termination message.

Only the agent's loop changes it. Times are arguments, so it needs no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.pod.causes import Cause
from stoker.pod.metric_log import finite
from stoker.pod.termination_message import MAX_SAVES, SaveReport
from stoker.trainer.agent.pod_rank import PodRank
from stoker.trainer.agent.startup import Startup
from stoker.trainer.protocol.config import JobIdentity
from stoker.trainer.protocol.hang import Heartbeat
from stoker.trainer.protocol.messages import (
    EndEvent,
    Event,
    Phase,
    PhaseEvent,
    PlanEvent,
    RequestEvent,
    RetentionEvent,
    SaveEvent,
    SourcesEvent,
    StepEvent,
    StragglersEvent,
    ValidationEvent,
)

MAX_REQUESTS = 64
MAX_KNOWN_SAVES = 64
"""Saves in `/status`. An operator that was away for longer lists the older ones."""
MAX_SOURCES = 8
"""Data sources whose progress is in the termination message."""
_SAVE_COUNTS = ("committed", "failed", "verified", "unreadable", "deleted", "not_deleted")
_PROGRESS = (
    *("step", "total_steps", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_s", "eta_s"),
    *("skipped_steps", "loss_scale"),
)
_PLAN = (
    "predicted_step_s",
    "measured_step_s",
    "step_error",
    "predicted_bytes",
    "measured_bytes",
    "memory_error",
)
_SAVE_METRICS = ("tokens", "loss", "learning_rate", "elapsed_s", "bytes", "files", "pieces", "layout")
EARLY: tuple[Phase, ...] = ("Loading", "FirstStep")


@dataclass
class RankState:
    """One rank of this pod."""

    progressed_at: float
    phase: Phase = "Loading"
    message: str = "Starting"
    step: int | None = None
    end: EndEvent | None = None


@dataclass
class Request:
    """A requested save or drain, kept by its id: a repeated call is acted on once."""

    state: str = "Pending"
    folder: str = ""
    detail: str = ""


@dataclass
class NodeState:
    """The last known state of one pod of the gang."""

    node_rank: int
    reachable: bool = False
    phase: str | None = None
    step: int | None = None


@dataclass
class RunState:
    """The run, from this pod's view."""

    job: JobIdentity
    pod: PodRank
    started_at: float
    """Clock of the deadlines, seconds."""
    ranks: dict[int, RankState] = field(init=False)
    last_step: StepEvent | None = None
    last_validation: ValidationEvent | None = None
    start_validation: ValidationEvent | None = None
    """The one before the first step: of the save that is resumed, where a stop had left it."""
    plan: PlanEvent | None = None
    startup: Startup = field(init=False)
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    """Ranks of the whole gang that the others wait for, see `StragglersEvent`; known to the leading rank's pod."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Progress by data source, see `SourceProgress`."""
    saves: dict[str, SaveEvent] = field(default_factory=dict)
    """The last `MAX_KNOWN_SAVES` saves by folder name, oldest first."""
    requests: dict[str, Request] = field(default_factory=dict)
    peers: dict[int, NodeState] = field(default_factory=dict)
    progressed_at: float = 0.0
    """Unix time of the last event of any rank."""
    stopping: str = ""
    """The reason of a requested stop, for people; empty while there is none."""
    cause: Cause | None = None
    _validated: dict[int, float | None] = field(default_factory=dict)
    _save_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SAVE_COUNTS, 0))

    def __post_init__(self) -> None:
        self.ranks = {rank: RankState(progressed_at=self.started_at) for rank in self.pod.ranks}
        self.startup = Startup(len(self.ranks))

    def apply(self, rank: int, event: Event, *, clock: float, unix: float) -> None:
        """Apply one event of a rank."""
        state = self.ranks[rank]
        state.progressed_at, self.progressed_at = clock, unix
        self.startup.note(rank, event, unix)
        match event:
            case PhaseEvent():
                state.phase, state.message = event.phase, event.message
            case StepEvent():
                state.step = event.step
                if rank == self.pod.first_rank:
                    self.last_step = event
            case ValidationEvent():
                self.last_validation = event
                if self.last_step is None:
                    self.start_validation = event
                self._validated[event.step] = finite(event.loss)
                while len(self._validated) > MAX_REQUESTS:
                    self._validated.pop(next(iter(self._validated)))
            case SourcesEvent():
                self.sources = event.sources
            case PlanEvent():
                self.plan = event
            case StragglersEvent():
                self.stragglers = event.stragglers
            case SaveEvent():
                self._add_save(event)
            case RetentionEvent():
                self._save_counts["deleted"] += len(event.deleted)
                self._save_counts["not_deleted"] += len(event.problems)
            case RequestEvent():
                self.requests[event.id] = Request(event.state, event.folder, event.detail)
            case EndEvent():
                state.end, state.phase = event, "Exited"

    @property
    def save_counts(self) -> dict[str, int]:
        """Counts of this attempt: saves by state, read-backs by result, checkpoints deleted and not deleted."""
        return dict(self._save_counts)

    def register_request(self, request_id: str) -> Request | None:
        """Register a request; None when it is new, else its state."""
        if request_id in self.requests:
            return self.requests[request_id]
        self.requests[request_id] = Request()
        while len(self.requests) > MAX_REQUESTS:
            self.requests.pop(next(iter(self.requests)))
        return None

    @property
    def phase(self) -> Phase:
        """The pod's phase: the earliest one while ranks start, then that of its first rank."""
        if self.cause is not None:
            return "Exited"
        for phase in EARLY:
            if any(rank.phase == phase for rank in self.ranks.values()):
                return phase
        return self._first.phase

    @property
    def message(self) -> str:
        if self.stopping:
            return self.stopping
        behind = next((rank for rank in self.ranks.values() if rank.phase == self.phase), self._first)
        return behind.message

    @property
    def step(self) -> int | None:
        return self.last_step.step if self.last_step is not None else None

    @property
    def has_stepped(self) -> bool:
        return any(rank.step is not None for rank in self.ranks.values())

    def heartbeats(self, running: Mapping[int, bool]) -> dict[int, Heartbeat]:
        """The last events of the ranks whose processes run, for the hang detector."""
        return {
            rank: Heartbeat(state.phase, state.progressed_at)
            for rank, state in self.ranks.items()
            if running.get(rank, False)
        }

    @property
    def saves_omitted(self) -> int:
        """Committed saves of this attempt that are older than those in `saves`."""
        return self._save_counts["committed"] - len(self._committed())

    def save_records(self, *, unread: bool | None) -> tuple[SaveReport, ...]:
        """Committed saves for the termination message, which keeps the newest that it has room for.

        `unread` is the value of `verified` where the read-back has not ended.
        """
        return tuple(
            SaveReport(
                id=save.id,
                folder=save.folder,
                step=save.step,
                digest=save.digest,
                verified=unread if save.verified is None else save.verified,
                metrics={name: value for name, value in self._save_metrics(save).items() if value is not None},
            )
            for save in self._committed()
        )

    def last_numbers(self) -> dict[str, Any]:
        """The numbers of the last step for the termination message; they may be newer than the last `/status` read.

        The message is short, so the progress of many data sources is left out. `save_reasons` is by folder.
        """
        sources = {"sources": self.sources} if 0 < len(self.sources) <= MAX_SOURCES else {}
        reasons = {save.folder: save.reason for save in self._committed()[-MAX_SAVES:]}
        numbers = {name: value for name, value in self._progress().items() if value is not None}
        last = {"progressed_at": self.progressed_at, "save_reasons": reasons, "startup": self.startup.status()}
        began = {"start_validation": self._start()} if self.start_validation else {}
        return numbers and {**numbers, **last, **began, **sources}

    def status(self) -> dict[str, Any]:
        """The body of `/status`."""
        return {
            "program": "trainer",
            "pod_uid": self.pod.pod_uid,
            "job_uid": self.job.uid,
            "attempt": self.job.attempt,
            "phase": self.phase,
            "message": self.message,
            **self._progress(),
            "progressed_at": self.progressed_at,
            "start_validation": self._start(),
            "sources": self.sources,
            "plan": {name: getattr(self.plan, name) for name in _PLAN} if self.plan else None,
            "startup": self.startup.status(),
            "stragglers": [
                {**found, "node_rank": found["rank"] // self.pod.ranks_per_node} for found in self.stragglers
            ],
            "saves": [_save_status(save) | self._save_metrics(save) for save in self.saves.values()],
            "saves_omitted": self.saves_omitted,
            "requests": {name: asdict(request) for name, request in self.requests.items()},
            "nodes": [asdict(node) for node in self.nodes()],
            "cause": self.cause.value if self.cause else None,
        }

    def nodes(self) -> list[NodeState]:
        """This pod, and on node 0 also the other pods, by node rank."""
        own = NodeState(self.pod.node_rank, True, self.phase, self.step)
        return sorted([own, *self.peers.values()], key=lambda node: node.node_rank)

    @property
    def _first(self) -> RankState:
        return self.ranks[self.pod.first_rank]

    def _progress(self) -> dict[str, Any]:
        """Values of the last step and validation; None before the first, and for a loss for which JSON has no number.

        Weights that have diverged are found by their validation, before a step ends the run.
        """
        found = {name: getattr(self.last_step, name) if self.last_step else None for name in _PROGRESS}
        return found | {"validation_loss": finite(self.last_validation.loss) if self.last_validation else None}

    def _start(self) -> dict[str, Any] | None:
        return {"step": found.step, "loss": finite(found.loss)} if (found := self.start_validation) else None

    def _save_metrics(self, save: SaveEvent) -> dict[str, Any]:
        """The numbers of a save. `validation_loss` is that of the same step, if it was validated."""
        return {name: getattr(save, name) for name in _SAVE_METRICS} | {
            "validation_loss": self._validated.get(save.step)
        }

    def _committed(self) -> list[SaveEvent]:
        return [save for save in self.saves.values() if save.state == "Committed"]

    def _add_save(self, save: SaveEvent) -> None:
        before = self.saves.get(save.folder)
        for name in _counted(save) - (_counted(before) if before is not None else set()):
            self._save_counts[name] += 1
        self.saves[save.folder] = save
        while len(self.saves) > MAX_KNOWN_SAVES:
            self.saves.pop(next(iter(self.saves)))


def _counted(save: SaveEvent) -> set[str]:
    """Names of the counts that a save in this state belongs to."""
    counts = {"Committed": {"committed"}, "Failed": {"failed"}, "Saving": set[str]()}[save.state]
    return counts | {None: set[str](), True: {"verified"}, False: {"unreadable"}}[save.verified]


def _save_status(save: SaveEvent) -> dict[str, Any]:
    names = ("id", "folder", "step", "digest", "state", "verified", "reason", "detail")
    return {name: getattr(save, name) for name in names}
