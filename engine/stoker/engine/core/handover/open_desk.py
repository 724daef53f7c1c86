"""Make the desk of a core from its configuration."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from stoker.engine.config import EngineConfig, Transport
from stoker.engine.core.block_identity import fingerprint_of, layout_of, shared_weights_digest
from stoker.engine.core.build import leading_runner, runner_of
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.block_memory import host_id, open_memory
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.handover.host_ports import HostPorts, new_epoch
from stoker.engine.core.handover.messages import PeerHello
from stoker.engine.core.handover.office import BlockStore, Front, LocalPort, Office
from stoker.engine.core.handover.peer_post import PeerPost, curve_keys
from stoker.engine.core.handover.rank_group import RankGroup
from stoker.engine.execution.executor import Executor
from stoker.engine.key_file import read_key
from stoker.engine.listen_address import parse_listen
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import OpenBlocks
from stoker.engine.ranks.executor import Ranks
from stoker.engine.transfer.device_memory import DeviceError
from stoker.engine.transfer.port import PROVIDES, Require
from stoker.engine.transfer.rdma_ports import count_rdma_ports
from stoker.engine.transfer.zone_memory import LockedZone
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
        ConfigError: the address or the key cannot be used, or a further rank's ports.
        OSError: the folder of one of several copies cannot be made.
    """
    transfer = config.transfer
    if transfer.listen is None:
        return None
    host, port = parse_listen(transfer.listen, keyed=transfer.key_file is not None)
    key = read_key(transfer.key_file) if transfer.key_file is not None else None
    pod_uid = os.environ.get("STOKER_POD_UID") or uuid.uuid4().hex
    if config.parallelism.data > 1:  # each copy is a peer of its own
        pod_uid, folder = f"{pod_uid}.{transfer.copy_number}", folder / f"copy-{transfer.copy_number}"
        folder.mkdir(mode=0o700, exist_ok=True)
    facts = fingerprint_of(
        config, leading_runner(engine.executor), shared_weights_digest(plan, engine.executor, "transfer.listen")
    )
    transports = transfer.transports or (("nixl",) if transfer.require == "rdma" else TRANSPORTS[plan.device])
    own = OpenBlocks(
        facts.digest, pod_uid, new_epoch(), transfer.zone_blocks, str(folder), host, port + 1 if port else 0,
        key or LOOPBACK_KEY, transfer.require, transports,
    )  # fmt: skip
    try:
        post = PeerPost(host, port, curve_keys(key) if key is not None else None)
        blocks = open_blocks(engine.executor, plan, own, clock)
    except DeviceError as error:
        raise ConfigError(f"transfer.zone_blocks {transfer.zone_blocks} cannot be had: {error}") from error
    except OSError as error:
        raise ConfigError(f"transfer.listen {transfer.listen!r} cannot be used: {error}") from error
    first, *others = blocks.port.describe()
    hello = PeerHello(first, facts, host_id(), tuple(others))
    office = Office(
        engine, hello, blocks.zone, blocks.store, blocks.port, post, front, clock,
        tracer=tracer_of("stoker-engine", os.environ, clock=clock),
    )  # fmt: skip
    shown = f"[{host}]" if ":" in host else host
    lack = unmet(transfer.require, transports, blocks.nvlinks, count_rdma_ports())
    return Desk(office, endpoint=f"{shown}:{post.port}", unmet=lack)


class EngineBlocks(NamedTuple):
    """The blocks of an engine, as its desks see them."""

    zone: LockedZone
    store: BlockStore
    port: LocalPort
    nvlinks: int


def open_blocks(executor: Executor, plan: EnginePlan, own: OpenBlocks, clock: Callable[[], float]) -> EngineBlocks:
    """Make the zone and the ports, on one rank or on several. Raises DeviceError, OSError, ExecutorLost."""
    if isinstance(executor, Ranks):
        group = RankGroup(executor.calls, LockedZone(own.zone_blocks, clock))
        group.open([rank_call(own, rank, plan) for rank in range(plan.ranks)])
        return EngineBlocks(group.zone, group, group, group.nvlinks)
    runner = runner_of(executor)
    layout = layout_of(runner)
    memory = open_memory(runner, layout, own.zone_blocks, plan, clock)
    ports = HostPorts(
        own.fingerprint, layout, memory.local, memory.zone, pod_uid=own.pod_uid, folder=Path(own.folder), host=own.host,
        port=own.port, key=own.key, require=own.require,  # type: ignore[arg-type] # the configuration's
        transports=own.transports, epoch=own.epoch,  # type: ignore[arg-type]
    )  # fmt: skip
    return EngineBlocks(memory.zone, memory.store, ports, memory.nvlinks)


def rank_call(own: OpenBlocks, rank: int, plan: EnginePlan) -> OpenBlocks:
    """What one of several ranks opens: a folder and two ports of its own. In another pod it has its own key."""
    here = rank < plan.ranks // plan.pods
    folder = str(Path(own.folder) / f"rank-{rank}") if here else ""
    return own._replace(folder=folder, port=own.port + 2 * rank if own.port else 0, key=own.key if here else b"")


def unmet(require: Require, transports: Sequence[str], nvlinks: int = 0, rdma_ports: int = 0) -> str:
    """Why the demand is not met by these transports; empty if it is. `rdma_ports`: of the leader's host."""
    if not any(require in PROVIDES[name] for name in transports):
        return f"transfer.require is {require}; this engine offers {', '.join(transports)}"
    if require == "nvlink" and not nvlinks:
        return "transfer.require is nvlink; this GPU has no active NVLink"
    if require == "rdma" and not rdma_ports:
        return "transfer.require is rdma; this host shows no active RDMA port"
    return ""
