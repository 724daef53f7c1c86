"""The channel between a rank and its agent: one Unix socket pair per rank, JSON lines in both directions.

The agent makes the pair, starts `python -m stoker.trainer.rank --channel-fd N ...` with one end inherited, and
keeps the other:

    agent_channel, rank_socket = channel_pair()
    child = subprocess.Popen([..., "--channel-fd", str(rank_socket.fileno())], pass_fds=[rank_socket.fileno()])
    rank_socket.close()
    events = agent_channel.receive()          # never blocks; wait with a selector on agent_channel.fileno()
    agent_channel.send(SaveCommand(id="ab12"))

`messages` has the events and commands.

Every event counts as progress: a rank that loads for long sends `phase` again with a new message. When the agent's end
closes, the rank exits at once, so no rank outlives its agent. A rank also treats SIGTERM as `stop interrupt`, ignores
SIGINT (the agent handles it), and writes the stacks of all its threads to the file of `--stacks` on SIGUSR1.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TypeVar

from stoker.trainer.errors import ChannelError
from stoker.trainer.protocol.messages import (
    COMMAND_NAMES,
    COMMANDS,
    EVENT_NAMES,
    EVENTS,
    Command,
    Event,
    Phase,
    PhaseEvent,
)  # fmt: skip

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
            received += [_parse(line, "event", EVENTS) for line in self._lines.feed(data)]
        return received

    def send(self, command: Command) -> bool:
        """Send a command to the rank; False when it is gone."""
        with self._lock:
            try:
                self._connection.sendall(_line("command", COMMAND_NAMES[type(command)], command))
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
        line = _line("event", EVENT_NAMES[type(event)], event)
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
                self._commands.append(_parse(line, "command", COMMANDS))
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
