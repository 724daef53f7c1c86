"""The queue of gangs that wait for nodes, decided anew when jobs, pods or free capacity have changed.

One decision serves the passes of all jobs that wait. It costs time in proportion to their number, so the next one comes
no sooner than four times that time later: a burst of jobs is decided in a few rounds.

Owned by the loop; the rules are `domain/queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from stoker.operator.domain.clock import Clock
from stoker.operator.domain.labels import ROLE, PodRole
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.plan import Key, Object, Observed
from stoker.operator.domain.pods import is_gated, label
from stoker.operator.domain.queue.applicant import Turn
from stoker.operator.domain.queue.decide import LOOK_AHEAD, decide
from stoker.operator.domain.queue.reading import place_ends, read_queue
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.observe import only_progress
from stoker.operator.loop.store import Change, Store

MOMENT_S = 1.0
"""From the end of a place to the pass that finds it ended."""
REST = 4.0
"""Rest after a decision, in multiples of the time that it took."""


class RoomQueue:
    """The turns of all gangs that wait.

    Args:
        changed: called when the queue may have become another one, so that its jobs need a pass.
    """

    def __init__(self, store: Store, capacity: CapacityWatch, clock: Clock, changed: Callable[[], None]) -> None:
        self._store, self._capacity, self._clock, self._changed = store, capacity, clock, changed
        self._turns: dict[str, Turn] = {}
        self._nodes: tuple[NodeCapacity, ...] | None = None
        """The capacity that the turns were decided with; None after a change of jobs or pods."""
        self._rest_until = 0.0
        self._place_ends: datetime | None = None
        """When a run that comes back loses its place, which no change of an object tells."""
        store.listeners.append(self._on_change)

    def observed(self, key: Key, seen: Observed, nodes: tuple[NodeCapacity, ...]) -> Observed:
        """The observation of a job that waits, with its turn and the nodes that it may use.

        Args:
            nodes: what all nodes have left beside the job's own pods.
        """
        turn = self._turn(f"{key.namespace}/{key.name}")
        if turn is not None and turn.nodes is not None:
            chosen = {*turn.nodes}
            nodes = tuple(node for node in nodes if node.name in chosen)
        return replace(seen, nodes=nodes, turn=turn)

    @property
    def waiting(self) -> bool:
        """Whether a gang waits for room that runs may give it. One that no room of theirs helps holds none back."""
        self._refreshed()
        return any(turn.is_head or turn.position > LOOK_AHEAD for turn in self._turns.values())

    def left_s(self) -> float | None:
        """Seconds after which the turns may be others though nothing has changed; None while they are not."""
        if self._place_ends is None:
            return None
        return max(0.0, (self._place_ends - self._clock.now()).total_seconds()) + MOMENT_S

    def next_passes(self, waiting: Iterable[Key]) -> list[Key]:
        """The jobs that need a pass after a change, in the order of the queue. Those far behind stay as they are."""
        positions = {key: self._turns.get(f"{key.namespace}/{key.name}") for key in waiting}
        ordered = sorted(positions, key=lambda key: (turn.position if (turn := positions[key]) else 0, key))
        return [key for key in ordered if (turn := positions[key]) is None or turn.position <= LOOK_AHEAD]

    def _turn(self, name: str) -> Turn | None:
        """The turn of a job; None for one that stands in no queue (its pods have gates of others, or it stops).

        A job that came after the last decision waits for the next, which is near.
        """
        fresh = self._refreshed()
        found = self._turns.get(name)
        if found is None and not fresh:
            place = len(self._turns) + 1
            return Turn(position=place, total=place)
        return found

    def _refreshed(self) -> bool:
        """Decide anew after a change. False: it is too soon, and the jobs get another pass later."""
        if self._place_ends is not None and self._clock.now() > self._place_ends:
            self._nodes = None
            self._changed()
        if self._nodes is self._capacity.nodes():
            return True
        if self._clock.monotonic() < self._rest_until:
            self._changed()
            return False
        self._decide()
        return True

    def _decide(self) -> None:
        began = self._clock.monotonic()
        nodes = self._capacity.nodes()
        jobs, pods = self._store.of_kind("TrainingJob"), self._store.of_kind("Pod")
        time = self._clock.now()
        applicants, holdings = read_queue(jobs, pods, self._capacity.use_of, time, self._capacity.needs)
        self._turns, self._nodes = decide(applicants, nodes, holdings), nodes
        self._place_ends = place_ends(jobs, time)
        now = self._clock.monotonic()
        self._rest_until = now + REST * (now - began)

    def _on_change(self, change: Change) -> None:
        if change.object["kind"] == "TrainingJob":
            if change.old and change.new and only_progress(change.old, change.new):
                return
            self._nodes = None
            if _phase(change.old) != _phase(change.new):
                self._changed()
        elif change.object["kind"] == "Pod" and label(change.object, ROLE) == PodRole.TRAINER:
            self._nodes = None
            if _is_gated(change.old) != _is_gated(change.new):
                self._changed()


def _phase(job: Object | None) -> object:
    return (job.get("status") or {}).get("phase") if job else None


def _is_gated(pod: Object | None) -> bool:
    return pod is not None and is_gated(pod)
