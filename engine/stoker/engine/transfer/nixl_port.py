"""Blocks by NIXL: the writer's agent writes into the receiver's landing zone, over RDMA where the hosts have it.

The description of the zone travels over a TCP connection with the deployment's key, as do the words about each write.
The blocks themselves travel as UCX sends them: neither keyed nor encrypted. Whether a peer is alive is known by the
connection, so the slots of a writer that is gone rest for a while.

    writer                                        receiver
    meet the receiver's agent   <- agent -        zone registered with NIXL
    write blocks, wait          =========>        (nothing to do)
    tell                        - write ->        check the grants
                                <- written -
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.engine.transfer.device_memory import Copy, merged
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import HostBlocks, LocalBlocks, MappableBlocks
from stoker.engine.transfer.nixl_agent import NixlAgent, Region
from stoker.engine.transfer.port import ONE_RANK, Cells, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import LATE_S, Cell, SocketLink, SocketPort, Writer
from stoker.engine.transfer.tcp import dialed
from stoker.engine.transfer.ticket import TransferError
from stoker.engine.transfer.wire import Wire
from stoker.engine.transfer.zone_memory import SharedZone


class NixlPort(SocketPort):
    """A port for engines that NIXL reaches."""

    transport = "nixl"

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout,
        local: np.ndarray | HostBlocks | MappableBlocks, zone: SharedZone, *, key: bytes, host: str, port: int = 0,
        shown_host: str | None = None,
    ) -> None:  # fmt: skip
        """`key`: 32 bytes that all engines of the deployment share. `shown_host`: where peers reach this one.

        Raises:
            TransferError: NIXL is not installed, or cannot use the memory.
            OSError: the port is taken.
        """
        self.target = region_of_zone(zone)
        self.source = region_of_blocks(local, self.target.device)
        listener = socket.create_server((host, port))
        self.address = (shown_host or host, listener.getsockname()[1])
        try:
            name = f"{pod_uid}/{epoch}/{self.address[1]}"
            self.agent = NixlAgent(name, [region for region in (self.source, self.target) if region.num_bytes])
        except TransferError:
            listener.close()
            raise
        super().__init__(pod_uid, epoch, fingerprint, layout, local, zone, listener, key)

    def endpoint(self) -> bytes:
        return f"{self.address[0]} {self.address[1]}".encode()

    def dial(self, endpoint: bytes) -> socket.socket:
        return dialed(endpoint)

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> NixlLink:
        if cells.cuts.cells > 1:
            raise TransportRefused([(self.transport, "blocks are not cut for other ranks")])
        wire, (_, num_slots, slot_bytes) = self.introduce(self.connected(peer), cells)
        self.refuse_sizes(wire, slot_bytes, cells)
        try:
            agent, target = self._meet(wire)
        except TransferError as error:
            wire.close()
            raise TransportRefused([(self.transport, str(error))]) from error
        link = NixlLink(wire, self.local, num_slots * cells.joins, self.agent, agent, self.source, target)
        self.keep(link)
        return link

    def _meet(self, wire: Wire) -> tuple[str, Region]:
        """The peer's agent and its zone. Raises TransferError."""
        message = wire.receive()
        if len(message) != 3 or message[0] != "agent":
            raise TransferError("the peer sent no agent")
        _, description, region = message
        return self.agent.meet(description), Region(*region)

    def welcome(self, wire: Wire) -> None:
        wire.send(["agent", self.agent.describe(), list(self.target)])

    def take_blocks(self, wire: Wire, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:  # noqa: ARG002
        return self.taken(writer, cells)

    def end_of(self, writer: Writer) -> None:
        """What a writer had posted may still arrive when its connection has ended."""
        self.zone.detach(writer.peer, LATE_S)

    def release(self) -> None:
        self.agent.close()


class NixlLink(SocketLink):
    """The writer's end; a thread begins each write, waits for it and tells the receiver."""

    transport = "nixl"

    def __init__(
        self, wire: Wire, local: LocalBlocks, num_slots: int, agent: NixlAgent, peer: str, source: Region,
        target: Region,
    ) -> None:  # fmt: skip
        self._agent, self._peer, self._source, self._target = agent, peer, source, target
        self._met = True
        super().__init__(wire, local, num_slots)

    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:
        size = self._local.block_bytes
        source, target = self._source.address, self._target.address
        copies = merged([Copy(source + local * size, target + slot * size, size) for local, slot, _ in moves])
        self._agent.write(self._peer, copies, self._source, self._target, lambda: self.lost)
        wire.send(message)

    def close(self) -> None:
        super().close()
        if self._met:
            self._met = False
            self._agent.part(self._peer)


def region_of_blocks(local: np.ndarray | LocalBlocks, device: int) -> Region:
    """Where this side's blocks are; `device`: whose, if they are a GPU's."""
    if isinstance(local, HostBlocks):
        local = local.blocks_BN
    if isinstance(local, np.ndarray):
        return Region(local.ctypes.data, local.nbytes)
    mappable: MappableBlocks = local  # type: ignore[assignment] # a GPU's
    return Region(mappable.address, mappable.count * mappable.block_bytes, "VRAM", device)


def region_of_zone(zone: SharedZone) -> Region:
    """Where the slots are that peers write."""
    if isinstance(zone, DeviceZone):
        return Region(zone.address, zone.num_slots * zone.slot_bytes, "VRAM", zone.device.index)
    return Region(zone.memory_SN.ctypes.data, zone.memory_SN.nbytes)
