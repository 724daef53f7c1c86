"""A replica: the engine pods that compute together. A replica of one pod is the common case.

Pure; made by `view`, read by everything that counts, drains or replaces replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from stoker.operator.domain.labels import DRAINING, NODE_RANK, POD_GROUP, REPLICA_PODS, REVISION, SCHEDULER
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import ended, is_endpoint, is_ready, label, label_number, replica_name, waits_in_queue
from stoker.operator.domain.schedulers import Scheduler


@dataclass(frozen=True)
class Replica:
    """Pods with one set of weights. They start, drain and end together."""

    name: str
    """Name of the leader, which is pod 0."""
    pods: tuple[Object, ...]
    """Those that exist, at least one, by their number in the replica."""
    size: int = 1
    """Pods of a whole one."""

    @property
    def first(self) -> Object:
        """The leader, or another pod where it is missing."""
        return self.pods[0]

    @cached_property
    def endpoints(self) -> tuple[Object, ...]:
        """Those that answer requests."""
        return tuple(filter(is_endpoint, self.pods))

    @property
    def revision(self) -> str:
        """Name of the revision that it was made of; empty when its pods have no such label."""
        return revision_of(self.first)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that it was given to when it was made."""
        return cast("Scheduler", label(self.first, SCHEDULER) or "stoker")

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that its pods have for that scheduler: one, or none where that is the operator."""
        return tuple(sorted({name for pod in self.pods if (name := label(pod, POD_GROUP))}))

    @cached_property
    def complete(self) -> bool:
        return len(self.pods) >= self.size

    @cached_property
    def ready(self) -> bool:
        """Whether every pod of a whole replica is ready."""
        return self.complete and all(is_ready(pod) and not ended(pod) for pod in self.pods)

    @cached_property
    def ended(self) -> tuple[Object, ...]:
        """Pods that have ended."""
        return tuple(pod for pod in self.pods if ended(pod))

    @cached_property
    def lost(self) -> bool:
        """Whether a pod has vanished since the replica computed. One that is still being made lacks pods, too."""
        return not self.complete and any(map(is_ready, self.pods))

    @property
    def broken(self) -> bool:
        """Whether it can never compute again, because it lacks a pod that was there."""
        return bool(self.ended) or self.lost

    @cached_property
    def draining(self) -> bool:
        """Whether it gets no new request and is deleted when its last one has finished."""
        return any(map(draining, self.pods))

    @cached_property
    def leaving(self) -> bool:
        """Whether one of its pods is being deleted: the others follow."""
        return any(map(leaving, self.pods))

    @property
    def serving(self) -> bool:
        """Whether it counts: neither broken, nor draining, nor being deleted."""
        return not (self.broken or self.draining or self.leaving)

    @cached_property
    def queued(self) -> bool:
        """Whether it counts, and waits in the queue of its scheduler."""
        return self.serving and any(map(waits_in_queue, self.pods))

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(pod["metadata"]["uid"] for pod in self.pods)


def replicas_of(pods: Iterable[Object]) -> tuple[Replica, ...]:
    """Group the engine pods of a pool by replica, in the order of names."""
    groups: defaultdict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        groups[replica_name(pod)].append(pod)
    return tuple(
        Replica(name, tuple(sorted(members, key=number_of)), max(label_number(pod, REPLICA_PODS, 1) for pod in members))
        for name, members in sorted(groups.items())
    )


def number_of(pod: Object) -> int:
    """The pod's number in its replica."""
    return label_number(pod, NODE_RANK)


def is_leader(pod: Object) -> bool:
    """Whether the pod is the first of its replica."""
    return number_of(pod) == 0


def revision_of(pod: Object) -> str:
    """Name of the revision that the pod was made of; empty when it has no such label."""
    return label(pod, REVISION)


def draining(pod: Object) -> bool:
    """Whether the pod gets no new request and is deleted when its last one has finished."""
    return DRAINING in pod["metadata"].get("labels", {})


def leaving(pod: Object) -> bool:
    """Whether the pod is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))
