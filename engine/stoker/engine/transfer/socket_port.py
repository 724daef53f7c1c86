"""What ports over sockets share: a listener, one thread for each connection, and links with a thread of their own.

A connection is opened by the writer. It introduces itself; the other side compares the fingerprint and answers with its
zone. Then the writer sends writes, one at a time, and gets an answer for each. The end of a connection is the death of
the writer as far as its slots are concerned: a process that is killed closes its sockets, so it is noticed at once.
Only where the same engine has connected anew meanwhile, the end of an old connection means nothing.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stoker.engine.transfer.cells import CellBlocks
from stoker.engine.transfer.device_memory import Mark
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import LocalBlocks, local_blocks
from stoker.engine.transfer.port import (
    MOST_MOVES,
    ONE_RANK,
    Arrival,
    Cells,
    LayoutMismatch,
    Move,
    PortInfo,
    TransportRefused,
)
from stoker.engine.transfer.ticket import LinkMeter, PeerLost, ThreadTicket, TransferError
from stoker.engine.transfer.wire import Wire
from stoker.engine.transfer.zone_memory import SharedZone

log = logging.getLogger("stoker.engine")

CONNECT_S = 5.0
"""Longest wait for a connection and for its introduction."""
SILENCE_S = 30.0
"""Longest wait for the peer within one transfer."""
REFUSED_S = 0.1
"""Pause after a connection that could not be taken."""
LATE_S = 2.0
"""Time in which copies of a writer that is gone, or its other ranks, may still arrive; a killed process is torn down
within 0.2 s."""


@dataclass(frozen=True)
class Writer:
    """The engine at the other end of a connection."""

    peer: str
    joins: int
    """Cells of which it writes a slot."""
    ranks: int
    """Its ranks, which write by other connections, maybe into the same slots."""
    links: int
    """Its connections to this port."""


class Cell(NamedTuple):
    """A slot, or a part of it, that one rank of the writer fills."""

    grant: Grant
    number: int


class SocketPort(ABC):
    """A port that listens on a socket. Subclasses decide how the bytes of a write travel."""

    transport: str

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, local: np.ndarray | LocalBlocks,
        zone: SharedZone, listener: socket.socket, key: bytes,
    ) -> None:  # fmt: skip
        """`local`: this side's blocks; in main memory, [blocks, block_bytes] uint8. The port owns zone and listener
        from here on."""
        self.local = local_blocks(local)
        if zone.slot_bytes != layout.block_bytes or self.local.block_bytes != layout.block_bytes:
            sizes = f"{zone.slot_bytes} and {self.local.block_bytes}"
            raise ValueError(f"slots and blocks must have {layout.block_bytes} bytes, got {sizes}")
        self.pod_uid, self.epoch, self.fingerprint, self.layout = pod_uid, epoch, fingerprint, layout
        self.zone, self.key = zone, key
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Peers whose connection has ended."""
        self._listener = listener
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        """Connections of writers."""
        self._writers: Counter[str] = Counter()
        """Connections of each peer that is writing."""
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
    def take_blocks(self, wire: Wire, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:
        """Receive the blocks of a write into the slots that may be written, and return their grants."""

    def taken(self, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:
        """Check a write that has happened: the writer maps the zone, or a network card writes into it. What was written
        into another's slot fails its checksum there."""
        return self.zone.checked(writer.peer, cells)

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
            self._closed = True  # before the listener's end, which its thread sees
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
        self.release()
        self.zone.close()

    def release(self) -> None:  # noqa: B027 - most have nothing
        """Release what must go before the memory of the zone does. May be called twice."""

    # The side that connects.

    def introduce(self, sock: socket.socket, cells: Cells = ONE_RANK) -> tuple[Wire, list[Any]]:
        """Open the wire as the writer; return the answer. Raises LayoutMismatch or TransportRefused."""
        wire = None
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(sock, self.key, server=False)
            wire.send(["hello", self.pod_uid, self.epoch, self.fingerprint, cells.joins, cells.ranks, cells.links])
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

    def refuse_sizes(self, wire: Wire, slot_bytes: int, cells: Cells) -> None:
        """Close the wire where a cell there is not one here. Raises TransportRefused."""
        if slot_bytes * cells.cuts.cells != self.layout.block_bytes * cells.joins:
            wire.close()
            reason = f"the peer's slots have {slot_bytes} bytes, blocks here {self.layout.block_bytes}"
            raise TransportRefused([(self.transport, reason)])

    def cut_blocks(self, cells: Cells) -> LocalBlocks:
        """This side's blocks as the link's moves name them."""
        return self.local if cells.cuts.cells == 1 else CellBlocks(self.local, self.layout, cells.cuts)

    @abstractmethod
    def dial(self, endpoint: bytes) -> socket.socket: ...

    def keep(self, link: SocketLink) -> None:
        with self._lock:
            self._links = {one for one in self._links if not one.closed} | {link}

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
            except OSError as error:
                if self._closed:
                    return
                log.warning("%s: no connection can be taken: %s", self.transport, error)  # such as too many open files
                time.sleep(REFUSED_S)
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._sockets.add(sock)
            self._start(self._serve, "serves", sock)

    def _serve(self, sock: socket.socket) -> None:
        """Serve one writer until its connection ends, in whatever way."""
        writer = None
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(sock, self.key, server=True)
            writer = self._greet(wire)
            if writer is not None:
                self._welcome(wire, writer)
            while writer is not None:
                sock.settimeout(None)  # a link may rest for hours; within a write the peer may not
                message = wire.receive()
                sock.settimeout(SILENCE_S)
                self._take(wire, writer, message)
        except (TransferError, OSError, ValueError, TypeError) as error:
            name = writer.peer if writer is not None else "a peer"
            log.info("%s: the connection of %s has ended: %s", self.transport, name, error)
        finally:
            with self._lock:
                self._sockets.discard(sock)
            sock.close()
            if writer is not None and self._was_last(writer):
                self.end_of(writer)
                self.lost.put(writer.peer)

    def end_of(self, writer: Writer) -> None:
        """A writer's connection has ended: it writes no more, but its other ranks may not have ended yet."""
        if writer.ranks > 1:
            self.zone.detach(writer.peer, LATE_S)
        else:
            self.zone.bury(writer.peer)

    def _greet(self, wire: Wire) -> Writer | None:
        """Compare the writer's introduction. None: refused."""
        message = wire.receive()
        if len(message) != 7 or message[0] != "hello":
            raise TransferError("the first message must be an introduction")
        _, pod_uid, epoch, fingerprint, joins, ranks, links = message
        if fingerprint != self.fingerprint:
            wire.send(["refused", "fingerprint", self.fingerprint, fingerprint])
            return None
        layers, heads, tokens = self.layout.num_layers, self.layout.num_heads, self.layout.block_size
        if joins < 1 or layers * heads * tokens % joins:
            raise TransferError(f"slots of {layers} layers, {heads} heads and {tokens} tokens have no {joins} cells")
        return Writer(f"{pod_uid}/{epoch}", int(joins), int(ranks), int(links))

    def _welcome(self, wire: Wire, writer: Writer) -> None:
        """Count the connection before its writer learns that it is open."""
        with self._lock:
            self._writers[writer.peer] += 1
        wire.send(["welcome", self.zone.num_slots, self.zone.slot_bytes])
        self.welcome(wire)

    def _was_last(self, writer: Writer) -> bool:
        """Whether an ended connection was not followed by newer ones of the same engine, which write on."""
        with self._lock:
            self._writers[writer.peer] -= 1
            left = self._writers[writer.peer]
            if not left:
                del self._writers[writer.peer]
        return left < writer.links

    def _take(self, wire: Wire, writer: Writer, message: list[Any]) -> None:
        if len(message) != 3 or message[0] != "write" or len(message[2]) > MOST_MOVES:
            raise TransferError(f"not a write of at most {MOST_MOVES} blocks")
        _, tag, pairs = message
        joins = writer.joins
        cells = [Cell(Grant(place // joins, generation), place % joins) for place, generation in pairs]
        written = self.take_blocks(wire, writer, cells)
        self._arrivals.put(Arrival(writer.peer, tag, tuple(written)))
        wire.send(["written", len(written)])


@dataclass(frozen=True)
class Posted:
    """A write in a link's queue."""

    moves: Sequence[Move]
    tag: bytes
    ticket: ThreadTicket
    posted: Mark | None
    """The end of what `SocketLink.prepare` has begun, which is waited for last."""

    @property
    def message(self) -> list[Any]:
        return ["write", self.tag, [[move.remote, move.generation] for move in self.moves]]


class SocketLink(ABC):
    """The writer's end: a queue of writes and the thread that carries them out."""

    transport: str

    def __init__(self, wire: Wire, local: LocalBlocks, num_slots: int) -> None:
        self.meter = LinkMeter()
        self._wire, self._local, self._num_slots = wire, local, num_slots
        self._queue: queue.SimpleQueue[Posted | None] = queue.SimpleQueue()
        self._lost: str | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._run, name=f"{self.transport} writes", daemon=True)
        self._thread.start()

    def prepare(self, moves: Sequence[Move]) -> Mark | None:  # noqa: ARG002
        """Begin what can be begun by the thread that calls `write`; returns its end."""
        return None

    @abstractmethod
    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:
        """Move the bytes, where `prepare` has not begun that, and send the message about them."""

    @property
    def lost(self) -> str | None:
        """Why the link can carry nothing more; None while it can."""
        return self._lost or ("the peer has closed the connection" if self._wire.ended else None)

    def write(self, moves: Sequence[Move], tag: bytes) -> ThreadTicket:
        if len(moves) > MOST_MOVES:
            raise ValueError(f"a write has at most {MOST_MOVES} blocks, got {len(moves)}")
        for local, remote, _ in moves:
            if not (0 <= local < self._local.count and 0 <= remote < self._num_slots):
                most = f"{self._local.count} blocks and {self._num_slots} slots"
                raise ValueError(f"there are {most}, got block {local} and slot {remote}")
        ticket = ThreadTicket(len(moves) * self._local.block_bytes)
        self._queue.put(Posted(moves, tag, ticket, self.prepare(moves)))
        if self._lost is not None:
            ticket.complete(PeerLost(self._lost))
        return ticket

    def close(self) -> None:
        self.closed = True
        self._queue.put(None)
        self._wire.shut()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if item.ticket.start():
                item.ticket.complete(self._write(item))
        self._end()

    def _end(self) -> None:
        """Refuse what is still queued, and all that follows."""
        self._lost = self._lost or "the link is closed"
        for item in drained(self._queue):
            if item is not None:
                item.ticket.complete(PeerLost(self._lost))

    def _write(self, item: Posted) -> TransferError | None:
        """Carry out one write. Returns why it failed."""
        if self._lost is not None:
            return PeerLost(self._lost)
        try:
            self.send_blocks(self._wire, item.message, item.moves)
            answer = self._wire.receive()
            if item.posted is not None:
                item.posted.wait()
        except TransferError as error:
            return self._fail(error)
        except Exception as error:
            log.exception("%s: a write failed", self.transport)  # a defect, or a device that has failed otherwise
            return self._fail(TransferError(f"{type(error).__name__}: {error}"))
        return self._judge(item, answer)

    def _fail(self, error: TransferError) -> PeerLost:
        """Give the link up."""
        self._lost = str(error)
        self.meter.failures += 1
        self._wire.close()
        return error if isinstance(error, PeerLost) else PeerLost(self._lost)

    def _judge(self, item: Posted, answer: list[Any]) -> TransferError | None:
        """Compare the peer's answer with what was written."""
        if answer != ["written", len(item.moves)]:
            self.meter.failures += 1
            return TransferError(f"{answer[-1]} of {len(item.moves)} blocks were taken; the others were refused")
        self.meter.record(item.ticket.bytes, item.ticket.seconds)
        return None


def drained(source: queue.SimpleQueue[Any]) -> list[Any]:
    """Everything that is in the queue now."""
    items = []
    while True:
        try:
            items.append(source.get_nowait())
        except queue.Empty:
            return items
