"""What each program's /metrics serves: names of all samples with their labels, read from the programs themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from starlette.applications import Starlette

from stoker.engine.core.stats import STEP_TOKENS
from stoker.engine.http.core_metrics import register_core
from stoker.engine.http.metrics import FrontMetrics
from stoker.gateway.http.requests import RequestGuard
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeCounts
from stoker.pod.gpu_metrics import GpuMetrics
from stoker.pod.gpu_reading import GpuReading
from stoker.router.backend import Timeouts
from stoker.router.backends import Backends
from stoker.router.metrics import RouterMetrics
from stoker.router.policy import policy_named
from stoker.trainer.agent.metrics import registry_of
from stoker.trainer.agent.pod_rank import PodRank
from stoker.trainer.agent.run_state import RunState
from stoker.trainer.protocol.config import JobIdentity
from stoker.trainer.protocol.messages import StepEvent, ValidationEvent
from testing.engine.stats import STATS

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}
"""What Prometheus' text form adds to the name of a family, by its type."""


def exposed() -> dict[str, frozenset[str]]:
    """Name of each sample -> its labels, over all programs."""
    found: dict[str, frozenset[str]] = {}
    for registry in (_operator(), _gateway(), _trainer(), _engine(), asyncio.run(_router()), _gpus()):
        for name, kind, labels in _families(registry):
            for suffix in SUFFIXES.get(kind, ("",)):
                found[f"{name}{suffix}"] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name, type and labels of each family, also of one that has no sample yet."""
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            yield str(collector._name), str(collector._type), frozenset(collector._labelnames)
            continue
        for family in collector.collect():
            labels: Any = getattr(family, "_labelnames", ())
            yield family.name, family.type, frozenset(labels)


def _operator() -> CollectorRegistry:
    metrics = OperatorMetrics()
    nothing: Mapping[str, Any] = {"objects": {}, "silence_s": {}}
    state = OperatorState(
        queue=0, delayed=0, polls=0, nodes=NodeCounts(silent=0, in_outage=0, outages=0), **nothing
    )  # fmt: skip
    metrics.watch(lambda: state)
    return metrics.registry


def _gateway() -> CollectorRegistry:
    registry = CollectorRegistry()
    RequestGuard(Starlette(), registry)
    return registry


def _trainer() -> CollectorRegistry:
    pod = PodRank(node_rank=0, nodes=1, ranks_per_node=2, pod_uid="uid", master_addr="127.0.0.1", master_port=0)
    state = RunState(JobIdentity(name="job", uid="uid", writer="0a1b2c3d"), pod, started_at=0)
    figures = dict.fromkeys(
        ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "eta_s", "loss_scale"), 1.0
    )
    experts = {"expert_tokens": (1, 2), "router_balance_loss": 1.0, "router_z_loss": 1.0, "expert_imbalance": 1.0}
    fields: Mapping[str, Any] = {**figures, **experts}
    state.last_step = StepEvent(step=1, total_steps=2, tokens=8, skipped_steps=0, **fields)
    state.last_validation = ValidationEvent(step=1, loss=1.0, tokens=1)
    return registry_of(state, lambda: 0.0)


def _engine() -> CollectorRegistry:
    registry = CollectorRegistry()
    FrontMetrics(registry, "tiny")
    stats = replace(STATS, step_tokens=(1,) * (len(STEP_TOKENS) + 1))
    register_core(registry, "tiny", lambda: stats, lambda: None)
    return registry


async def _router() -> CollectorRegistry:
    registry = CollectorRegistry()
    times = Timeouts(connect_s=1.0, silence_s=1.0, probe_s=1.0)
    backends = Backends(policy=policy_named("leastPending"), times=times, probe_interval_s=1.0)
    RouterMetrics(registry, backends)
    return registry


def _gpus() -> CollectorRegistry:
    registry = CollectorRegistry()
    reading = GpuReading(0, "GPU-1", "0000:1B", 0.5, 1, 2)
    registry.register(GpuMetrics(lambda: [reading]))
    return registry
