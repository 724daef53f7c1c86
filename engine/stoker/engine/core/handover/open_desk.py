"""Make the desk of a core from its configuration."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3

from stoker.engine.config import EngineConfig, Transport
from stoker.engine.core.block_identity import fingerprint_of, layout_of
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.handover.device_store import DeviceStore
from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.messages import PeerHello
from stoker.engine.core.handover.office import BlockStore, Front, Office
from stoker.engine.core.handover.peer_post import PeerPost, curve_keys
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.key_file import read_key
from stoker.engine.plan import EnginePlan, parse_listen
from stoker.engine.transfer.cuda_memory import CudaMemory, DeviceBlocks
from stoker.engine.transfer.device_memory import DeviceError
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.local_blocks import LocalBlocks
from stoker.engine.transfer.port import PROVIDES, Require
from stoker.engine.transfer.zone_memory import SharedZone
from stoker.pod.config_file import ConfigError
from stoker.pod.tracing import tracer_of

TRANSPORTS: Mapping[str, tuple[Transport, ...]] = {
    "cpu": ("shared-memory", "tcp"),
    "cuda": ("cuda-ipc", "shared-memory", "tcp"),
}
"""Device -> ways to other engines, the preferred one first, where `transfer.transports` names none."""
LOOPBACK_KEY = blake3(b"stoker hand-over within one host").digest()
"""Without a key file only this host's processes can connect."""


def open_desk(
    config: EngineConfig, engine: LLMEngine, plan: EnginePlan, folder: Path, front: Front, clock: Callable[[], float]
) -> Desk | None:
    """Listen for other engines; None where `transfer.listen` is not set.

    Raises:
        ConfigError: the address or the key cannot be used.
    """
    transfer = config.transfer
    if transfer.listen is None:
        return None
    host, port = parse_listen(transfer.listen, keyed=transfer.key_file is not None)
    key = read_key(transfer.key_file) if transfer.key_file is not None else None
    assert isinstance(engine.executor, InProcess), "the plan refuses others"
    runner = engine.executor.runner
    assert isinstance(runner, Runner), "the engine's own"
    facts = fingerprint_of(config, runner, plan.digest)
    layout = layout_of(runner)
    try:
        memory = open_memory(runner, transfer.zone_blocks, layout.block_bytes, plan, clock)
    except DeviceError as error:
        raise ConfigError(f"transfer.zone_blocks {transfer.zone_blocks} cannot be had: {error}") from error
    transports = transfer.transports or TRANSPORTS[plan.device]
    pod_uid = os.environ.get("STOKER_POD_UID") or uuid.uuid4().hex
    try:
        post = PeerPost(host, port, curve_keys(key) if key is not None else None)
        ports = HostPorts(
            facts.digest, layout, memory.local, memory.zone, pod_uid=pod_uid, folder=folder, host=host,
            port=port + 1 if port else 0, key=key or LOOPBACK_KEY, require=transfer.require, transports=transports,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"transfer.listen {transfer.listen!r} cannot be used: {error}") from error
    hello = PeerHello(ports.describe(), facts, host_id())
    office = Office(
        engine, hello, memory.zone, memory.store, ports, post, front, clock,
        tracer=tracer_of("stoker-engine", os.environ, clock=clock),
    )  # fmt: skip
    shown = f"[{host}]" if ":" in host else host
    return Desk(office, endpoint=f"{shown}:{post.port}", unmet=unmet(transfer.require, transports, memory.nvlinks))


class BlockMemory(NamedTuple):
    """Where an engine's blocks and its landing zone are."""

    local: np.ndarray | LocalBlocks
    zone: SharedZone
    store: BlockStore
    nvlinks: int = 0
    """Active NVLinks of the device."""


def open_memory(
    runner: Runner, zone_blocks: int, block_bytes: int, plan: EnginePlan, clock: Callable[[], float]
) -> BlockMemory:
    """The memory of an engine's cache, with a zone beside it. Raises DeviceError."""
    data = runner.cache.data
    cache_BN = data.view(data.shape[0], -1).view(torch.uint8)
    if plan.device == "cpu":
        zone = SharedZone(zone_blocks, block_bytes, clock=clock, named=True)
        return BlockMemory(cache_BN.numpy(), zone, HostStore(zone.memory_SN, cache_BN.numpy()))
    memory = CudaMemory(data.device, host_id())
    device_zone = DeviceZone(zone_blocks, block_bytes, memory, clock=clock)
    zone_SN = memory.tensor(device_zone.address, zone_blocks, block_bytes)
    store = DeviceStore(zone_SN, cache_BN, fused=plan.kernels == "fused")
    return BlockMemory(DeviceBlocks(cache_BN, memory), device_zone, store, memory.nvlinks)


def unmet(require: Require, transports: Sequence[str], nvlinks: int = 0) -> str:
    """Why the demand is not met by these transports; empty if it is."""
    if not any(require in PROVIDES[name] for name in transports):
        return f"transfer.require is {require}; this engine offers {', '.join(transports)}"
    if require == "nvlink" and not nvlinks:
        return "transfer.require is nvlink; this GPU has no active NVLink"
    return ""


def host_id() -> str:
    """The same for all processes of one running system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
