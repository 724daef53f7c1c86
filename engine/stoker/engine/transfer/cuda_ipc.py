"""Blocks between GPUs of one host: the writer maps the receiver's landing zone and its copy engines write into it.

The zone's handle travels over a TCP connection with the deployment's key, so the two may be processes of one pod or of
two. A copy into the memory of a dead process goes on without an error: the end of that connection alone tells of its
death, and the writer then unmaps the zone, which gives its memory back.

    writer                                        receiver
    map the zone                <- handle -       one allocation, exported once
    begin copies on a stream    - write ->        check the grants
    wait for the stream         <- written -      (nothing to do)

The grants are checked while the copies run, so that nothing but the stream is waited for at their end. A grant that
ends meanwhile is found when its block is announced.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stoker.engine.transfer.device_cells import DeviceCells
from stoker.engine.transfer.device_memory import Copy, DeviceError, DeviceMemory, Mark
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import MappableBlocks
from stoker.engine.transfer.port import ONE_RANK, Cells, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import LATE_S, Cell, SocketLink, SocketPort, Writer
from stoker.engine.transfer.tcp import dialed
from stoker.engine.transfer.ticket import PeerLost, TransferError
from stoker.engine.transfer.wire import Wire


class CudaIpcPort(SocketPort):
    """A port for engines whose GPUs can write this one's memory."""

    transport = "cuda-ipc"

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, local: MappableBlocks,
        zone: DeviceZone, *, key: bytes, host: str, port: int = 0, shown_host: str | None = None,
    ) -> None:  # fmt: skip
        """`key`: 32 bytes that all engines of the deployment share. `shown_host`: where peers reach this one."""
        listener = socket.create_server((host, port))
        self.address = (shown_host or host, listener.getsockname()[1])
        self.mappable, self.device_zone = local, zone
        super().__init__(pod_uid, epoch, fingerprint, layout, local, zone, listener, key)

    @property
    def device(self) -> DeviceMemory:
        return self.device_zone.device

    def endpoint(self) -> bytes:
        return f"{self.address[0]} {self.address[1]}".encode()

    def dial(self, endpoint: bytes) -> socket.socket:
        return dialed(endpoint)

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> CudaIpcLink:
        wire, (_, num_slots, slot_bytes) = self.introduce(self.connected(peer), cells)
        self.refuse_sizes(wire, slot_bytes, cells)
        cut = cells.cuts.cells > 1
        local = DeviceCells(self.mappable, self.layout, cells) if cut else self.mappable
        try:
            link = CudaIpcLink(wire, local, num_slots * cells.joins, self.device, self._map(wire))
        except TransferError as error:
            wire.close()
            raise TransportRefused([(self.transport, str(error))]) from error
        self.keep(link)
        return link

    def _map(self, wire: Wire) -> int:
        """The address here of the peer's zone. Raises TransferError."""
        message = wire.receive()
        if len(message) != 3 or message[0] != "memory":
            raise TransferError("the peer sent no memory")
        _, host_id, handle = message
        if host_id != self.device.host_id:
            raise TransferError("the peer is on another host")
        return self.device.open(handle)

    def welcome(self, wire: Wire) -> None:
        wire.send(["memory", self.device.host_id, self.device_zone.handle])

    def take_blocks(self, wire: Wire, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:  # noqa: ARG002
        return self.taken(writer, cells)

    def end_of(self, writer: Writer) -> None:
        """The system tears a killed writer's copies down somewhat later than its connections."""
        self.zone.detach(writer.peer, LATE_S)


class CudaIpcLink(SocketLink):
    """The writer's end. Copies begin where they are posted; a thread tells the receiver."""

    transport = "cuda-ipc"

    def __init__(
        self, wire: Wire, local: MappableBlocks | DeviceCells, num_slots: int, device: DeviceMemory, zone_address: int
    ) -> None:
        """`num_slots`: of their cells, where slots are made of several."""
        self._device, self._copies = device, device.queue()
        self._blocks, self._zone = local, zone_address
        self._mapped = True
        super().__init__(wire, local, num_slots)

    def prepare(self, moves: Sequence[Move]) -> Mark:
        """Post the copies of a write; returns their end."""
        if self._lost is not None:
            return FailedMark(PeerLost(self._lost))
        try:
            return self._post(moves)
        except DeviceError as error:
            return FailedMark(error)

    def _post(self, moves: Sequence[Move]) -> Mark:
        blocks, size = self._blocks, self._blocks.block_bytes
        if isinstance(blocks, DeviceCells):
            return self._copies.post([], list(blocks.copies(moves, self._zone)))
        return self._copies.post(
            [Copy(blocks.address + local * size, self._zone + slot * size, size) for local, slot, _ in moves]
        )

    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:  # noqa: ARG002
        wire.send(message)

    def close(self) -> None:
        """Unmap the peer's zone behind the last copy; a dead peer's memory is given back with it."""
        super().close()
        if self._mapped:
            self._mapped = False
            for work in (self._copies.close, lambda: self._device.close(self._zone)):
                with suppress(DeviceError):  # a device that has failed gives its memory back with the process
                    work()


class FailedMark:
    """The end of copies that could not begin."""

    def __init__(self, error: TransferError) -> None:
        self.error = error

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        raise self.error
