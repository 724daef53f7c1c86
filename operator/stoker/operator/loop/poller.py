"""The poller: asks running pods for their `/status` and stores the answers.

A failed poll changes nothing: the old answer ages. The poller decides nothing.

Owned by the loop; writes reports into the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stoker.operator.cluster.interface import Cluster, ClusterError
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.labels import JOB_UID, ROLE, PodRole
from stoker.operator.domain.plan import Object, Ref, Report
from stoker.operator.domain.pods import answers_polls, label
from stoker.operator.loop.store import Store

log = logging.getLogger(__name__)

MAX_POLLS = 64
"""Polls at the same time."""
STEADY_POLLS_PER_S = 100.0
"""Polls per second of jobs that run undisturbed: a thousand of them are asked every ten seconds. A job that starts,
saves, drains or stops is asked in every round, as engines and routers are."""

Wake = Callable[[Object], None]
Note = Callable[[Object, Report], None]


class Poller:
    """Polls pod 0 of each running job, and every engine and router; calls `wake` with a pod whose answer is new.

    `note` gets every answer, also one that says the same again: only so its age is known.
    """

    def __init__(
        self, cluster: Cluster, store: Store, clock: Clock, wake: Wake, *, interval_s: float, note: Note | None = None
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.clock = clock
        self.wake = wake
        self.interval_s = interval_s
        self.note = note
        self._slots = asyncio.Semaphore(MAX_POLLS)
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._steady: dict[str, None] = {}
        """Uids of leaders of undisturbed jobs, the one that was asked longest ago first."""

    async def run(self) -> None:
        """Poll for ever. A pod that answers slowly delays no other."""
        try:
            while True:
                self._start()
                await self.clock.sleep(self.interval_s)
        finally:
            for poll in self._polls.values():
                poll.cancel()

    async def poll_once(self) -> None:
        """Run one round of polls to its end."""
        self._start()
        await asyncio.gather(*self._polls.values())

    @property
    def running(self) -> int:
        """Number of polls under way."""
        return sum(not poll.done() for poll in self._polls.values())

    def _start(self) -> None:
        self._polls = {uid: poll for uid, poll in self._polls.items() if not poll.done()}
        for pod in self._due():
            uid = pod["metadata"]["uid"]
            if uid not in self._polls:
                self._polls[uid] = asyncio.ensure_future(self._poll(pod))

    def _due(self) -> list[Object]:
        """The pods of this round: all, but of undisturbed jobs no more than their share, in turn."""
        pods = {pod["metadata"]["uid"]: pod for pod in polled_pods(self.store)}
        steady = [uid for uid, pod in pods.items() if _is_steady(self.store, pod)]
        known = {*steady}
        in_turn = {**{uid: None for uid in self._steady if uid in known}, **dict.fromkeys(steady)}
        share = max(1, round(self.interval_s * STEADY_POLLS_PER_S))
        asked, later = [*in_turn][:share], [*in_turn][share:]
        self._steady = dict.fromkeys([*later, *asked])
        waiting = {*later}
        return [pod for uid, pod in pods.items() if uid not in waiting]

    async def _poll(self, pod: Object) -> None:
        metadata = pod["metadata"]
        ref = Ref("Pod", metadata.get("namespace", ""), metadata["name"], metadata["uid"])
        try:
            async with self._slots:
                answer = await self.cluster.poll(ref)
        except ClusterError as error:
            log.debug("no status from pod %s/%s: %s", ref.namespace, ref.name, error)
            return
        if self.note is not None:
            self.note(pod, answer)
        if self.store.put_report(ref.uid, answer):
            self.wake(pod)


def polled_pods(store: Store) -> list[Object]:
    """Running pods that report: node rank 0 of a gang (it gathers the others), engines, routers."""
    return [pod for pod in store.of_kind("Pod") if _runs(pod) and answers_polls(pod)]


def _runs(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _is_steady(store: Store, pod: Object) -> bool:
    """Whether it is the leader of a job that runs, and has reported before."""
    if label(pod, ROLE) != PodRole.TRAINER or store.report(pod["metadata"]["uid"]) is None:
        return False
    job = store.by_uid(label(pod, JOB_UID) or "")
    return job is not None and (job.get("status") or {}).get("phase") == "Running"
