"""Make the desk of a core from its configuration."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from blake3 import blake3

from stoker.engine.config import EngineConfig
from stoker.engine.core.block_identity import fingerprint_of, layout_of
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.messages import PeerHello
from stoker.engine.core.handover.office import Front, Office
from stoker.engine.core.handover.peer_post import PeerPost, curve_keys
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.key_file import read_key
from stoker.engine.plan import EnginePlan, parse_listen
from stoker.engine.transfer.port import PROVIDES, Require
from stoker.engine.transfer.zone_memory import SharedZone
from stoker.pod.config_file import ConfigError
from stoker.pod.tracing import tracer_of

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
    data = runner.cache.data
    cache_BN = data.view(data.shape[0], -1).view(torch.uint8).numpy()
    facts = fingerprint_of(config, runner, plan.digest)
    layout = layout_of(runner)
    zone = SharedZone(transfer.zone_blocks, layout.block_bytes, clock=clock, named=True)
    try:
        post = PeerPost(host, port, curve_keys(key) if key is not None else None)
        ports = HostPorts(
            facts.digest, layout, cache_BN, zone, pod_uid=os.environ.get("STOKER_POD_UID") or uuid.uuid4().hex,
            folder=folder, host=host, port=port + 1 if port else 0, key=key or LOOPBACK_KEY,
            require=transfer.require, transports=transfer.transports,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"transfer.listen {transfer.listen!r} cannot be used: {error}") from error
    hello = PeerHello(ports.describe(), facts, host_id())
    office = Office(
        engine, hello, zone, HostStore(zone.memory_SN, cache_BN), ports, post, front, clock,
        tracer=tracer_of("stoker-engine", os.environ, clock=clock),
    )  # fmt: skip
    shown = f"[{host}]" if ":" in host else host
    return Desk(office, endpoint=f"{shown}:{post.port}", unmet=unmet(transfer.require, transfer.transports))


def unmet(require: Require, transports: Sequence[str]) -> str:
    """Why the demand is not met by these transports; empty if it is."""
    if any(require in PROVIDES[name] for name in transports):
        return ""
    return f"transfer.require is {require}; this engine offers {', '.join(transports)}"


def host_id() -> str:
    """The same for all processes of one running system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
