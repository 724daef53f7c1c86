"""Make the desk of a core from its configuration."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from stoker.engine.config import EngineConfig
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
from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.fingerprint import Fingerprint, digest_of
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import PROVIDES, Require
from stoker.engine.transfer.zone_memory import SharedZone
from stoker.pod.config_file import ConfigError

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
    facts = fingerprint_of(config, plan, runner)
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
    office = Office(engine, hello, zone, HostStore(zone.memory_SN, cache_BN), ports, post, front, clock)
    shown = f"[{host}]" if ":" in host else host
    return Desk(office, endpoint=f"{shown}:{post.port}", unmet=unmet(transfer.require, transfer.transports))


def unmet(require: Require, transports: Sequence[str]) -> str:
    """Why the demand is not met by these transports; empty if it is."""
    if any(require in PROVIDES[name] for name in transports):
        return ""
    return f"transfer.require is {require}; this engine offers {', '.join(transports)}"


def layout_of(runner: Runner) -> BlockLayout:
    """The layout of one block of this rank."""
    _, layers, _, size, heads, dim = runner.cache.data.shape
    dtype = str(runner.cache.data.dtype).removeprefix("torch.")
    first = runner.cache.layers.start
    return BlockLayout(first, first + layers, size, 0, heads, dim, dtype)


def fingerprint_of(config: EngineConfig, plan: EnginePlan, runner: Runner) -> Fingerprint:
    """What this engine's blocks depend on."""
    model = runner.model.config
    return Fingerprint(
        weights=plan.digest or weights_digest(runner.model),
        revision=config.identity.revision,
        model=digest_of({name: str(value) for name, value in asdict(model).items()}),
        kv_dtype=str(runner.cache.data.dtype).removeprefix("torch."),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def weights_digest(model: nn.Module) -> str:
    """A digest of the loaded numbers, for weights that come without one: the checksum of every tensor, by name."""
    sums = {name: (str(tensor.dtype), list(tensor.shape), _sum(tensor)) for name, tensor in model.named_parameters()}
    return digest_of(sums)


def _sum(tensor: torch.Tensor) -> int:
    plain = tensor.to_dense() if tensor.is_mkldnn else tensor
    row_N = plain.detach().contiguous().cpu().view(-1).view(torch.uint8)
    padded_N = torch.nn.functional.pad(row_N, (0, -len(row_N) % 4))
    return int(raw_sums(padded_N.view(1, -1).numpy())[0])


def host_id() -> str:
    """The same for all processes of one running system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
