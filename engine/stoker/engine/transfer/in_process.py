"""Blocks between ports of one process, for tests and the simulator.

A `Network` carries every write. It delivers at once, or holds writes back until a test delivers, repeats, reorders or
drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.engine.transfer.cells import CellBlocks
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import HostBlocks, LocalBlocks
from stoker.engine.transfer.port import ONE_RANK, Arrival, Cells, LayoutMismatch, Move, PortInfo, TransportRefused
from stoker.engine.transfer.ticket import LinkMeter, PeerLost, ThreadTicket, TransferError
from stoker.engine.transfer.zone_memory import SharedZone


@dataclass
class Write:
    """One write under way, with the bytes as they were when it was posted."""

    source: str
    target: str
    cells: tuple[tuple[Grant, int], ...]
    """Slots, and the cell of each that is written."""
    joins: int
    """Cells of a slot."""
    data: np.ndarray
    """[cells, bytes of a cell] uint8."""
    tag: bytes
    ticket: ThreadTicket


class Network:
    """The ports of one process, by peer."""

    def __init__(self, *, holds: bool = False, mapped: bool = False) -> None:
        """`holds`: keep writes in `posted` until `deliver` is called. `mapped`: writers map the receiver's memory, as
        over `cuda_ipc`: bytes arrive first, whatever the slot's state, and are checked then."""
        self.holds, self.mapped = holds, mapped
        self.posted: list[Write] = []
        self.ports: dict[str, InProcessPort] = {}

    def post(self, write: Write) -> None:
        self.posted.append(write)
        if not self.holds:
            self.deliver(self.posted.pop())

    def deliver(self, write: Write) -> None:
        """Write the blocks into the slots that may be written. A write may be delivered twice."""
        port = self.ports.get(write.target)
        if port is None:
            write.ticket.complete(PeerLost(f"{write.target} is gone"))
            return
        taken = port.take(write)
        missing = len(write.cells) - len(taken)
        refused = TransferError(f"{missing} of {len(write.cells)} blocks were refused") if missing else None
        write.ticket.complete(refused)


class InProcessPort:
    """A port that ports of the same network reach."""

    def __init__(
        self, network: Network, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout,
        local_BN: np.ndarray, zone: SharedZone,
    ) -> None:  # fmt: skip
        self.network, self.zone, self.local_BN, self.layout = network, zone, local_BN, layout
        self.pod_uid, self.epoch, self.fingerprint = pod_uid, epoch, fingerprint
        self._arrivals: list[Arrival] = []
        network.ports[self.describe().peer] = self

    def describe(self) -> PortInfo:
        endpoints = (("in-process", b""),)
        return PortInfo(self.pod_uid, self.epoch, self.fingerprint, self.layout, self.zone.num_slots, endpoints)

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> InProcessLink:
        if peer.fingerprint != self.fingerprint:
            raise LayoutMismatch("fingerprint", self.fingerprint.hex(), peer.fingerprint.hex())
        if peer.layout.block_bytes * cells.cuts.cells != self.layout.block_bytes * cells.joins:
            raise TransportRefused([("in-process", f"the peer's slots have {peer.layout.block_bytes} bytes")])
        if peer.peer not in self.network.ports:
            raise TransportRefused([("in-process", f"{peer.peer} is not in this process")])
        blocks: LocalBlocks = HostBlocks(self.local_BN)
        if cells.cuts.cells > 1:
            blocks = CellBlocks(blocks, self.layout, cells.cuts)
        return InProcessLink(self.network, self.describe().peer, peer.peer, blocks, cells.joins)

    def arrivals(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def take(self, write: Write) -> list[Grant]:
        """Take the blocks that may be written."""
        written = []
        for (grant, cell), data_N in zip(write.cells, write.data, strict=True):
            memory = self.zone.cell_memory(grant.slot, cell, write.joins)
            if self.network.mapped:
                memory[:] = data_N.data
            if self.zone.begin_write(grant, write.source, cell):
                memory[:] = data_N.data
                self.zone.end_write(grant.slot, cell)
                written.append(grant)
        self._arrivals.append(Arrival(write.source, write.tag, tuple(written)))
        return written

    def close(self) -> None:
        self.network.ports.pop(self.describe().peer, None)


class InProcessLink:
    """The way to one port of the network."""

    transport = "in-process"

    def __init__(self, network: Network, source: str, target: str, blocks: LocalBlocks, joins: int) -> None:
        """`blocks`: of this side, or their cells. `joins`: cells of a slot."""
        self.meter = LinkMeter()
        self._network, self._source, self._target = network, source, target
        self._blocks, self._joins = blocks, joins
        self._closed = False

    def write(self, moves: Sequence[Move], tag: bytes) -> ThreadTicket:
        places = [(*divmod(move.remote, self._joins), move.generation) for move in moves]
        cells = tuple((Grant(slot, generation), cell) for slot, cell, generation in places)
        data_BN = np.array(list(self._blocks.read([move.local for move in moves])))
        ticket = ThreadTicket(data_BN.nbytes)
        if self.lost is not None:
            ticket.complete(PeerLost(self.lost))
        else:
            self._network.post(Write(self._source, self._target, cells, self._joins, data_BN, tag, ticket))
            self.meter.record(ticket.bytes, ticket.seconds)
        return ticket

    @property
    def lost(self) -> str | None:
        if self._closed:
            return "the link is closed"
        return None if self._target in self._network.ports else f"{self._target} is gone"

    def close(self) -> None:
        self._closed = True
