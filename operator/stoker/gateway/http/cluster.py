"""The cluster: GPUs of all nodes, their use, active jobs.

DCGM's figures come first; of nodes that it does not measure, the agents of the pods that hold the GPUs are asked.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Literal

from fastapi import APIRouter

from stoker.gateway.cluster.interface import JOB, NODE, POD, Selection, list_all
from stoker.gateway.domain.capacity import NodeCapacity, capacities
from stoker.gateway.domain.gpu_use import GpuUse, gpu_agents
from stoker.gateway.domain.states import ACTIVE_PHASES, phase_of
from stoker.gateway.http.agent_gpus import use_by_agents
from stoker.gateway.http.caller import Call, Caller
from stoker.gateway.http.claimed_gpus import gpus_of_drivers
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.models import ClusterStatus, GpuResourceAnswer, NodeAnswer


@dataclass(frozen=True)
class Measured:
    """The nodes, and the use of their GPUs by who measured it."""

    nodes: list[NodeCapacity]
    uncounted: str
    """Why some GPUs are not counted; empty if all are."""
    dcgm: GpuUse
    agents: GpuUse
    """Of the nodes that DCGM does not measure."""

    @property
    def whole(self) -> tuple[GpuUse, Literal["dcgm", "agents"] | None]:
        """The use that stands for the cluster, and its source: never a mixture."""
        if self.dcgm.measured:
            return self.dcgm, "dcgm"
        return (self.agents, "agents") if self.agents.measured else (self.dcgm, None)

    @property
    def why_not(self) -> str:
        """Why something is not measured."""
        return "; ".join(filter(None, (self.dcgm.why_not, self.agents.why_not)))


def cluster_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/cluster", tags=["cluster"], responses=ERRORS)
    router.add_api_route("/status", status, methods=["GET"], response_model=ClusterStatus)
    router.add_api_route("/nodes", nodes, methods=["GET"], response_model=list[NodeAnswer])
    return router


async def status(call: Caller) -> ClusterStatus:
    """GPUs and jobs of the whole cluster. The caller needs the right to list nodes, pods and jobs of all namespaces.

    Where DCGM measures nothing, the agents of pods with GPUs are asked, which needs the right `pods/proxy`.
    """
    found, (jobs, _) = await asyncio.gather(_measured(call), list_all(call.cluster, JOB, Selection()))
    use, source = found.whole
    missing = {"gpu_utilization": use.utilization, "memory_utilization": use.memory_utilization}
    unavailable = {name: found.why_not for name, value in missing.items() if value is None}
    return ClusterStatus(
        total_gpus=sum(node.gpus for node in found.nodes),
        available_gpus=sum(node.available_gpus for node in found.nodes),
        gpu_utilization=use.utilization,
        memory_utilization=use.memory_utilization,
        gpus_measured=use.measured,
        gpu_source=source,
        active_jobs=sum(phase_of(job) in ACTIVE_PHASES for job in jobs),
        nodes=len(found.nodes),
        ready_nodes=sum(node.status == "Ready" for node in found.nodes),
        unavailable=unavailable | ({"total_gpus": found.uncounted} if found.uncounted else {}),
    )


async def nodes(call: Caller) -> list[NodeAnswer]:
    """List the nodes. The caller needs the right to list nodes and the pods of all namespaces.

    Of nodes that DCGM does not measure, the agents of pods with GPUs are asked, which needs the right `pods/proxy`.
    """
    found = await _measured(call)
    return [_answer(node, found) for node in found.nodes]


async def _measured(call: Call) -> Measured:
    (found, _), (pods, _), (claimed, uncounted), dcgm = await asyncio.gather(
        list_all(call.cluster, NODE, Selection()),
        list_all(call.cluster, POD, Selection()),
        gpus_of_drivers(call.cluster),
        call.gateway.prometheus.gpu_use(),
    )
    unmeasured = [one for one in gpu_agents(pods, claimed) if one.node not in dcgm.by_node]
    agents = await use_by_agents(call.cluster, unmeasured, call.gateway.agent_wait_s)
    return Measured(capacities(found, pods, claimed), uncounted, dcgm, agents)


def _answer(node: NodeCapacity, found: Measured) -> NodeAnswer:
    source: Literal["dcgm", "agents"] = "dcgm" if node.name in found.dcgm.by_node else "agents"
    use = found.dcgm if source == "dcgm" else found.agents
    devices = list(use.by_node.get(node.name, ()))
    used = [gpu.memory_used for gpu in devices if gpu.memory_used is not None]
    unavailable = {"gpus": found.uncounted} if found.uncounted else {}
    if not used:
        unavailable["gpu_memory_used"] = found.why_not or f"not measured: no metrics of DCGM name node {node.name}"
    elif source == "agents" and len(devices) < node.gpus:
        unavailable["gpu_devices"] = _partly(len(devices), node, found.agents.why_not)
    return NodeAnswer(
        node_id=node.name,
        gpus=node.gpus,
        available_gpus=node.available_gpus,
        gpu_resources=[GpuResourceAnswer(**asdict(one)) for one in node.gpu_resources],
        status=node.status,
        gpu_memory_used=used or None,
        gpu_devices=devices,
        gpu_source=source if devices else None,
        cpu=node.cpu,
        memory=node.memory,
        unavailable=unavailable,
    )


def _partly(measured: int, node: NodeCapacity, why_not: str) -> str:
    """Why some GPUs of a node have no figures."""
    reason = why_not or "an agent measures the GPUs of its own pod"
    return f"{measured} of {node.gpus} GPUs are measured: {reason}"
