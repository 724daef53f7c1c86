"""Ports with small blocks of random bytes, for tests of what travels."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.engine.transfer.cuda_ipc import CudaIpcPort
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.in_process import InProcessPort, Network
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.nixl_port import NixlPort
from stoker.engine.transfer.shared_memory import SharedMemoryPort
from stoker.engine.transfer.tcp import TcpPort
from stoker.engine.transfer.zone_memory import SharedZone
from testing.engine.fake_device import FakeBlocks, FakeDevice

LAYOUT = BlockLayout(first_layer=0, end_layer=2, block_size=4, first_head=0, end_head=2, head_dim=16, dtype="bfloat16")
FINGERPRINT = bytes(range(32))
KEY = bytes(range(32, 64))
WAIT_S = 240.0
"""Longest wait for a condition; a busy machine takes a while."""
Port = InProcessPort | SharedMemoryPort | TcpPort | CudaIpcPort | NixlPort


def random_blocks(count: int, seed: int = 0, layout: BlockLayout = LAYOUT) -> np.ndarray:
    """[count, block_bytes] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, layout.block_bytes), dtype=np.uint8)


class Ports:
    """Makes ports of one transport, and closes them."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport, self.folder, self.network = transport, folder, Network()
        self.made: list[Port] = []
        self.devices: dict[str, FakeDevice] = {}
        """Of ports of `cuda-ipc`, by pod."""

    def make(
        self, pod_uid: str, blocks: np.ndarray, *, epoch: int = 1, slots: int = 4, fingerprint: bytes = FINGERPRINT,
        layout: BlockLayout = LAYOUT, key: bytes = KEY, clock: Callable[[], float] = time.monotonic,
    ) -> Port:  # fmt: skip
        if self.transport == "cuda-ipc":
            return self._on_device(pod_uid, epoch, fingerprint, layout, blocks, slots, key, clock)
        zone = SharedZone(slots, layout.block_bytes, clock=clock, named=self.transport == "shared-memory")
        common = (pod_uid, epoch, fingerprint, layout, blocks, zone)
        port: Port
        if self.transport == "in-process":
            port = InProcessPort(self.network, *common)
        elif self.transport == "tcp":
            port = TcpPort(*common, key=key, host="127.0.0.1")
        elif self.transport == "nixl":
            port = NixlPort(*common, key=key, host="127.0.0.1")
        else:
            (self.folder / pod_uid).mkdir(exist_ok=True)
            port = SharedMemoryPort(*common, self.folder / pod_uid)
        self.made.append(port)
        return port

    def _on_device(
        self, pod_uid: str, epoch: int, fingerprint: bytes, layout: BlockLayout, blocks: np.ndarray, slots: int,
        key: bytes, clock: Callable[[], float],
    ) -> CudaIpcPort:  # fmt: skip
        device = self.devices.setdefault(pod_uid, FakeDevice(self.folder))
        zone = DeviceZone(slots, layout.block_bytes, device, clock=clock)
        local = FakeBlocks(blocks)
        port = CudaIpcPort(pod_uid, epoch, fingerprint, layout, local, zone, key=key, host="127.0.0.1")
        self.made.append(port)
        return port

    def close(self) -> None:
        for port in self.made:
            port.close()


def slots_of(port: Port) -> np.ndarray:
    """[slots, block_bytes] uint8: the memory that is copied from."""
    if isinstance(port, CudaIpcPort):
        zone = port.device_zone
        device = zone.device
        assert isinstance(device, FakeDevice)
        return device.bytes_at(zone.address, zone.num_slots, zone.slot_bytes)
    return port.zone.memory_SN


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, f"waited {limit_s} s for {what}"
        time.sleep(0.002)
