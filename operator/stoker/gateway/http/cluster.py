"""The cluster: GPUs of all nodes, their use, active jobs."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from stoker.gateway.cluster.interface import JOB, NODE, POD, Selection, list_all
from stoker.gateway.cluster.prometheus import GpuUse
from stoker.gateway.domain.capacity import NodeCapacity, capacities
from stoker.gateway.domain.states import ACTIVE_PHASES, phase_of
from stoker.gateway.http.caller import Call, Caller
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.models import ClusterStatus, NodeAnswer


def cluster_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/cluster", tags=["cluster"], responses=ERRORS)
    router.add_api_route("/status", status, methods=["GET"], response_model=ClusterStatus)
    router.add_api_route("/nodes", nodes, methods=["GET"], response_model=list[NodeAnswer])
    return router


async def status(call: Caller) -> ClusterStatus:
    """GPUs and jobs of the whole cluster. The caller needs the right to list nodes, pods and jobs of all namespaces."""
    found, use, (jobs, _) = await asyncio.gather(
        _nodes(call), call.gateway.prometheus.gpu_use(), list_all(call.cluster, JOB, Selection())
    )
    missing = {"gpu_utilization": use.utilization, "memory_utilization": use.memory_utilization}
    return ClusterStatus(
        total_gpus=sum(node.gpus for node in found),
        available_gpus=sum(node.available_gpus for node in found),
        gpu_utilization=use.utilization,
        memory_utilization=use.memory_utilization,
        active_jobs=sum(phase_of(job) in ACTIVE_PHASES for job in jobs),
        nodes=len(found),
        ready_nodes=sum(node.status == "Ready" for node in found),
        unavailable={name: use.why_not for name, value in missing.items() if value is None},
    )


async def nodes(call: Caller) -> list[NodeAnswer]:
    """List the nodes. The caller needs the right to list nodes and the pods of all namespaces."""
    found, use = await asyncio.gather(_nodes(call), call.gateway.prometheus.gpu_use())
    return [_answer(node, use) for node in found]


async def _nodes(call: Call) -> list[NodeCapacity]:
    (found, _), (pods, _) = await asyncio.gather(
        list_all(call.cluster, NODE, Selection()), list_all(call.cluster, POD, Selection())
    )
    return capacities(found, pods)


def _answer(node: NodeCapacity, use: GpuUse) -> NodeAnswer:
    used = use.memory_used.get(node.name)
    unavailable = {}
    if used is None:
        unavailable["gpu_memory_used"] = use.why_not or f"not measured: no metrics of DCGM name node {node.name}"
    return NodeAnswer(
        node_id=node.name,
        gpus=node.gpus,
        available_gpus=node.available_gpus,
        status=node.status,
        gpu_memory_used=used,
        cpu=node.cpu,
        memory=node.memory,
        unavailable=unavailable,
    )
