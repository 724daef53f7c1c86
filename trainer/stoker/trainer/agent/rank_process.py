"""One rank as the agent's child process: start, events from its channel, its log lines, signals, end.

Started, signalled and killed by the agent alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker.pod.causes import Cause
from stoker.trainer.agent import die_with_parent
from stoker.trainer.errors import ChannelError
from stoker.trainer.protocol.channel import AgentChannel, channel_pair
from stoker.trainer.protocol.messages import Command, EndEvent, Event

LAST_LINES = 12
MAX_LINE_BYTES = 64 << 10

OnEvent = Callable[[int, Event], None]
OnLine = Callable[[int, str], None]


class RankProcess:
    """A running rank. `ended` is set once the process is gone and all its events and log lines were delivered."""

    def __init__(self, rank: int, stacks: Path, on_event: OnEvent, on_line: OnLine) -> None:
        self.rank = rank
        self.stacks = stacks
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        self._on_event, self._on_line = on_event, on_line
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._channel: AgentChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        """Start `command --channel-fd N --stacks FILE`.

        Call it in the main thread: the kernel kills the rank when the *thread* that forked it ends.
        """
        self.stacks.parent.mkdir(parents=True, exist_ok=True)
        self.stacks.unlink(missing_ok=True)
        channel, rank_end = channel_pair()
        bound = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]
        with rank_end:
            self._process = await asyncio.create_subprocess_exec(
                *bound,
                *("--channel-fd", str(rank_end.fileno()), "--stacks", str(self.stacks)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                pass_fds=(rank_end.fileno(), *pass_fds),
                start_new_session=True,  # Ctrl-C reaches the agent alone
                limit=MAX_LINE_BYTES,
            )
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive_events)
        self._watch = asyncio.create_task(self._watch_end(self._process))

    @property
    def started(self) -> bool:
        return self._watch is not None

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last_lines)

    def send(self, command: Command) -> bool:
        return self._channel is not None and not self._channel.closed and self._channel.send(command)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process alone. No-op when it is gone."""
        if self._process is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank and all processes that it started."""
        if self._process is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _receive_events(self) -> None:
        assert self._channel is not None
        try:
            for event in self._channel.receive():
                self._on_event(self.rank, event)
        except ChannelError as error:
            self._on_event(self.rank, EndEvent(cause=Cause.INTERNAL.value, detail=f"rank {self.rank}: {error}"))
            self._channel.closed = True
            self.kill()
        if self._channel.closed:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    async def _watch_end(self, process: asyncio.subprocess.Process) -> None:
        output = asyncio.create_task(self._forward_lines(process.stdout))
        self.returncode = await process.wait()
        done, _ = await asyncio.wait({output}, timeout=1.0)  # a grandchild may keep the pipe open
        if not done:
            output.cancel()
        assert self._channel is not None
        if not self._channel.closed:
            self._receive_events()
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        self.ended.set()

    async def _forward_lines(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while line := await _read_line(stream):
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            self._on_line(self.rank, text)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line; a note in place of one that is too long."""
    try:
        return await stream.readline()
    except ValueError:  # readline has dropped the over-long line
        return b"(a line of more than 64 KiB)\n"
