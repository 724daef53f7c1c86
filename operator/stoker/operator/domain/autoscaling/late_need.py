"""The need of a pool whose routers put late requests behind the others: by a replay of the last minutes. Pure.

There a burst delays none but its own requests: those that cannot be in time any more wait until there is room. So a
pool needs no queue short enough for 95 of 100 requests in their order of arrival; it needs room for all but a few.
The arrivals of the last minutes go through a fluid model of N replicas: what would wait longer
than the goal is put aside. The need is the smallest N that puts few aside and keeps up.

Called by `rule` where a class has a class behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.domain.autoscaling.decision import Limits, PoolInput
from stoker.operator.domain.autoscaling.evidence import has_risen
from stoker.operator.domain.autoscaling.need import BUSY, Need, needed_by_goals
from stoker.operator.domain.autoscaling.prediction import TAIL

ENOUGH_S = 120.0
"""A shorter past shows no bursts."""
NEWEST_S = 300.0
"""All minutes count as if they had the rate of the newest ones, where that is higher."""


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
        """Share of the time that the work takes."""
        return sum(self.work_s) / (copies * self.slot_s * len(self.work_s))


def needed_with_late(limits: Limits, seen: PoolInput, share: float) -> Need:
    """The smallest number that puts few requests aside, at most what `needed_by_goals` says.

    Args:
        share: of the goal, and of the requests that may miss it.
    """
    most = needed_by_goals(limits, seen, share)
    replay = replayed(limits, seen, share)
    if replay is None or most.infeasible:
        return most
    counts = range(max(limits.min, 1), most.replicas)
    found = next((count for count in counts if _suffices(replay, count * seen.copies, share)), most.replicas)
    if found == most.replicas:
        return most
    text = f"{found} needed for {seen.demand.rate if seen.demand else 0:.3g} requests/s with late ones behind the others"
    return Need(found, text, most.prediction)


def _suffices(replay: Replay, copies: int, share: float) -> bool:
    return replay.busy(copies) <= BUSY and replay.put_aside(copies) <= share * TAIL


def replayed(limits: Limits, seen: PoolInput, share: float) -> Replay | None:
    """The last minutes; None where they are not known well enough, or where the demand has risen since."""
    demand, curve, shape, goal_s = seen.demand, seen.curve, seen.shape, limits.goals.first_token_s
    if demand is None or curve is None or shape is None or goal_s is None or not demand.rate:
        return None
    arrivals, slot_s = seen.arrivals, seen.slot_s
    if len(arrivals) * slot_s < ENOUGH_S or not sum(arrivals) or has_risen(arrivals, slot_s):
        return None
    chunk = shape.mixed_tokens or shape.max_batch_tokens
    prompt_s = demand.uncached.moment() * (curve.prompt_token_s + curve.base_s / chunk)
    each_s = prompt_s + demand.output * curve.decode_token_s
    newest = arrivals[-round(NEWEST_S / slot_s) :]
    scale = max(sum(newest) * len(arrivals) / (sum(arrivals) * len(newest)), 1.0)
    work = tuple(count * each_s * scale for count in arrivals)
    return Replay(slot_s, work, max(goal_s * share - prompt_s, 0.0))

