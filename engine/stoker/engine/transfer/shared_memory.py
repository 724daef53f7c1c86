"""Blocks between processes of one host: the writer maps the receiver's landing zone and copies into it.

The zone is a memory file without a name; it travels as an open file over the Unix socket, whose folder decides who may
connect. A message about the write follows on the same socket, whose end is how the death of the peer is noticed.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import LocalBlocks
from stoker.engine.transfer.port import ONE_RANK, Cells, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import CONNECT_S, Cell, SocketLink, SocketPort, Writer
from stoker.engine.transfer.ticket import PeerLost
from stoker.engine.transfer.wire import NO_KEY, Wire
from stoker.engine.transfer.zone_memory import SharedZone


class SharedMemoryPort(SocketPort):
    """A port that processes of this host reach through a socket in `folder`."""

    transport = "shared-memory"

    def __init__(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, local: np.ndarray | LocalBlocks,
        zone: SharedZone, folder: Path,
    ) -> None:  # fmt: skip
        """`zone` must be named: its memory is sent to the writers. `folder`: only this user may enter it."""
        if zone.fd is None:
            raise ValueError("zone must be in a memory file (named=True)")
        self.path = folder / f"{epoch}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
        super().__init__(pod_uid, epoch, fingerprint, layout, local, zone, listener, NO_KEY)

    def endpoint(self) -> bytes:
        return os.fsencode(self.path)

    def dial(self, endpoint: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(os.fsdecode(endpoint))
        except OSError:
            sock.close()
            raise
        return sock

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> SharedMemoryLink:
        wire, (_, num_slots, slot_bytes) = self.introduce(self.connected(peer), cells)
        self.refuse_sizes(wire, slot_bytes, cells)
        try:
            descriptor = wire.receive_descriptor()
        except PeerLost as error:
            wire.close()
            raise TransportRefused([(self.transport, str(error))]) from error
        try:
            link = SharedMemoryLink(wire, self.cut_blocks(cells), descriptor, num_slots * cells.joins)
        except (OSError, ValueError) as error:
            wire.close()
            raise TransportRefused([(self.transport, f"the peer's zone cannot be mapped: {error}")]) from error
        finally:
            os.close(descriptor)
        self.keep(link)
        return link

    def welcome(self, wire: Wire) -> None:
        assert self.zone.fd is not None
        wire.send_descriptor(self.zone.fd)

    def take_blocks(self, wire: Wire, writer: Writer, cells: Sequence[Cell]) -> list[Grant]:  # noqa: ARG002
        """Check a write that has happened. What was written into another's slot fails its checksum there."""
        written = []
        for grant, number in cells:
            if self.zone.begin_write(grant, writer.peer, number):
                try:
                    self.zone.fill(grant.slot, number, writer.joins)
                finally:
                    self.zone.end_write(grant.slot, number)
                written.append(grant)
        return written

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)


class SharedMemoryLink(SocketLink):
    transport = "shared-memory"

    def __init__(self, wire: Wire, local: LocalBlocks, descriptor: int, num_slots: int) -> None:
        block_bytes = local.block_bytes
        size = num_slots * block_bytes
        self._map = mmap.mmap(descriptor, max(size, 1))
        self._remote_SN = np.frombuffer(self._map, dtype=np.uint8, count=size).reshape(num_slots, block_bytes)
        self._copying = threading.Lock()
        self._closing = False
        super().__init__(wire, local, num_slots)

    def send_blocks(self, wire: Wire, message: list[Any], moves: Sequence[Move]) -> None:
        with self._copying:
            if self._closing:
                raise PeerLost("the link is closed")
            for move, block_N in zip(moves, self._local.read([move.local for move in moves]), strict=True):
                self._remote_SN[move.remote] = block_N
        wire.send(message)

    def close(self) -> None:
        """Unmap the peer's zone, too; a dead peer's memory is given back with it.

        The connection ends after the last copy: its end tells the peer that its slots are no longer written.
        """
        with self._copying:
            self._closing = True
        super().close()
        self._remote_SN = np.zeros((0, 0), dtype=np.uint8)
        if not self._map.closed:
            self._map.close()
