"""The use of GPUs from the agents of the pods that hold them, for nodes that DCGM does not measure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker.gateway.cluster.interface import ApiError, Cluster, Target
from stoker.gateway.domain.gpu_use import GpuAgent, GpuUse, figures_of, joined
from stoker.gateway.http.program_metrics import metrics_of
from stoker.gateway.observations import GpuFigures

MAX_AGENTS = 64
"""Pods whose metrics are read for one answer."""


async def use_by_agents(cluster: Cluster, agents: Sequence[GpuAgent], within_s: float) -> GpuUse:
    """Ask the agents of pods with GPUs, for `within_s` at most. Never raises: what cannot be read is in `why_not`."""
    asked = agents[:MAX_AGENTS]
    answers = await asyncio.gather(*(_ask(cluster, agent, within_s) for agent in asked))
    readings = [
        (agent.node, answer) for agent, answer in zip(asked, answers, strict=True) if not isinstance(answer, Exception)
    ]
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    reasons = []
    if refused:
        reasons.append(f"the metrics of {len(refused)} of {len(asked)} pods with GPUs cannot be read: {refused[0]}")
    if len(agents) > len(asked):
        reasons.append(f"{len(asked)} of {len(agents)} pods with GPUs are asked for their metrics")
    return GpuUse(joined(readings), "; ".join(reasons))


async def _ask(cluster: Cluster, agent: GpuAgent, within_s: float) -> list[tuple[str, GpuFigures]] | Exception:
    """The GPUs that an agent sees, with their places; or why it cannot be asked."""
    try:
        target = Target("pods", agent.namespace, agent.pod, agent.port)
        return figures_of(await metrics_of(cluster, target, within_s))
    except (ApiError, ValueError) as error:
        return error
