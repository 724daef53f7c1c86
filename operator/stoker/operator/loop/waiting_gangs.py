"""The jobs whose gangs wait for room at this moment, so that a new gang does not take it at once.

The queue decides in rounds; this is exact, and costs a new gang the reading of the jobs that have changed since the
last one. Owned by the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.operator.domain.clock import Clock
from stoker.operator.domain.labels import JOB_UID, ROLE, PodRole
from stoker.operator.domain.placement.node_capacity import PodUse
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.pods import is_owned, label
from stoker.operator.domain.queue.reading import waits
from stoker.operator.loop.observe import only_progress
from stoker.operator.loop.store import Change, Store, key_of


class WaitingGangs:
    """Uids of the jobs that wait, kept from the changes of jobs and their pods.

    Args:
        use_of: what a pod takes from which node; None for one that has no node and after its end.
    """

    def __init__(self, store: Store, use_of: Callable[[Object], PodUse | None], clock: Clock) -> None:
        self._store, self._use_of, self._clock = store, use_of, clock
        self._candidates: set[str] = set()
        """Jobs that waited when they were read last, and those that have changed since."""
        store.listeners.append(self._on_change)

    def others_wait(self, key: Key) -> bool:
        """Whether the gang of another job than `key` waits for room."""
        for uid in list(self._candidates):
            job = self._store.by_uid(uid)
            if job is None or not self._waits(job):
                self._candidates.discard(uid)
            elif key_of(job) != key:
                return True
        return False

    def _waits(self, job: Object) -> bool:
        uid = job["metadata"]["uid"]
        pods = [pod for pod in self._store.labelled(JOB_UID, uid, "Pod") if _is_trainer(pod) and is_owned(pod, uid)]
        return waits(job, pods, self._clock.now()) and all(self._use_of(pod) is None for pod in pods)

    def _on_change(self, change: Change) -> None:
        if change.object["kind"] == "TrainingJob":
            if not (change.old and change.new and only_progress(change.old, change.new)):
                self._candidates.add(change.object["metadata"]["uid"])
        elif change.object["kind"] == "Pod" and _is_trainer(change.object):
            self._candidates.add(label(change.object, JOB_UID))


def _is_trainer(pod: Object) -> bool:
    return label(pod, ROLE) == PodRole.TRAINER
