"""Attempts, use of time and pods of a training job."""

from __future__ import annotations

from fastapi import APIRouter

from stoker.gateway.cluster.interface import JOB
from stoker.gateway.domain.run_history import rank_pod, run_history
from stoker.gateway.http.caller import Caller, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.claimed_gpus import claims_of_pods
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.pod_logs import pods_of
from stoker.gateway.observations import RankPod, RunHistory


def run_history_routes() -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/v1/training/jobs/{job_id}", tags=["training"], responses=ERRORS)
    router.add_api_route("/attempts", attempts, methods=["GET"], response_model=RunHistory)
    router.add_api_route("/pods", pods, methods=["GET"], response_model=list[RankPod])
    return router


async def attempts(job_id: ResourceId, call: Caller, namespace: Namespace = None) -> RunHistory:
    """Read the attempts of a job with the causes of their ends, and where its time went."""
    return run_history(await find(call, JOB, one_namespace(call, namespace), job_id))


async def pods(job_id: ResourceId, call: Caller, namespace: Namespace = None) -> list[RankPod]:
    """List the pods of all attempts of a job with their ranks and nodes, in the order of attempt and rank."""
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    found = await pods_of(call, job)
    claimed, unknown = await claims_of_pods(call.cluster, job["metadata"]["namespace"], found)
    return [rank_pod(pod, job, claimed, unknown) for pod in found]
