"""The need of a pool whose routers put late requests behind the others: by a replay of the last minutes. Pure.

There a burst delays none but its own requests: those that cannot be in time any more wait until there is room. So a
pool needs no queue short enough for 95 of 100 requests in their order of arrival; it needs room for all but a few.
The arrivals of the last minutes go through a fluid model of N replicas: what would wait longer than the goal is put
aside. The need is the smallest N that puts few aside and keeps up.

Called by `rule` where a class has a class behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from stoker.operator.domain.autoscaling.decision import Limits, PoolInput
from stoker.operator.domain.autoscaling.need import BUSY, Need, needed_by_goals
from stoker.operator.domain.autoscaling.prediction import TAIL

ENOUGH_S = 120.0
"""A shorter past shows no bursts."""
ASIDE = 0.5
"""Of the requests that may miss the goal, those that the past may have put aside: the next burst is another one."""
NEWEST_S = 300.0
"""Time in which the replicas keep up with their work: a demand that has risen shows in it."""


@dataclass(frozen=True)
class Replay:
    """The last minutes as work."""

    slot_s: float
    work_s: tuple[float, ...]
    """Seconds of one copy that the requests of each slot take."""
    wait_s: float
    """How long the work before a request may take so that it is in time."""

    def put_aside(self, copies: int) -> float:
        """Share of the work that would be late with so many copies of the model."""
        room, backlog, late = copies * self.slot_s, 0.0, 0.0
        for work in self.work_s:
            taken = min(work, max(copies * self.wait_s + room - backlog, 0.0))
            late += work - taken
            backlog = max(backlog + taken - room, 0.0)
        return late / max(sum(self.work_s), 1e-9)

    def busy(self, copies: int) -> float:
        """Share of the newest minutes that their work takes."""
        newest = self.work_s[-round(NEWEST_S / self.slot_s) :]
        return sum(newest) / (copies * self.slot_s * len(newest))


def needed_with_late(limits: Limits, seen: PoolInput, share: float) -> Need:
    """The smallest number that puts few requests aside, at most what `needed_by_goals` says.

    Args:
        share: of the goal that a request may use up.
    """
    most = needed_by_goals(limits, seen, share)
    replay = replayed(limits, seen, share)
    if replay is None or most.infeasible:
        return most
    counts = range(max(limits.min, 1), most.replicas)
    place = bisect_left(counts, True, key=lambda count: _suffices(replay, count * seen.copies))
    if place == len(counts):
        return most
    found = counts[place]
    text = (
        f"{found} needed for {seen.demand.rate if seen.demand else 0:.3g} requests/s with late ones behind the others"
    )
    return Need(found, text, most.prediction)


def _suffices(replay: Replay, copies: int) -> bool:
    return replay.busy(copies) <= BUSY and replay.put_aside(copies) <= ASIDE * TAIL


def replayed(limits: Limits, seen: PoolInput, share: float) -> Replay | None:
    """The last minutes; None where they are not known well enough."""
    demand, curve, shape, goal_s = seen.demand, seen.curve, seen.shape, limits.goals.first_token_s
    if demand is None or curve is None or shape is None or goal_s is None or not demand.rate:
        return None
    arrivals, slot_s = seen.arrivals, seen.evidence.slot_s
    if len(arrivals) * slot_s < ENOUGH_S or not sum(arrivals):
        return None
    step_s = curve.base_s / shape.max_batch_tokens  # where something would be late, steps are full
    prompt_s = demand.uncached.moment() * (curve.prompt_token_s + step_s)
    each_s = prompt_s + demand.output * curve.decode_token_s
    work = tuple(count * each_s for count in arrivals)
    return Replay(slot_s, work, max(goal_s * share - prompt_s, 0.0))
