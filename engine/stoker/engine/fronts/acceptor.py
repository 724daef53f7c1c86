"""The port of several fronts: one process accepts, and hands each connection to the front with the fewest.

Fronts that listen with SO_REUSEPORT would get connections by a hash of addresses, whatever they have to do, so that a
router's few connections might all meet one front; the connections in the queue of a front that dies would be reset; and
no process would know how many are open. A listening socket that all share is no better: the process that wakes first
takes all that wait. Accepting costs about 0.1 ms for each connection, not for each request.

Owned by `pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger("stoker.engine")
AT_ONCE = 64
"""Connections accepted in one go, before other events of the loop."""
AGAIN_S = 0.02
"""Wait while no front can take a connection."""
NO_FILES_S = 1.0
"""Wait after an error of `accept`, such as too many open files."""
BACKLOG = 2048
OFFER = struct.Struct("!BI")
"""What comes with a connection: number of the listening socket, and open connections of all fronts with this one."""


class Taker(Protocol):
    """A front, as far as connections go."""

    @property
    def number(self) -> int: ...
    @property
    def usable(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def connections(self) -> int: ...
    def offer(self, connection: socket.socket, offer: bytes) -> bool:
        """Take a connection. False: it cannot now."""
        ...


def order(fronts: Sequence[Taker], last: int) -> list[Taker]:
    """The fronts in the order in which a connection is offered to them.

    Those that serve come first, among them the one with the fewest connections, among equals the next one in turn
    behind `last`. Fronts that do not serve yet still answer probes.
    """

    def rank(front: Taker) -> tuple[bool, int, int]:
        return not front.ready, front.connections, (front.number - last - 1) % len(fronts)

    return sorted((front for front in fronts if front.usable), key=rank)


class Acceptor:
    """Listening sockets of one event loop."""

    def __init__(self, listening: Sequence[socket.socket], fronts: Callable[[], Sequence[Taker]]) -> None:
        """`fronts`: those that run now."""
        self._listening = tuple(listening)
        self._fronts = fronts
        self._held: list[tuple[int, socket.socket]] = []
        """Accepted connections that no front could take."""
        self._last = -1
        self._paused: asyncio.TimerHandle | None = None

    def start(self) -> None:
        for one in self._listening:
            one.listen(BACKLOG)
            one.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        if self._paused is not None:
            self._paused.cancel()
        for one in self._listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        for _, connection in self._held:
            connection.close()
        self._held.clear()

    def _resume(self) -> None:
        self._paused = None
        held, self._held = self._held, []
        for place, connection in held:
            self._give(place, connection)
        if self._held:
            self._pause(AGAIN_S)
            return
        for place, one in enumerate(self._listening):
            asyncio.get_running_loop().add_reader(one, self._accept, place)

    def _pause(self, seconds: float) -> None:
        """Let connections wait in the kernel's queue."""
        loop = asyncio.get_running_loop()
        for one in self._listening:
            loop.remove_reader(one)
        if self._paused is None:
            self._paused = loop.call_later(seconds, self._resume)

    def _accept(self, place: int) -> None:
        for _ in range(AT_ONCE):
            if not any(front.usable for front in self._fronts()):
                self._pause(AGAIN_S)
                return
            try:
                connection, _ = self._listening[place].accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("connections cannot be accepted: %s", error)
                self._pause(NO_FILES_S)
                return
            self._give(place, connection)
            if self._held:
                self._pause(AGAIN_S)
                return

    def _give(self, place: int, connection: socket.socket) -> None:
        """Hand a connection to a front, or hold it."""
        fronts = self._fronts()
        offer = OFFER.pack(place, sum(front.connections for front in fronts) + 1)
        for front in order(fronts, self._last):
            if front.offer(connection, offer):
                self._last = front.number
                with contextlib.suppress(OSError):
                    connection.close()  # this process's copy
                return
        self._held.append((place, connection))
