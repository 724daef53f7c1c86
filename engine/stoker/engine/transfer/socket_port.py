"""What ports over sockets share: a listener, one thread for each connection, and links with a thread of their own.

A connection is opened by the writer. It introduces itself; the other side compares the fingerprint and answers with its
zone. Then the writer sends writes, one at a time, and gets an answer for each. The end of a connection is the death of
the writer as far as its slots are concerned: a process that is killed closes its sockets, so it is noticed at once.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import Arrival, LayoutMismatch, Move, PortInfo, TransportRefused
from stoker.engine.transfer.ticket import LinkMeter, PeerLost, ThreadTicket, TransferError
from stoker.engine.transfer.wire import Wire
from stoker.engine.transfer.zone_memory import SharedZone

log = logging.getLogger("stoker.engine")

CONNECT_S = 5.0
"""Longest wait for a connection and for its introduction."""
SILENCE_S = 30.0
"""Longest wait for the peer within one transfer."""
MOST_MOVES = 4096
"""Blocks of one write."""


class SocketPort(ABC):
    """A port that listens on a socket. Subclasses decide how the bytes of a write travel."""

    transport: str

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, local_BN: np.ndarray,
        zone: SharedZone, listener: socket.socket, key: bytes,
    ) -> None:  # fmt: skip
        """`local_BN`: this side's blocks, [blocks, block_bytes] uint8. The port owns zone and listener from here on."""
        if zone.slot_bytes != layout.block_bytes or local_BN.shape[1] != layout.block_bytes:
            sizes = f"{zone.slot_bytes} and {local_BN.shape[1]}"
            raise ValueError(f"slots and blocks must have {layout.block_bytes} bytes, got {sizes}")
        self.pod_uid, self.epoch, self.fingerprint, self.layout = pod_uid, epoch, fingerprint, layout
        self.local_BN, self.zone, self.key = local_BN, zone, key
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Peers whose connection has ended."""
        self._listener = listener
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        """Connections of writers."""
        self._links: set[SocketLink] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept, "accepts")

    @abstractmethod
    def endpoint(self) -> bytes: ...

    @abstractmethod
    def welcome(self, wire: Wire) -> None:
        """Send what the writer needs beside the zone's size."""

    @abstractmethod
    def take_blocks(self, wire: Wire, peer: str, grants: Sequence[Grant]) -> list[Grant]:
        """Receive the blocks of a write into the slots that may be written, and return these."""

    def describe(self) -> PortInfo:
        endpoints = ((self.transport, self.endpoint()),)
        return PortInfo(self.pod_uid, self.epoch, self.fingerprint, self.layout, self.zone.num_slots, endpoints)

    def arrivals(self) -> list[Arrival]:
        return drained(self._arrivals)

    def lost_peers(self) -> list[str]:
        """Peers whose connection has ended since the last call; their slots are free."""
        return drained(self.lost)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, sockets, threads = list(self._links), list(self._sockets), list(self._threads)
        for link in links:
            link.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # its thread closes it
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self.zone.close()

    # The side that connects.

    def introduce(self, sock: socket.socket) -> tuple[Wire, list[Any]]:
        """Open the wire as the writer; return the answer. Raises LayoutMismatch or TransportRefused."""
        wire = None
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(sock, self.key, server=False)
            wire.send(["hello", self.pod_uid, self.epoch, self.fingerprint])
            answer = wire.receive()
            sock.settimeout(SILENCE_S)
        except TransferError as error:
            sock.close()
            raise TransportRefused([(self.transport, str(error))]) from error
        if answer[:1] != ["welcome"]:
            wire.close()
            if answer[:1] == ["refused"] and len(answer) == 4:
                raise LayoutMismatch(answer[1], answer[3], answer[2])
            raise TransportRefused([(self.transport, f"the peer answered {answer!r:.200}")])
        return wire, answer

    def connected(self, peer: PortInfo) -> socket.socket:
        """A socket to the peer's endpoint. Raises LayoutMismatch, TransportRefused."""
        if peer.fingerprint != self.fingerprint:
            raise LayoutMismatch("fingerprint", self.fingerprint.hex(), peer.fingerprint.hex())
        endpoint = peer.endpoint(self.transport)
        if endpoint is None:
            raise TransportRefused([(self.transport, "the peer does not offer it")])
        try:
            return self.dial(endpoint)
        except (OSError, ValueError) as error:
            raise TransportRefused([(self.transport, str(error))]) from error

    @abstractmethod
    def dial(self, endpoint: bytes) -> socket.socket: ...

    def keep(self, link: SocketLink) -> None:
        with self._lock:
            self._links.add(link)

    # The side that listens.

    def _start(self, target: Any, name: str, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"{self.transport} {name}", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive() or one.ident is None]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._sockets.add(sock)
            self._start(self._serve, "serves", sock)

    def _serve(self, sock: socket.socket) -> None:
        """Serve one writer until its connection ends, in whatever way."""
        peer = None
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(sock, self.key, server=True)
            peer = self._greet(wire)
            while peer is not None:
                sock.settimeout(None)  # a link may rest for hours; within a write the peer may not
                message = wire.receive()
                sock.settimeout(SILENCE_S)
                self._take(wire, peer, message)
        except (TransferError, OSError, ValueError, TypeError) as error:
            log.info("%s: the connection of %s has ended: %s", self.transport, peer or "a peer", error)
        finally:
            with self._lock:
                self._sockets.discard(sock)
            sock.close()
            if peer is not None:
                self.zone.bury(peer)
                self.lost.put(peer)

    def _greet(self, wire: Wire) -> str | None:
        """Compare the writer's introduction. None: refused."""
        message = wire.receive()
        if len(message) != 4 or message[0] != "hello":
            raise TransferError("the first message must be an introduction")
        _, pod_uid, epoch, fingerprint = message
        if fingerprint != self.fingerprint:
            wire.send(["refused", "fingerprint", self.fingerprint, fingerprint])
            return None
        wire.send(["welcome", self.zone.num_slots, self.zone.slot_bytes])
        self.welcome(wire)
        return f"{pod_uid}/{epoch}"

    def _take(self, wire: Wire, peer: str, message: list[Any]) -> None:
        if len(message) != 3 or message[0] != "write" or len(message[2]) > MOST_MOVES:
            raise TransferError(f"not a write of at most {MOST_MOVES} blocks")
        _, tag, pairs = message
        grants = [Grant(int(slot), int(generation)) for slot, generation in pairs]
        written = self.take_blocks(wire, peer, grants)
        self._arrivals.put(Arrival(peer, tag, tuple((grant.slot, grant.generation) for grant in written)))
        wire.send(["written", len(written)])


class SocketLink(ABC):
    """The writer's end: a queue of writes and the thread that carries them out."""

    transport: str

    def __init__(self, wire: Wire, local_BN: np.ndarray, num_slots: int) -> None:
        self.meter = LinkMeter()
        self._wire, self._local_BN, self._num_slots = wire, local_BN, num_slots
        self._queue: queue.SimpleQueue[tuple[Sequence[Move], bytes, ThreadTicket] | None] = queue.SimpleQueue()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"{self.transport} writes", daemon=True)
        self._thread.start()

    @abstractmethod
    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:
        """Move the bytes and send the message about them."""

    @property
    def lost(self) -> str | None:
        """Why the link can carry nothing more; None while it can."""
        return self._lost or ("the peer has closed the connection" if self._wire.ended else None)

    def write(self, moves: Sequence[Move], tag: bytes) -> ThreadTicket:
        if len(moves) > MOST_MOVES:
            raise ValueError(f"a write has at most {MOST_MOVES} blocks, got {len(moves)}")
        for local, remote, _ in moves:
            if not (0 <= local < len(self._local_BN) and 0 <= remote < self._num_slots):
                most = f"{len(self._local_BN)} blocks and {self._num_slots} slots"
                raise ValueError(f"there are {most}, got block {local} and slot {remote}")
        ticket = ThreadTicket(len(moves) * self._local_BN.shape[1])
        self._queue.put((moves, tag, ticket))
        if self._lost is not None:
            ticket.complete(PeerLost(self._lost))
        return ticket

    def close(self) -> None:
        self._queue.put(None)
        self._wire.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            moves, tag, ticket = item
            if ticket.start():
                ticket.complete(self._write(moves, tag, ticket))
        self._lost = self._lost or "the link is closed"
        for moves_tag_ticket in drained(self._queue):
            if moves_tag_ticket is not None:
                moves_tag_ticket[2].complete(PeerLost(self._lost))

    def _write(self, moves: Sequence[Move], tag: bytes, ticket: ThreadTicket) -> TransferError | None:
        """Carry out one write. Returns why it failed."""
        if self._lost is not None:
            return PeerLost(self._lost)
        try:
            pairs = [[move.remote, move.generation] for move in moves]
            self.send_blocks(self._wire, ["write", tag, pairs], moves)
            answer = self._wire.receive()
        except TransferError as error:
            self._lost = str(error)
            self.meter.failures += 1
            self._wire.close()
            return error if isinstance(error, PeerLost) else PeerLost(self._lost)
        if answer != ["written", len(moves)]:
            self.meter.failures += 1
            return TransferError(f"{answer[-1]} of {len(moves)} blocks were taken; the others were refused")
        self.meter.record(ticket.bytes, ticket.seconds)
        return None


def drained(source: queue.SimpleQueue[Any]) -> list[Any]:
    """Everything that is in the queue now."""
    items = []
    while True:
        try:
            items.append(source.get_nowait())
        except queue.Empty:
            return items
