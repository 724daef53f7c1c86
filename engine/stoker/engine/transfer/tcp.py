"""Blocks over TCP: from the sender's cache into the receiver's landing zone, without a copy in between.

Works between any two engines, and is what is left where nothing faster connects them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import LocalBlocks
from stoker.engine.transfer.port import ONE_RANK, Cells, Move, PortInfo
from stoker.engine.transfer.socket_port import CONNECT_S, Cell, SocketLink, SocketPort, Writer
from stoker.engine.transfer.wire import NO_KEY, Wire
from stoker.engine.transfer.zone_memory import SharedZone

BUFFER_BYTES = 4 << 20
"""Of each socket; the kernel may allow less."""


class TcpPort(SocketPort):
    """A port that peers reach by TCP, with the deployment's key."""

    transport = "tcp"

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, local: np.ndarray | LocalBlocks,
        zone: SharedZone, *, key: bytes, host: str, port: int = 0, shown_host: str | None = None,
    ) -> None:  # fmt: skip
        """`key`: 32 bytes that all engines of the deployment share. `shown_host`: where peers reach this one."""
        if len(key) != 32 or key == NO_KEY:
            raise ValueError("key must be 32 secret bytes")
        listener = socket.create_server((host, port))
        self.address = (shown_host or host, listener.getsockname()[1])
        super().__init__(pod_uid, epoch, fingerprint, layout, local, zone, listener, key)

    def endpoint(self) -> bytes:
        return f"{self.address[0]} {self.address[1]}".encode()

    def dial(self, endpoint: bytes) -> socket.socket:
        sock = dialed(endpoint)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        return sock

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> TcpLink:
        wire, (_, num_slots, slot_bytes) = self.introduce(self.connected(peer), cells)
        self.refuse_sizes(wire, slot_bytes, cells)
        link = TcpLink(wire, self.cut_blocks(cells), num_slots * cells.joins)
        self.keep(link)
        return link

    def welcome(self, wire: Wire) -> None:
        """Nothing more is needed."""

    def take_blocks(self, wire: Wire, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:
        """Read each block into its slot; the bytes of a refused one are read and dropped."""
        written = []
        for grant, number in cells:
            if not self.zone.begin_write(grant, writer.peer, number):
                wire.receive_into(memoryview(bytearray(self.layout.block_bytes // writer.joins)))
                continue
            try:
                wire.receive_into(self.zone.cell_memory(grant.slot, number, writer.joins))
                self.zone.fill(grant.slot, number, writer.joins)
            finally:
                self.zone.end_write(grant.slot, number)
            written.append(grant)
        return written


def dialed(endpoint: bytes) -> socket.socket:
    """A connection to `host port`, for small messages without delay."""
    host, _, port = endpoint.decode().rpartition(" ")
    sock = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class TcpLink(SocketLink):
    transport = "tcp"

    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:
        blocks = self._local.read([move.local for move in moves])
        wire.send(message, (block_N.data for block_N in blocks))
