"""The ports of a rank, the fastest first: GPU to GPU or shared memory for peers of this host, TCP for all others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from stoker.engine.config import Transport
from stoker.engine.transfer.cuda_ipc import CudaIpcPort
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.joint_link import JointLink, pairs_of
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.local_blocks import HostBlocks, LocalBlocks, MappableBlocks
from stoker.engine.transfer.nixl_port import NixlPort
from stoker.engine.transfer.part_plan import WHOLE, PartPlan
from stoker.engine.transfer.port import ONE_RANK, BlockPort, Cells, Link, PortInfo, Require, connect_best
from stoker.engine.transfer.shared_memory import SharedMemoryPort
from stoker.engine.transfer.tcp import TcpPort
from stoker.engine.transfer.ticket import TransferError
from stoker.engine.transfer.zone_memory import SharedZone

WILDCARDS = ("0.0.0.0", "::")


class _Tcp(TypedDict):
    """How a port over TCP is reached."""

    key: bytes
    host: str
    shown_host: str


class HostPorts:
    """One port for each transport, over one landing zone. As a `LocalPort` it is an engine of one rank."""

    def __init__(
        self, fingerprint: bytes, layout: BlockLayout, local: np.ndarray | LocalBlocks, zone: SharedZone, *,
        pod_uid: str, folder: Path, host: str, port: int, key: bytes, require: Require, transports: Sequence[Transport],
        epoch: int | None = None,
    ) -> None:  # fmt: skip
        """`folder`: of the socket for peers of this host. `port`: of TCP; links between GPUs use the one behind it,
        NIXL the one of both that is free. `epoch`: common to the ranks of an engine; default: the present time.

        Raises:
            OSError: a port is taken, or NIXL cannot be used.
        """
        self.require, self.zone = require, zone
        common = (pod_uid, epoch or new_epoch(), fingerprint, layout)
        tcp: _Tcp = {"key": key, "host": host, "shown_host": own_address() if host in WILDCARDS else host}
        self._ports: list[SharedMemoryPort | TcpPort | CudaIpcPort | NixlPort] = []
        behind = port + 1 if port else 0
        try:
            for name in transports:
                if name == "tcp":
                    self._ports.append(TcpPort(*common, local, zone, port=port, **tcp))
                elif name == "shared-memory":
                    self._ports.append(SharedMemoryPort(*common, local, zone, folder))
                elif name == "nixl":
                    own_port = port if "cuda-ipc" in transports else behind
                    blocks = cast("np.ndarray | HostBlocks | MappableBlocks", local)
                    self._ports.append(NixlPort(*common, blocks, zone, port=own_port, **tcp))
                else:
                    device_blocks, device_zone = cast(MappableBlocks, local), cast(DeviceZone, zone)
                    self._ports.append(CudaIpcPort(*common, device_blocks, device_zone, port=behind, **tcp))
        except (OSError, TransferError) as error:
            self._close_ports()
            raise error if isinstance(error, OSError) else OSError(f"{name}: {error}") from error
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._ended = {port.transport: (0, 0.0) for port in self._ports}
        """Bytes and seconds of the links that have ended, by transport."""
        self._dials = ThreadPoolExecutor(1, thread_name_prefix="links")

    @property
    def info(self) -> PortInfo:
        endpoints = (one for port in self._ports for one in port.describe().endpoints)
        return replace(self._ports[0].describe(), endpoints=tuple(endpoints))

    def describe(self) -> tuple[PortInfo]:
        return (self.info,)

    def connect(self, peer: Sequence[PortInfo], plan: PartPlan) -> Future[Link]:
        return self._dials.submit(self._connect_all, peer, plan)

    def _connect_all(self, peer: Sequence[PortInfo], plan: PartPlan) -> Link:
        if plan == WHOLE:
            return self._connect(peer[0], ONE_RANK)
        links: dict[tuple[int, int], Link] = {}
        try:
            for pair in pairs_of(plan):
                links[pair] = self._connect(peer[pair[1]], plan.cells(pair))
        except TransferError:
            for link in links.values():
                link.close()
            raise
        return JointLink(plan, links)

    def connect_rank(self, peer: PortInfo, cells: Cells) -> Future[Link]:
        """Open the best link to one rank of a peer. Its moves name cells."""
        return self._dials.submit(self._connect, peer, cells)

    def _connect(self, peer: PortInfo, cells: Cells) -> Link:
        ports: list[tuple[str, BlockPort]] = [(port.transport, port) for port in self._ports]
        link = connect_best(ports, peer, self.require, cells)
        with self._lock:
            ended = [one for one in self._links if one.lost is not None]
            self._ended = self._carried(ended)
            self._links = [one for one in self._links if one not in ended] + [link]
        return link

    def lost_peers(self) -> Sequence[str]:
        for port in self._ports:
            port.arrivals()  # writers announce their blocks by message
        return [peer for port in self._ports for peer in port.lost_peers()]

    def meters(self) -> dict[str, tuple[int, float]]:
        """Bytes and seconds of what was sent, by transport."""
        with self._lock:
            return self._carried(self._links)

    def _carried(self, links: Sequence[Link]) -> dict[str, tuple[int, float]]:
        """What these links have carried, with those that have ended."""
        sums = dict(self._ended)
        for link in links:
            num_bytes, seconds = sums[link.transport]
            sums[link.transport] = num_bytes + link.meter.bytes, seconds + link.meter.seconds
        return sums

    def close(self) -> None:
        self._dials.shutdown(cancel_futures=True)
        self._close_ports()

    def _close_ports(self) -> None:
        """Those first that have registered the memory of the zone, which any port releases."""
        for port in sorted(self._ports, key=lambda one: not isinstance(one, NixlPort)):
            port.close()


def new_epoch() -> int:
    """Grows with each start."""
    return time.time_ns() // 1000


def own_address() -> str:
    """The address of this host that others reach: the pod's. No packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
