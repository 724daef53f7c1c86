"""What a rank and its agent tell each other: events and commands, as lines of JSON.

Rank to agent: one event per line; `event` names the kind. The dataclasses below are its fields. Every rank sends
`phase`, `moment`, `step` and `end`; only global rank 0 sends `validation`, `sources`, `plan`, `stragglers`, `save`,
`retention` and `request`:

    {"event": "phase", "phase": "Loading", "message": "LoadingWeights 43 %", "at": 1760000000.0}
    {"event": "moment", "moment": "started" | "joined"}
    {"event": "step", "step": 7, "total_steps": 60, "tokens": 14336, "loss": 2.5, "learning_rate": 3e-4, ...}
    {"event": "validation", "step": 50, "loss": 2.41, "tokens": 4096}
    {"event": "sources", "sources": [{"name": "web", "samples": 700, "sequences": 52000}]}
    {"event": "plan", "predicted_step_s": 0.76, "measured_step_s": 0.75, "step_error": 0.01, ...}   # after a few steps
    {"event": "stragglers", "stragglers": [{"rank": 3, "busy_s": 0.9, "typical_s": 0.5}]}      # when others are late
    {"event": "save", "folder": "step-00000050.1a2b3c4d", "state": "Saving" | "Committed" | "Failed", ...}
    {"event": "retention", "deleted": ["step-00000010.1a2b3c4d"], "problems": []}
    {"event": "request", "id": "ab12", "state": "Done" | "Failed", "folder": ..., "detail": ...}
    {"event": "end", "cause": "Completed", "step": 60, "detail": ""}   # the last line; the cause gives the exit code

Agent to rank: one command per line; `command` names the kind:

    {"command": "save", "id": "ab12", "reason": "request"}          to global rank 0 only
    {"command": "stop", "mode": "interrupt" | "suspend" | "cancel", "save": true}
                                      to any rank; one is enough, the exchange at the step boundary spreads it
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["Loading", "FirstStep", "Training", "Saving", "Validating", "Finishing", "Exited"]
SaveState = Literal["Saving", "Committed", "Failed"]
SaveReason = Literal["interval", "minutes", "request", "interrupt", "final"]
StopMode = Literal["interrupt", "suspend", "cancel"]
Moment = Literal["started", "joined", "loaded", "stepped"]
"""Moments of a start: the process runs, all ranks are there, weights and data are loaded, the first step is done."""


@dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    phase: Phase
    message: str = ""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class MomentEvent:
    """A moment of a rank's start that no other event shows."""

    moment: Moment
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One finished optimizer step.

    `tokens` counts from the start of the run; it and `tokens_per_s` are totals over all ranks.
    """

    step: int
    total_steps: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    """None in a step whose fp16 gradient was too large to be represented."""
    tokens_per_s: float
    step_s: float
    eta_s: float
    skipped_steps: int = 0
    """Steps so far whose update was not applied."""
    loss_scale: float | None = None
    """With fp16: the factor of the loss in the next step."""
    router_balance_loss: float | None = None
    """Only of a model with experts, like the fields that follow; not part of `loss`."""
    router_z_loss: float | None = None
    expert_imbalance: float | None = None
    """Rows of the fullest expert over those of the mean expert, in the layer where that is most."""
    expert_tokens: tuple[int, ...] | None = None
    """Rows of each expert in this step, summed over layers."""
    compile_s: float | None = None
    """Only of the first step of a rank: time in which its kernels were compiled since its start."""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    step: int
    loss: float
    tokens: int
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class SourceProgress:
    """What a run has trained of one data source."""

    name: str
    samples: int
    """Sequences trained so far, over all epochs."""
    sequences: int
    """Of one epoch."""


@dataclass(frozen=True, kw_only=True)
class SourcesEvent:
    """Progress by data source, as plain values of `SourceProgress`."""

    sources: list[dict[str, Any]]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class PlanEvent:
    """The plan of the run against its first steps; what is not known is None. Errors are relative to the measured."""

    predicted_step_s: float | None
    measured_step_s: float
    step_error: float | None
    predicted_bytes: float
    """Memory of the leading rank's device."""
    measured_bytes: float | None
    memory_error: float | None
    line: str
    """For a log."""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StragglersEvent:
    """The ranks that the others wait for now, as plain values `rank`, `busy_s`, `typical_s`; sent when they change."""

    stragglers: list[dict[str, Any]]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """The state of one save; sent again at each change. `verified` stays None until the read-back has ended."""

    id: str
    """Id of the first request that this save answers, else the folder's name."""
    folder: str
    step: int
    tokens: int
    loss: float | None
    state: SaveState
    reason: SaveReason
    learning_rate: float | None = None
    elapsed_s: float | None = None
    """Time in steps since the start of the run, over all attempts."""
    digest: str = ""
    bytes: int = 0
    files: int = 0
    pieces: int = 0
    verified: bool | None = None
    detail: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RetentionEvent:
    """Old checkpoints that a run without an operator deleted.

    Deletions in `problems` are tried again after the next save.
    """

    deleted: list[str]
    problems: list[str]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RequestEvent:
    """The answer to one `SaveCommand`; several requests may share one folder."""

    id: str
    state: Literal["Done", "Failed"]
    folder: str = ""
    detail: str = ""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class EndEvent:
    """The end of a rank; `cause` is a value of `stoker.pod.causes.Cause`."""

    cause: str
    step: int | None = None
    detail: str = ""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class SaveCommand:
    id: str
    reason: SaveReason = "request"


@dataclass(frozen=True, kw_only=True)
class StopCommand:
    mode: StopMode
    save: bool = True
    """Save before the exit. The agent kills a rank that does not finish the save in time."""


Event = (
    PhaseEvent
    | MomentEvent
    | StepEvent
    | ValidationEvent
    | SourcesEvent
    | PlanEvent
    | StragglersEvent
    | SaveEvent
    | RetentionEvent
    | RequestEvent
    | EndEvent
)
Command = SaveCommand | StopCommand

EVENTS: dict[str, type[Event]] = {
    "phase": PhaseEvent,
    "moment": MomentEvent,
    "step": StepEvent,
    "validation": ValidationEvent,
    "sources": SourcesEvent,
    "plan": PlanEvent,
    "stragglers": StragglersEvent,
    "save": SaveEvent,
    "retention": RetentionEvent,
    "request": RequestEvent,
    "end": EndEvent,
}
COMMANDS: dict[str, type[Command]] = {"save": SaveCommand, "stop": StopCommand}
EVENT_NAMES: dict[type, str] = {kind: name for name, kind in EVENTS.items()}
COMMAND_NAMES: dict[type, str] = {kind: name for name, kind in COMMANDS.items()}
