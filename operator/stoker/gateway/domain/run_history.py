"""Attempts, use of time and pods of a training job, from its resource and its pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.gateway.domain.capacity import NO_CLAIMS, gpus_of_pod
from stoker.gateway.domain.claimed_gpus import ClaimedGpus
from stoker.gateway.observations import Attempt, Failure, Goodput, RankPod, RunHistory, SavedAt

Object = Mapping[str, Any]
SECONDS = ("productive", "checkpointing", "starting", "restarting", "queued", "suspended", "lost")
START_PARTS = {
    "queue": "queue",
    "schedule": "schedule",
    "pull": "pull",
    "start": "start",
    "rendezvous": "rendezvous",
    "load": "load",
    "compile": "compile",
    "firstStep": "first_step",
}
"""Parts of a start in their order, with their names here; an API server keeps no order."""


def run_history(job: Object) -> RunHistory:
    """The attempts of a job, oldest first, with the causes of their ends."""
    status = job.get("status") or {}
    current = status.get("attempt")
    earlier = [one for one in status.get("attempts") or () if not current or one["number"] != current.get("number")]
    found = sorted([*earlier, *([current] if current else [])], key=lambda one: one.get("number", 0))
    return RunHistory(
        job_id=job["metadata"]["uid"],
        attempts=[_attempt(one) for one in found],
        goodput=_goodput(status.get("goodput")),
        avoided_nodes=[_node_name(one) for one in status.get("avoidedNodes") or ()],
        resource_version=job["metadata"]["resourceVersion"],
    )


def _attempt(found: Object) -> Attempt:
    return Attempt(
        attempt=found.get("number", 0),
        phase=str(found.get("phase") or ""),
        started_at=found.get("startedAt"),
        placed_at=found.get("placedAt"),
        ended_at=found.get("endedAt"),
        first_step=found.get("firstStep"),
        last_step=found.get("lastStep"),
        resumed_from=saved_at(found.get("resumedFrom")),
        failure=_failure(found.get("failure")),
        end=found.get("end"),
        startup=_startup(found.get("startup") or {}),
    )


def _startup(found: Object) -> dict[str, int]:
    return {name: found[part] for part, name in START_PARTS.items() if part in found}


def saved_at(found: Object | None) -> SavedAt | None:
    """A save by name and step; None where there is none."""
    return SavedAt(checkpoint_name=found.get("name"), step=found.get("step")) if found else None


def _failure(found: Object | None) -> Failure | None:
    if not found:
        return None
    return Failure(
        cause=str(found.get("cause") or "Unknown"),
        exit_code=found.get("exitCode"),
        node=found.get("node"),
        pod=found.get("pod"),
        rank=found.get("rank"),
        step=found.get("step"),
        detail=str(found.get("detail") or ""),
        at=found.get("at"),
        action=found.get("action"),
    )


def _goodput(found: Object | None) -> Goodput | None:
    if not found:
        return None
    seconds = {name: found.get(name) or 0 for name in SECONDS}
    return Goodput(since=found.get("since"), state=found.get("state"), **seconds)


def _node_name(found: Any) -> str:
    return str(found.get("name") or found.get("node") or "") if isinstance(found, Mapping) else str(found)


def rank_pod(pod: Object, job: Object, claimed: ClaimedGpus = NO_CLAIMS, unknown_claims: str = "") -> RankPod:
    """A pod of a job, with the ranks that run in it.

    Args:
        unknown_claims: why the claims of pods are not known; empty where they are.
    """
    unknown = unknown_claims if (pod.get("spec") or {}).get("resourceClaims") else ""
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    place, ranks = _whole(labels.get("stoker.dev/node-rank")), ranks_of_a_pod(job)
    return RankPod(
        pod_name=pod["metadata"]["name"],
        attempt=_whole(labels.get("stoker.dev/attempt")),
        first_rank=place * ranks,
        last_rank=place * ranks + ranks - 1,
        node=(pod.get("spec") or {}).get("nodeName"),
        phase=str(status.get("phase") or "Pending"),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ()),
        gpus=None if unknown else gpus_of_pod(pod, claimed),
        message=_why(status),
        unavailable={"gpus": unknown} if unknown else {},
    )


def ranks_of_a_pod(job: Object) -> int:
    """Ranks of each pod: `workers.ranksPerPod`, else one for each GPU, else one."""
    workers = (job.get("spec") or {}).get("workers") or {}
    return int(workers.get("ranksPerPod") or workers.get("gpusPerPod") or 1)


def _why(status: Object) -> str:
    """Why a pod does not run, in one line."""
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        found = state.get("waiting") or (state.get("terminated") if status.get("phase") == "Failed" else None)
        if found:
            return ": ".join(str(part) for part in (found.get("reason"), found.get("message")) if part)[:300]
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")[:300]
    return str(status.get("message") or "")


def _whole(text: Any) -> int:
    return int(text) if str(text or "").isdigit() else 0
