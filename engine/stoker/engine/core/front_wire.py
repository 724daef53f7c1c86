"""The core's socket: messages of fronts in, messages to fronts out, and which fronts have been silent.

Owned by the core; called by its thread. `messages` has what travels.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from stoker.engine.core.messages import CoreMessage, pack

Waker = int | zmq.Socket[bytes]
"""What ends a wait once it is readable: a file descriptor or a socket."""

FRONT_SILENT_S = 30.0
AWAY_S = 5.0
"""After a pause of the loop this long, the pause does not count as silence of the fronts."""


class FrontWire:
    """One ROUTER socket. A front is named by the hex of its socket identity."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        """`address`: what the socket binds, `ipc://...`."""
        self.address = address
        self._clock = clock
        self._seen_s: dict[str, float] = {}
        """Time of the last message by front."""
        self._listened_s = clock()

    def open(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would lose deltas; a stuck front is forgotten
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(self.address)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def wait(self, timeout_ms: int, *wakers: Waker) -> bool:
        """Wait for a message, or until one of `wakers` is readable. Whether a message has come."""
        if not wakers:
            return bool(self._socket.poll(timeout_ms))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for waker in wakers:
            poller.register(waker, zmq.POLLIN)
        return self._socket in dict(poller.poll(timeout_ms))

    def read(self) -> tuple[str, bytes] | None:
        """One waiting message and its front; None if there is none."""
        try:
            identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        front = identity.hex()
        self._seen_s[front] = self._clock()
        return front, frame

    def send(self, front: str, message: CoreMessage) -> None:
        self._socket.send_multipart([bytes.fromhex(front), pack(message)])

    def broadcast(self, message: CoreMessage) -> None:
        for front in self._seen_s:
            self.send(front, message)

    # Who is there.

    def knows(self, front: str) -> bool:
        return front in self._seen_s

    def forget(self, front: str) -> None:
        del self._seen_s[front]

    def silent(self) -> list[str]:
        """Fronts that have sent nothing for too long."""
        return [front for front, seen_s in self._seen_s.items() if self._listened_s - seen_s > FRONT_SILENT_S]

    def excuse(self) -> None:
        """After a long step or a stop of this process, excuse the fronts: their pings wait to be read."""
        now_s = self._clock()
        away_s, self._listened_s = now_s - self._listened_s, now_s
        if away_s > AWAY_S:
            self._seen_s = {front: seen_s + away_s for front, seen_s in self._seen_s.items()}

    def tell_first(self, message: CoreMessage, timeout_ms: int) -> None:
        """Where no front has come yet, wait for one and send it the message."""
        if not self._seen_s and self._socket.poll(timeout_ms) and (found := self.read()) is not None:
            self.send(found[0], message)
