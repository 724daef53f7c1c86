"""One review of one pool: the number of replicas, the reason, and the inputs that it came from. Pure.

1. Unknown inputs hold the pool: it never shrinks for want of data. Bounds hold always.
2. The need is the smallest number that is predicted to meet 0.75 of each goal for the forecast demand.
3. More replicas at once, at most twice as many; fewer one by one, after a whole `scale_down_after_s` in which fewer
   were predicted to meet 0.7 of each goal.
4. Replicas that were measured to meet the goals in the last minutes suffice, whatever is predicted, while the demand
   does not rise.
5. A goal that is missed for more than a minute although the prediction met it adds a replica, and keeps it while the
   demand lasts.
6. Pools of a deployment go to zero together: while another one serves, the last replica stays, and one is woken. What
   the others compute in the place of a pool at zero is no work that it could see.
7. A pool that went up again after going down needs a longer proof for a while, so that it does not swing. One that
   has just begun to go down gets replicas only for what outlasts their start: a burst is over before they are ready.

Called by the loop's `LoadWatch` and by the clocked simulation, each `REVIEW_S`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.decision import (
    Change,
    Decision,
    Limits,
    Measured,
    Memory,
    PoolInput,
    Reason,
)
from stoker.operator.domain.autoscaling.evidence import is_proven, met_share
from stoker.operator.domain.autoscaling.figures import shown_inputs
from stoker.operator.domain.autoscaling.late_need import needed_with_late
from stoker.operator.domain.autoscaling.load_rule import needed_by_load
from stoker.operator.domain.autoscaling.need import Need, needed_by_goals
from stoker.operator.domain.autoscaling.prediction import TAIL

UP_SHARE, DOWN_SHARE = 0.75, 0.7
"""Of a goal, that a prediction must meet to add and to remove replicas."""
MISS_LASTS_S = 900.0
MEASURED_S = 60.0
"""Time that the measured percentiles cover: a miss that does not outlast it may be one burst."""
SWING_S = 600.0
"""At most one change of direction in this time, but for work that outlasts the start of the replica that it needs."""
REMEMBERED_S = 3600.0


@dataclass(frozen=True)
class Needs:
    """Replicas to have, and replicas without which there is no going down."""

    up: Need
    down: Need


def review(now_s: float, limits: Limits, seen: PoolInput, memory: Memory) -> tuple[Decision, Memory]:
    """Decide the number of replicas now. `now_s` is monotonic."""
    if seen.replicas == 0 < limits.max and (text := _wake(seen)):
        return _decided(now_s, limits, seen, memory, max(limits.min, 1), "Wake", text)
    if seen.replicas and seen.others != "idle":
        limits = replace(limits, min=max(limits.min, 1))
    bounded = min(max(seen.replicas, limits.min), limits.max)
    if bounded != seen.replicas:
        text = f"min {limits.min}, max {limits.max}"
        return _decided(now_s, limits, seen, memory, bounded, "Bounds", text)
    if seen.unknown:
        text = f"not known: {'; '.join(seen.unknown)}"
        memory = replace(memory, needs=(), since_s=None, short_s=None, late_s=None)
        return _decided(now_s, limits, seen, memory, seen.replicas, "Unknown", text)
    if seen.replicas and not seen.ready:
        memory = replace(memory, needs=(), since_s=None)  # a pool that has not begun to serve proves nothing
    needs, proven = needs_of(limits, seen)
    memory = replace(memory, late_s=None) if proven else _with_miss(now_s, limits, seen, memory, needs)
    floor = _floor(now_s, seen, memory)
    floor = min(floor, seen.replicas) if proven else floor
    memory = _with_need(now_s, limits, memory, max(needs.down.replicas, floor))
    memory = _with_shortage(now_s, limits, seen, memory, needs, floor)
    if max(needs.up.replicas, floor) > seen.replicas:
        return _go_up(now_s, limits, seen, memory, needs, floor)
    return _go_down(now_s, limits, seen, memory, needs)


def _wake(seen: PoolInput) -> str:
    """Why a pool without replicas needs one; empty if it does not."""
    if seen.held:
        return f"routers hold {seen.held} requests and the pool has no replica"
    if seen.others == "busy":
        return "another pool of the deployment serves requests and this one has no replica"
    return ""


def needs_of(limits: Limits, seen: PoolInput) -> tuple[Needs, bool]:
    """The replicas that a pool needs, and whether the present ones were measured to suffice."""
    needs, proven = _needs(limits, seen), _has_proof(limits, seen)
    if proven:
        needs = replace(needs, up=_proven_need(limits, seen, needs.up))
    return _relieving(seen, needs), proven


def _relieving(seen: PoolInput, needs: Needs) -> Needs:
    """The needs with the other pool's work, whatever was measured for this pool's own."""
    if seen.relief <= needs.up.replicas:
        return needs
    text = f"{seen.relief} needed with work of the other pool, which has no replicas for it"
    up = replace(needs.up, replicas=seen.relief, text=text)
    return Needs(up, up if seen.relief > needs.down.replicas else needs.down)


def _needs(limits: Limits, seen: PoolInput) -> Needs:
    if limits.mode == "load":
        return Needs(needed_by_load(limits, seen, down=False), needed_by_load(limits, seen, down=True))
    return Needs(_needed(limits, seen, UP_SHARE), _needed(limits, seen, DOWN_SHARE))


def _needed(limits: Limits, seen: PoolInput, share: float) -> Need:
    """By the goals, of which the prediction must meet a share."""
    return (needed_with_late if limits.puts_late_behind else needed_by_goals)(limits, seen, share)


def _has_proof(limits: Limits, seen: PoolInput) -> bool:
    """Whether the present replicas, all ready, were measured to meet the goals with the demand of now."""
    if limits.mode != "slo" or seen.idle or not 0 < seen.replicas <= seen.ready:
        return False
    return is_proven(seen.evidence, limits.goals, _overdue(limits, seen))


def _overdue(limits: Limits, seen: PoolInput) -> float:
    """Requests in queues beyond those whose prompts are computed within the goal of the first token."""
    goal_s, demand, curve = limits.goals.first_token_s, seen.demand, seen.curve
    prompt_s = curve.prompt_token_s * demand.uncached.moment() if demand is not None and curve is not None else 0.0
    if goal_s is None or not prompt_s:
        return 0.0
    return max(seen.waiting - seen.ready * seen.copies * goal_s / prompt_s, 0.0)


def _proven_need(limits: Limits, seen: PoolInput, predicted: Need) -> Need:
    """No more than the present replicas, whatever is predicted."""
    if predicted.replicas <= seen.replicas:
        return predicted
    text = (
        f"{met_share(seen.evidence, limits.goals):.1%} of the last minutes' requests met the goals with {seen.replicas}"
    )
    return Need(seen.replicas, text, predicted.prediction)


# Up


def _go_up(
    now_s: float, limits: Limits, seen: PoolInput, memory: Memory, needs: Needs, floor: int
) -> tuple[Decision, Memory]:
    """To the need at once, at most to twice as many, within max, and one more than there is room for.

    That one pod is what a node autoscaler acts on.
    """
    need = max(needs.up.replicas, floor)
    wanted = min(need, max(2 * seen.replicas, seen.replicas + 1), limits.max)
    after = min(wanted, _room(limits, seen, wanted))
    reason: Reason = "Load" if needs.up.replicas > seen.replicas else "Missed"
    text = needs.up.text if reason == "Load" else f"a goal is missed with {memory.missed_at} replicas"
    if left_s := _burst_left_s(now_s, seen, memory):
        text = f"{text}; that has to last {left_s:.0f} s more, because the pool has just gone down"
        return _decided(now_s, limits, seen, memory, seen.replicas, "Burst", text, needs.up)
    if after < wanted:
        reason, text = "WaitingForRoom", f"{text}; {_room_text(limits)}"
    elif after == seen.replicas:
        reason, text = "AtMax", f"{text}; max is {limits.max}"
    return _decided(now_s, limits, seen, memory, after, reason, text, needs.up)


def _room(limits: Limits, seen: PoolInput, wanted: int) -> int:
    """The most replicas that the nodes, and the other pool of a pair, leave to this one."""
    most = wanted if limits.placeable is None else limits.placeable + 1
    return max(most if limits.beside_other is None else min(most, limits.beside_other), seen.replicas)


def _room_text(limits: Limits) -> str:
    """What of both leaves less."""
    placeable, beside = limits.placeable, limits.beside_other
    if beside is None or (placeable is not None and placeable < beside):
        return f"there is room for {placeable} replicas"
    return f"the other pool leaves room for {beside} replicas"


def _with_shortage(now_s: float, limits: Limits, seen: PoolInput, memory: Memory, needs: Needs, floor: int) -> Memory:
    """Note since when there are too few replicas for the work of now: no forecast, the whole of each goal."""
    need = needs.up.replicas
    if limits.mode == "slo" and seen.demand is not None and need > seen.replicas:
        now = replace(seen, demand=replace(seen.demand, rate=seen.rate))
        need = max(_needed(limits, now, 1.0).replicas, seen.relief)
    if need > seen.replicas or (floor > seen.replicas and _is_missed(limits, seen.measured)):
        return memory if memory.short_s is not None else replace(memory, short_s=now_s)
    return replace(memory, short_s=None)


def _burst_left_s(now_s: float, seen: PoolInput, memory: Memory) -> float:
    """Seconds for which going up would be a second change of direction and the shortage has not outlasted a start."""
    turns = _turns(memory.changes)
    if not turns or memory.changes[-1].up or not seen.ready:
        return 0.0
    since_s = memory.short_s if memory.short_s is not None else now_s
    return max(min(SWING_S - (now_s - turns[-1]), seen.startup_s - (now_s - since_s)), 0.0)


def _with_miss(now_s: float, limits: Limits, seen: PoolInput, memory: Memory, needs: Needs) -> Memory:
    """Note that a goal is missed although all replicas are ready and were predicted to meet it.

    It counts once it has lasted for another measured minute: the misses of one burst are over by then.
    """
    if limits.mode != "slo" or needs.up.infeasible or not _is_missed(limits, seen.measured):
        return replace(memory, late_s=None)
    settled = all(now_s - change.at_s > seen.startup_s + 60 for change in memory.changes if change.up)
    if seen.ready < seen.replicas or not settled or needs.up.replicas > seen.replicas:
        return replace(memory, late_s=None)
    late_s = memory.late_s if memory.late_s is not None else now_s
    memory = replace(memory, late_s=late_s)
    if now_s - late_s < MEASURED_S:
        return memory
    return replace(memory, missed_at=seen.replicas, missed_rate=seen.rate, missed_s=now_s)


def _is_missed(limits: Limits, measured: Measured) -> bool:
    pairs = ((limits.goals.first_token_s, measured.first_token_s), (limits.goals.gap_s, measured.gap_s))
    if limits.goals.first_token_s is not None and measured.late_share > TAIL:
        return True
    return any(goal is not None and found is not None and found > goal for goal, found in pairs)


def _floor(now_s: float, seen: PoolInput, memory: Memory) -> int:
    """One more replica than missed a goal, while the demand is nearly that of then."""
    recent = memory.missed_at and now_s - memory.missed_s <= MISS_LASTS_S
    return memory.missed_at + 1 if recent and seen.rate >= 0.8 * memory.missed_rate else 0


# Down


def _go_down(now_s: float, limits: Limits, seen: PoolInput, memory: Memory, needs: Needs) -> tuple[Decision, Memory]:
    """One fewer, when that was proven for the whole time."""
    lowest = max([limits.min, needs.down.replicas, *(need for _, need in memory.needs)])
    proof_s = limits.scale_down_after_s
    if lowest >= seen.replicas and needs.up.infeasible:
        return _decided(now_s, limits, seen, memory, seen.replicas, "InfeasibleGoal", needs.up.infeasible, needs.up)
    if lowest >= seen.replicas:
        return _decided(now_s, limits, seen, memory, seen.replicas, "Sufficient", needs.up.text, needs.up)
    left_s = _proof_left_s(now_s, limits, memory)
    if left_s > 0:
        text = f"{needs.down.text}; the proof that {seen.replicas - 1} suffice takes {left_s:.0f} s more"
        return _decided(now_s, limits, seen, memory, seen.replicas, "Proving", text, needs.down)
    reason: Reason = "Idle" if seen.replicas == 1 else "Proven"
    text = f"{needs.down.text}, for {proof_s:.0f} s"
    return _decided(now_s, limits, seen, memory, seen.replicas - 1, reason, text, needs.down)


def _proof_left_s(now_s: float, limits: Limits, memory: Memory) -> float:
    """Seconds until the proof is complete: since needs are known, and since the last replica was added."""
    since_s = memory.since_s if memory.since_s is not None else now_s
    ups = [change.at_s for change in memory.changes if change.up]
    left_s = limits.scale_down_after_s - (now_s - max([since_s, *ups[-1:]]))
    turns = _turns(memory.changes)
    if turns and memory.changes[-1].up:  # going down would be another change of direction
        left_s = max(left_s, SWING_S - (now_s - turns[-1]))
    return left_s


def _turns(changes: tuple[Change, ...]) -> list[float]:
    """Times at which the direction changed."""
    pairs = itertools.pairwise(changes)
    return [after.at_s for before, after in pairs if before.up != after.up]


def _with_need(now_s: float, limits: Limits, memory: Memory, need: int) -> Memory:
    """The memory with a need: those that a later, larger one makes void are forgotten, and those that are too old."""
    kept = [(at_s, old) for at_s, old in memory.needs if old > need and now_s - at_s < limits.scale_down_after_s]
    since_s = memory.since_s if memory.since_s is not None else now_s
    return replace(memory, needs=(*kept, (now_s, need)), since_s=since_s)


def _decided(
    now_s: float,
    limits: Limits,
    seen: PoolInput,
    memory: Memory,
    after: int,
    reason: Reason,
    text: str,
    need: Need | None = None,
) -> tuple[Decision, Memory]:
    """The decision with its inputs, and the memory with the change."""
    inputs = shown_inputs(limits, seen, need.prediction if need else None)
    infeasible = need.infeasible if need else None
    decision = Decision(now_s, seen.replicas, after, reason, text, inputs, need.replicas if need else None, infeasible)
    if after == seen.replicas:
        return decision, memory
    recent = [found for found in memory.changes if now_s - found.at_s < REMEMBERED_S]
    changes = (*recent, Change(now_s, seen.replicas, after))
    return decision, replace(memory, changes=changes[-64:])
