"""The channel between a rank and its agent: one Unix socket pair per rank, JSON lines in both directions.

The agent makes the pair, starts `python -m stoker.trainer.rank.main --channel-fd N ...` with one end inherited, and
keeps the other:

    agent_channel, rank_socket = channel_pair()
    child = subprocess.Popen([..., "--channel-fd", str(rank_socket.fileno())], pass_fds=[rank_socket.fileno()])
    rank_socket.close()
    events = agent_channel.receive()          # never blocks; wait with a selector on agent_channel.fileno()
    agent_channel.send(SaveCommand(id="ab12"))

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

Every event counts as progress: a rank that loads for long sends `phase` again with a new message. When the agent's end
closes, the rank exits at once, so no rank outlives its agent. A rank also treats SIGTERM as `stop interrupt`, ignores
SIGINT (the agent handles it), and writes the stacks of all its threads to the file of `--stacks` on SIGUSR1.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from stoker.trainer.errors import ChannelError

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

_EVENTS: dict[str, type[Event]] = {
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
_COMMANDS: dict[str, type[Command]] = {"save": SaveCommand, "stop": StopCommand}
_EVENT_NAMES: dict[type, str] = {kind: name for name, kind in _EVENTS.items()}
_COMMAND_NAMES: dict[type, str] = {kind: name for name, kind in _COMMANDS.items()}
_MAX_LINE_BYTES = 1 << 20


def channel_pair() -> tuple[AgentChannel, socket.socket]:
    """Make a channel: the agent's side, and the socket whose descriptor the rank inherits."""
    agent_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    rank_end.set_inheritable(True)
    return AgentChannel(agent_end), rank_end


class AgentChannel:
    """The agent's side. Not safe for use from several threads at once, except `send`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lines = _Lines()
        self._lock = threading.Lock()
        self.closed = False
        """True once the rank has closed its end (it exited). All earlier events were returned."""

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive(self) -> list[Event]:
        """The events that have arrived; does not block. Raises ChannelError on a foreign line."""
        received: list[Event] = []
        while not self.closed:
            try:
                data = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.closed = not data
            received += [_parse(line, "event", _EVENTS) for line in self._lines.feed(data)]
        return received

    def send(self, command: Command) -> bool:
        """Send a command to the rank; False when it is gone."""
        with self._lock:
            try:
                self._connection.sendall(_line("command", _COMMAND_NAMES[type(command)], command))
            except OSError:
                return False
        return True

    def close(self) -> None:
        self.closed = True
        self._connection.close()


class RankChannel:
    """The rank's side: sends events from any thread, receives commands in a thread of its own.

    With `connection=None` there is no agent, and events are dropped (tests, benchmarks).
    """

    def __init__(self, connection: socket.socket | None, on_orphaned: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._on_orphaned = on_orphaned
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        if connection is not None:
            connection.setblocking(True)
            threading.Thread(target=self._receive, args=(connection,), name="channel", daemon=True).start()

    def send(self, event: Event) -> None:
        """Send an event to the agent. A lost agent raises no error here; the receiving thread calls `on_orphaned`."""
        if self._connection is None:
            return
        line = _line("event", _EVENT_NAMES[type(event)], event)
        with self._lock:
            try:
                self._connection.sendall(line)
            except OSError:
                self._disconnect()

    def phase(self, phase: Phase, message: str = "") -> None:
        self.send(PhaseEvent(phase=phase, message=message))

    def put(self, command: Command) -> None:
        """Queue a command from another source (a POSIX signal)."""
        self._commands.append(command)  # one append: safe in a signal handler too

    def take(self) -> list[Command]:
        """Remove and return the queued commands, oldest first."""
        count = len(self._commands)
        taken, self._commands[:count] = self._commands[:count], []
        return taken

    def close(self) -> None:
        """Close this end. Later events are dropped."""
        with self._lock:
            self._on_orphaned = None
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(OSError):  # the other end may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._connection = None

    def _receive(self, connection: socket.socket) -> None:
        lines = _Lines()
        while True:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            for line in lines.feed(data):
                self._commands.append(_parse(line, "command", _COMMANDS))
        orphaned = self._on_orphaned
        if orphaned is not None:
            orphaned()


class _Lines:
    """Splits a byte stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ChannelError(f"a line is longer than {_MAX_LINE_BYTES} bytes")
        return lines


def _line(key: str, name: str, message: Event | Command) -> bytes:
    return json.dumps({key: name, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


M = TypeVar("M")


def _parse(line: bytes, key: str, kinds: Mapping[str, type[M]]) -> M:
    try:
        fields = json.loads(line)
        return kinds[fields.pop(key)](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChannelError(f"unknown {key} (allowed: {', '.join(sorted(kinds))}): {line[:200]!r}") from error
