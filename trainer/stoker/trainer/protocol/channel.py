"""The line between a rank and its agent: one Unix socket pair per rank, JSON lines in both directions.

The agent makes the pair, starts `python -m stoker.trainer.rank.main --channel-fd N ...` with one end inherited, and keeps the other:

    agent_end, rank_socket = channel_pair()
    child = subprocess.Popen([..., "--channel-fd", str(rank_socket.fileno())], pass_fds=[rank_socket.fileno()])
    rank_socket.close()
    events = agent_end.receive()              # never blocks; wait with a selector on agent_end.fileno()
    agent_end.send(SaveCommand(id="ab12"))

Rank to agent, one object per line, `event` names the kind (the dataclasses below; every rank sends `phase`, `step` and `end`, and only
global rank 0 sends `validation`, `save`, `retention` and `request`):

    {"event": "phase", "phase": "Loading", "message": "LoadingWeights 43 %", "at": 1760000000.0}
    {"event": "step", "step": 7, "total_steps": 60, "tokens": 14336, "loss": 2.5, "learning_rate": 3e-4, "grad_norm": 0.9, "tokens_per_s": 310.0, ...}
    {"event": "validation", "step": 50, "loss": 2.41, "tokens": 4096}
    {"event": "save", "folder": "step-00000050.1a2b3c4d", "state": "Saving" | "Committed" | "Failed", "verified": null | true | false, ...}
    {"event": "retention", "deleted": ["step-00000010.1a2b3c4d"], "problems": []}
    {"event": "request", "id": "ab12", "state": "Done" | "Failed", "folder": ..., "detail": ...}
    {"event": "end", "cause": "Completed", "step": 60, "detail": ""}        # last line, then the rank exits with EXIT_CODES[cause]

Agent to rank, `command` names the kind:

    {"command": "save", "id": "ab12", "reason": "request"}          to global rank 0 only
    {"command": "stop", "mode": "interrupt" | "suspend" | "cancel", "save": true}    to any rank; one is enough, the step boundary spreads it

Progress is an event of any kind: a rank that is loading sends `phase` again with a new message. When the agent's end closes, the rank
ends at once (no orphans). A rank also takes SIGTERM as `stop interrupt`, ignores SIGINT (the agent decides), and writes the stacks of
all its threads to the file of `--stacks` on SIGUSR1.
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


@dataclass(frozen=True, kw_only=True)
class PhaseEvent:
    phase: Phase
    message: str = ""
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One finished optimizer step. `tokens` counts from the start of the run, over all ranks; `tokens_per_s` is that of all ranks."""

    step: int
    total_steps: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    eta_s: float
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    step: int
    loss: float
    tokens: int
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """The state of one save; sent again at each change. `verified` stays None until the read-back has ended."""

    id: str
    """Id of the first request that it answers, else the folder's name."""
    folder: str
    step: int
    tokens: int
    loss: float | None
    state: SaveState
    reason: SaveReason
    learning_rate: float | None = None
    elapsed_s: float | None = None
    """Of all steps from the start of the run, over its attempts."""
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
    """What a run without an operator deleted of its old saves, and what it could not; it tries again after the next save."""

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
    """Why the rank is about to exit; `cause` is a value of `stoker.pod.causes.Cause`."""

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
    """Save before exit (a rank that finds no time for it is killed by its agent)."""


Event = PhaseEvent | StepEvent | ValidationEvent | SaveEvent | RetentionEvent | RequestEvent | EndEvent
Command = SaveCommand | StopCommand

_EVENTS: dict[str, type[Event]] = {
    "phase": PhaseEvent,
    "step": StepEvent,
    "validation": ValidationEvent,
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
    """The agent's end, and the socket whose descriptor the rank inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.set_inheritable(True)
    return AgentChannel(ours), theirs


class AgentChannel:
    """The agent's side. Not safe for use from several threads at once, except `send`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lines = _Lines()
        self._lock = threading.Lock()
        self.closed = False
        """True once the rank's end has closed (it exited); lines that came before were returned."""

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
        """Hand a command to the rank; False when it is gone."""
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
    """The rank's side: sends events from any thread, collects commands in a thread of its own.

    With `connection=None` there is no agent: events go nowhere (tests, benchmarks).
    """

    def __init__(self, connection: socket.socket | None, on_orphaned: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._on_orphaned = on_orphaned
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        if connection is not None:
            connection.setblocking(True)
            threading.Thread(target=self._listen, args=(connection,), name="channel", daemon=True).start()

    def send(self, event: Event) -> None:
        """Report to the agent. An agent that is gone is no error here: `on_orphaned` deals with it."""
        if self._connection is None:
            return
        line = _line("event", _EVENT_NAMES[type(event)], event)
        with self._lock:
            try:
                self._connection.sendall(line)
            except OSError:
                self._hang_up()

    def phase(self, phase: Phase, message: str = "") -> None:
        self.send(PhaseEvent(phase=phase, message=message))

    def put(self, command: Command) -> None:
        """Queue a command that came another way (a signal)."""
        self._commands.append(command)  # one append: safe in a signal handler too

    def take(self) -> list[Command]:
        """The commands since the last call, oldest first."""
        count = len(self._commands)
        taken, self._commands[:count] = self._commands[:count], []
        return taken

    def close(self) -> None:
        """Say nothing more; the agent sees the end of the stream when the process exits."""
        with self._lock:
            self._on_orphaned = None
            self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is None:
            return
        with contextlib.suppress(OSError):  # the other end may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._connection = None

    def _listen(self, connection: socket.socket) -> None:
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
    """Cuts a byte stream into lines."""

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
        raise ChannelError(f"not one of {key} {sorted(kinds)}: {line[:200]!r}") from error
