"""The queue as jobs and pods show it: which gangs wait, and what runs hold. Pure, on objects as they are stored.

A run that has just ended and comes back keeps its place while its next pods are made, for a limited time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.domain.labels import ATTEMPT, JOB_UID, ROLE, PodRole
from stoker.operator.domain.placement.gang import Level
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.placement.node_capacity import PodUse
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import PLACEMENT_GATE, is_gated, is_owned, label
from stoker.operator.domain.queue.applicant import Applicant, Holding

COMES_BACK_S = 600.0
"""Time after the end of an attempt in which the next one has the place of a run that comes back."""
_OVER = frozenset({"Completed", "Failed", "Cancelled", "Suspending", "Suspended", "Cancelling"})


DeviceNeedsOf = Callable[[str, Mapping[str, Any]], Mapping[str, int]]


def no_devices(_namespace: str, _spec: Mapping[str, Any]) -> Mapping[str, int]:
    """Return nothing: no view of devices."""
    return {}


def read_queue(
    jobs: Iterable[Object],
    pods: Iterable[Object],
    use_of: Callable[[Object], PodUse | None],
    now: datetime,
    needs: DeviceNeedsOf = no_devices,
) -> tuple[list[Applicant], list[Holding]]:
    """Return the gangs that wait and what the pods of the others take.

    Args:
        jobs: all TrainingJobs.
        pods: all pods; only those of trainers are read.
        use_of: what a pod takes from which node; None for one that has no node and after its end.
        needs: what a pod of a namespace with a spec takes of the devices of its claims.
    """
    trainers: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        if label(pod, ROLE) == PodRole.TRAINER and is_owned(pod, label(pod, JOB_UID)):
            trainers[label(pod, JOB_UID)].append(pod)
    applicants: list[Applicant] = []
    holdings: list[Holding] = []
    for job in jobs:
        mine = trainers.get(job["metadata"]["uid"], [])
        uses = tuple(use for pod in mine if (use := use_of(pod)) is not None)
        if uses:
            holdings.append(Holding(namespace=job["metadata"].get("namespace", ""), uses=uses))
        elif (found := applicant_of(job, mine, now, needs)) is not None:
            applicants.append(found)
    return applicants, holdings


def applicant_of(
    job: Object, pods: Sequence[Object], now: datetime, needs: DeviceNeedsOf = no_devices
) -> Applicant | None:
    """The gang of a job without a pod on a node; None where it does not wait for room."""
    if not waits(job, pods, now):
        return None
    status, metadata = job["status"], job["metadata"]
    rendered = status["pinned"]["rendered"]
    return Applicant(
        name=f"{metadata.get('namespace', '')}/{metadata['name']}",
        namespace=metadata.get("namespace", ""),
        gang=gang_of_rendering(rendered, needs(metadata.get("namespace", ""), rendered["pod"]["spec"])),
        levels=_levels(status.get("acceptedSpec") or job["spec"]),
        avoid=frozenset(status.get("avoidedNodes") or ()),
        priority=_priority(_gated(status, pods) or pods),
        returning=_comes_back(status, now),
        since=str(metadata.get("creationTimestamp") or ""),
    )


def waits(job: Object, pods: Sequence[Object], now: datetime) -> bool:
    """Whether a job without a pod on a node waits for room: its pods have our gate, or it comes back."""
    status = job.get("status") or {}
    if not status.get("attempt") or not (status.get("pinned") or {}).get("rendered"):
        return False
    if job["metadata"].get("deletionTimestamp") or status.get("phase") in _OVER:
        return False
    gated = _gated(status, pods)
    return bool(gated or _comes_back(status, now)) and not any(map(_has_foreign_gate, gated))


def place_ends(jobs: Iterable[Object], now: datetime) -> datetime | None:
    """The next moment at which a run whose attempt has ended loses its place; None where none comes back."""
    statuses = [job.get("status") or {} for job in jobs]
    over = [
        status["attempt"]["endedAt"] for status in statuses if _between_attempts(status) and _comes_back(status, now)
    ]
    return min((datetime.fromisoformat(at) + timedelta(seconds=COMES_BACK_S) for at in over), default=None)


def _between_attempts(status: Mapping[str, Any]) -> bool:
    return bool((status.get("attempt") or {}).get("endedAt")) and status.get("phase") not in _OVER


def makes_gang(job: Object) -> bool:
    """Whether the pods of a job's attempt are being made: no pass has looked at all of them yet."""
    attempt = (job.get("status") or {}).get("attempt") or {}
    return "number" in attempt and not attempt.get("endedAt") and not attempt.get("phase")


def _gated(status: Mapping[str, Any], pods: Iterable[Object]) -> list[Object]:
    number = str(status["attempt"]["number"])
    return [pod for pod in pods if label(pod, ATTEMPT) == number and is_gated(pod)]


def _priority(pods: Iterable[Object]) -> int:
    """The priority that the API server wrote into pods; for a run that comes back, into those that ended."""
    return max((int(pod["spec"].get("priority") or 0) for pod in pods), default=0)


def _levels(spec: Mapping[str, Any]) -> tuple[Level, ...]:
    topology = (spec.get("scheduling") or {}).get("topology") or ()
    return tuple(Level(found["key"], found.get("mode", "Preferred")) for found in topology)


def _comes_back(status: Mapping[str, Any], now: datetime) -> bool:
    """Whether the run made progress, and its attempt ended only just, or shortly before the present one began."""
    attempt = status["attempt"]
    before = attempt if attempt.get("endedAt") else next(iter(status.get("attempts") or ()), {})
    if not status.get("progress") or not before.get("endedAt"):
        return False
    again = now if attempt.get("endedAt") else datetime.fromisoformat(attempt["startedAt"])
    return (again - datetime.fromisoformat(before["endedAt"])).total_seconds() <= COMES_BACK_S


def _has_foreign_gate(pod: Object) -> bool:
    return any(gate["name"] != PLACEMENT_GATE for gate in pod["spec"].get("schedulingGates") or ())
