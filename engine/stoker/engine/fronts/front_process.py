"""One front as its parent sees it: the process, its link, the connections that it has.

Made and replaced by `pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.engine.fronts.link import AskFailed, Handler, Link, LinkLost
from stoker.engine.fronts.report import FrontReport
from stoker.engine.http.load_share import LoadShare

CLOSED_BYTES = 4096
COLLECT_S = 2.0
"""Longest wait for a front's report."""
FrontCommand = Callable[[int, bytes, int, int], Sequence[str]]
"""(number, identity, descriptor of the link, descriptor of the connections) -> command line."""


class FrontProcess:
    """One run of a front. A front that is started again is another object with the same number."""

    def __init__(
        self, number: int, identity: bytes, handlers: Mapping[str, Handler], on_state: Callable[[], None]
    ) -> None:
        """`on_state`: called when it tells whether it serves."""
        self.number, self.on_state = number, on_state
        self.identity = identity
        """Of its sockets at the cores."""
        self.joined = False
        """Whether it takes connections."""
        self.ready = False
        """Whether it serves requests."""
        self.connections = 0
        self.share = LoadShare()
        self.report = FrontReport()
        """What it had counted when it was asked last."""
        self.silence_s = 0.0
        self.process: asyncio.subprocess.Process | None = None
        own: Mapping[str, Handler] = {"state": self._take_state, "share": self._take_share}
        mine, self._its = socket.socketpair()
        self._channel, self._its_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self.link = Link(mine, {**handlers, **own})
        self._reading: asyncio.Task[None] | None = None

    async def start(self, command: FrontCommand, environment: Mapping[str, str]) -> None:
        """Start the process. Its ends of the sockets are its only copies, so an end of either side is seen."""
        ends = (self._its.fileno(), self._its_channel.fileno())
        self.process = await asyncio.create_subprocess_exec(
            *command(self.number, self.identity, *ends),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,  # signals of a terminal are for the parent
            env=dict(environment),
        )
        self._its.close()
        self._its_channel.close()
        self._reading = asyncio.create_task(self.link.run(), name=f"link of front {self.number}")
        asyncio.get_running_loop().add_reader(self._channel, self._count_closed)

    async def wait(self) -> int:
        """Wait for the end of the process, then close its sockets. Returns the exit code."""
        assert self.process is not None
        code = await self.process.wait()
        self.close()
        return code

    def pid(self) -> int | str:
        """Its folder in `/proc`; one that does not exist before the start."""
        return self.process.pid if self.process is not None else "none"

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def close(self) -> None:
        """Close this end of the sockets. Connections that it had are closed by its death."""
        self.joined = self.ready = False
        self.connections, self.share = 0, LoadShare()
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel)
        for one in (self._channel, self._its, self._its_channel):
            one.close()
        if self._reading is not None:
            self._reading.cancel()
        self.link.close()

    # Connections.

    @property
    def usable(self) -> bool:
        """Whether it may be offered connections."""
        return self.joined and not self.link.closed

    def offer(self, connection: socket.socket, offer: bytes) -> bool:
        """Hand a connection to the process. False: it has gone, or does not take what it was offered before."""
        try:
            socket.send_fds(self._channel, [offer], [connection.fileno()])
        except OSError:
            return False
        self.connections += 1
        return True

    def _count_closed(self) -> None:
        """Count the connections that the process has closed: one byte for each."""
        try:
            while closed := self._channel.recv(CLOSED_BYTES):
                self.connections = max(self.connections - len(closed), 0)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        asyncio.get_running_loop().remove_reader(self._channel)  # it has gone; `wait` cleans up

    # What it tells.

    async def _take_state(self, state: Mapping[str, Any]) -> None:
        self.joined, self.ready = True, bool(state["ready"])
        self.on_state()

    async def _take_share(self, share: Sequence[Any]) -> None:
        self.share = LoadShare.from_wire(share)

    async def collect(self) -> None:
        """Bring its report up to date. One that does not answer keeps the last."""
        with contextlib.suppress(LinkLost, AskFailed):
            self.report = FrontReport.from_wire(await self.link.ask("report", timeout_s=COLLECT_S))
            self.silence_s = 0.0
