"""The canary of a deployment: the state in its status, the evidence of its routers, and what follows for the shares.

Pure. Called by `rollout`; decides nothing itself (`domain/rollout/canary`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime

from stoker.operator.api.inferencedeployment import CanaryStatus, GateStatus, RolloutStatus
from stoker.operator.api.rollout import Canary
from stoker.operator.domain.clock import rest_s, timestamp
from stoker.operator.domain.plan import Event, Object, Report
from stoker.operator.domain.pods import is_ready
from stoker.operator.domain.rollout.canary import (
    INTERRUPTED,
    CanaryPlan,
    CanaryState,
    Hand,
    Step,
    decide,
    left_s,
    window_step,
)
from stoker.operator.domain.rollout.evidence import Evidence, read_evidence
from stoker.operator.domain.rollout.gates import Gate, GateResult
from stoker.operator.domain.rollout.headroom import carried_percent
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.inferencedeployment.evaluation import Evaluation, evaluate_gates
from stoker.operator.reconcile.inferencedeployment.queue_time import queued_s
from stoker.operator.reconcile.inferencedeployment.revision import was_interrupted
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, ready_by_revision

FIGURES_S = 10.0
"""The status gets new figures of the gates no more often, unless something was decided."""


@dataclass(frozen=True)
class CanaryTurn:
    """One pass over a canary."""

    status: CanaryStatus
    shares: tuple[tuple[str, int], ...]
    """Percent of the replicas by revision, the new one first; no share of the old one: it is left."""
    serving: frozenset[str]
    """Revisions whose replicas get requests, or are about to."""
    requeue_after_s: float | None = None
    events: tuple[Event, ...] = ()
    create: tuple[Object, ...] = ()
    """Eval tasks."""
    evaluating: bool = False
    """Whether their results are needed."""

    @property
    def rolled_back(self) -> bool:
        return self.status.phase == "Failed"

    @property
    def interrupted(self) -> bool:
        """Whether it ends because another revision is wanted."""
        return self.status.reason == INTERRUPTED

    @property
    def promoted(self) -> bool:
        return self.status.phase == "Promoted"


def plan_canary(view: DeploymentView, current: str | None, target: str) -> CanaryTurn | None:
    """The canary's next state; None where revisions are exchanged at once.

    That is so with `type: rolling`, for the first revision, and while no replica of the old one serves, which leaves
    nothing to compare with.
    """
    settings, rollout = view.deployment.spec.rollout, view.deployment.status.rollout or RolloutStatus()
    known = rollout.canary if rollout.to_revision == target and not was_interrupted(view) else None
    if settings.canary is None or current is None or current == target:
        return None
    if known is None and (_is_empty(view) or _is_replaced(view, rollout, current, target)):
        return None
    old = _read(known) if known is not None else CanaryState(since=view.now)
    plan = _plan(view, settings.canary, queued_s(view, target, old.since or view.now))
    hand = Hand(settings.paused, settings.abort == target, settings.promote == target)
    seen = read_evidence(_reports(view), window_of(target, old), target, current)
    ready, checks = _is_ready(view, plan, old, current, target), Evaluation()
    before = old.phase == "Waiting" and old.percent == 0 and not hand.paused
    if before and ready:
        checks = evaluate_gates(view, settings.canary.eval_gates, current, target)
    carried = carried_percent(_replicas_of(view, current))
    state = decide(plan, old, seen, ready=ready, hand=hand, now=view.now, checks=checks.results, carried=carried)
    state = _with_unknown_names(view, state, target)
    return CanaryTurn(
        status=_written(view, known, old, state),
        shares=_replica_shares(plan, state, current, target, keep=settings.canary.on_failure == "Pause"),
        serving=frozenset({current, target} if state.percent or not state.over else {current}),
        requeue_after_s=left_s(plan, state, view.now),
        events=_events(target, old, state),
        create=() if state.over else checks.create,
        evaluating=before and not state.over,
    )


def plan_return(view: DeploymentView, current: str | None, wanted: str | None) -> CanaryTurn | None:
    """The end of a canary that another revision interrupts; None when nothing of it is left, or nothing interrupts it.

    Its revision stays the target until the old one can take all of its traffic. Where no canary follows, routers get no
    shares and would use its replicas again, so those go before.

    Args:
        wanted: the revision to go to; None while the rollout is paused or no model is found.
    """
    settings, rollout = view.deployment.spec.rollout, view.deployment.status.rollout or RolloutStatus()
    known, left = rollout.canary, rollout.to_revision
    if known is None or current is None or left is None or left == current:
        return None
    if wanted in (None, left) and not was_interrupted(view):
        return None
    old, carried = _read(known), carried_percent(_replicas_of(view, current))
    hand = Hand(abort=settings.abort == left, instead=wanted)
    state = decide(CanaryPlan(()), old, Evidence(), ready=False, hand=hand, now=view.now, carried=carried)
    if wanted is not None and not state.percent and not _must_go(view, left, current, wanted):
        return None
    return CanaryTurn(
        status=_written(view, known, old, state),
        shares=((current, 100),),
        serving=frozenset({current, left} if state.percent else {current}),
        events=_events(left, old, state),
    )


def _is_empty(view: DeploymentView) -> bool:
    return not any(live.spec.bounded_replicas for live in view.pools)


def _is_replaced(view: DeploymentView, rollout: RolloutStatus, current: str, target: str) -> bool:
    """Whether others serve in place of the old revision, which has no ready replica: a canary would give it all of
    their traffic. A move that began so goes on so."""
    ready = sum((ready_by_revision(view, live) for live in view.pools if not live.deleting), Counter[str]())
    if ready[current]:
        return False
    left_out = rollout.to_revision if rollout.canary is not None and not rollout.canary.percent else None
    others = any(number for name, number in ready.items() if name != left_out)
    return others or (rollout.to_revision == target and rollout.canary is None)


def _must_go(view: DeploymentView, left: str, current: str, wanted: str) -> bool:
    """Whether replicas of an interrupted canary would get requests again because no canary follows that leaves them
    out."""
    if wanted == left or (wanted != current and view.deployment.spec.rollout.canary is not None):
        return False
    return any(ready_by_revision(view, live)[left] for live in view.pools if not live.deleting)


def with_canary(progress: RolloutStatus, turn: CanaryTurn | None, time: str) -> RolloutStatus:
    """The rollout's progress with the canary's; a new state of the canary is progress.

    Where revisions are exchanged at once, a canary that had begun is over: its share holds no more.
    """
    if turn is None:
        left = progress.canary is not None and progress.canary.phase != "Promoted"
        return progress.model_copy(update={"canary": None, "progressed_at": time}) if left else progress
    old = progress.canary
    moved = old is None or (old.phase, old.step) != (turn.status.phase, turn.status.step)
    changes = {"canary": turn.status, "progressed_at": time if moved else progress.progressed_at}
    if turn.rolled_back and not turn.interrupted:
        changes["phase"] = "RolledBack"
    return progress.model_copy(update=changes)


def traffic_shares(rollout: RolloutStatus | None, current: str | None) -> tuple[list[dict[str, object]], str]:
    """Shares of the routers' snapshot and the name of the window, by the status; empty without a canary."""
    canary = rollout.canary if rollout is not None else None
    if rollout is None or canary is None or canary.phase == "Promoted" or not (rollout.to_revision and current):
        return [], ""
    shares = [(rollout.to_revision, canary.percent), (current, 100 - canary.percent)]
    listed: list[dict[str, object]] = [{"revision": name, "percent": percent} for name, percent in shares]
    return listed, window_of(rollout.to_revision, _read(canary))


def window_of(target: str, state: CanaryState) -> str:
    """The name of the time in which the present share is measured; empty while there is none."""
    step = window_step(state)
    return f"{target}.{step + 1}" if step is not None else ""


def _with_unknown_names(view: DeploymentView, state: CanaryState, target: str) -> CanaryState:
    """The state with a line for `promote` or `abort` of a revision that is none: a value that was mistyped."""
    settings = view.deployment.spec.rollout
    known = {target, *(found.name for found in view.deployment.status.revisions)}
    wrong = [
        f"spec.rollout.{field} {name} is no revision of this deployment; the canary is {target}"
        for field, name in (("promote", settings.promote), ("abort", settings.abort))
        if name is not None and name not in known
    ]
    return state if state.over or not wrong else replace(state, message="; ".join((state.message, *wrong)))


def _plan(view: DeploymentView, canary: Canary, queued_s: float) -> CanaryPlan:
    """What the spec asks for. The time of the replicas in queues is added to that in which they must become ready."""
    steps = tuple(Step(step.percent, float(step.hold_seconds), step.min_requests) for step in canary.steps)
    gates = tuple(Gate(gate.metric, _number(gate.max), _number(gate.max_ratio)) for gate in canary.metric_gates)
    pairs = any(pool.role != "colocated" for pool in view.deployment.spec.pools)
    deadline_s = view.deployment.spec.rollout.progress_deadline_seconds + queued_s
    return CanaryPlan(steps, gates, pairs, deadline_s)


def _reports(view: DeploymentView) -> dict[str, Report | None]:
    ready = [pod["metadata"] for pod in view.routers if is_ready(pod)]
    return {pod["name"]: view.seen.reports.get(pod["uid"]) for pod in ready}


def _is_ready(view: DeploymentView, plan: CanaryPlan, state: CanaryState, current: str, target: str) -> bool:
    """Whether every pool has the replicas of the present step, and the old revision those that stay.

    A pool that came with the new revision has no replicas of the old one. A pool without replicas waits for none.
    """
    shares = dict(_replica_shares(plan, state, current, target, keep=False))
    for pool in view.deployment.spec.pools:
        live = view.engine_pool(pool)
        if live is None or live.status.observed_generation != live.metadata.generation:
            return False
        has_old = any(found.name == current for found in live.spec.revisions)
        expected = shares if has_old else {target: 100}
        if {found.name: found.share for found in live.spec.revisions if found.share} != expected:
            return False
        counts = {found.name: found for found in live.status.revisions}
        new = counts.get(target)
        if new is None or new.ready < new.desired:
            return False
        if live.spec.bounded_replicas and live.status.ready_replicas == 0:
            return False
    return True


def _replicas_of(view: DeploymentView, current: str) -> list[tuple[int, int]]:
    """(ready replicas of the old revision, replicas) of each pool that has it; of every pool where none has it any
    more, because its pool was deleted."""
    pools = [live for live in view.pools if not live.deleting]
    having = [live for live in pools if any(found.name == current for found in live.spec.revisions)]
    return [(ready_by_revision(view, live)[current], live.spec.bounded_replicas) for live in having or pools]


def _replica_shares(
    plan: CanaryPlan, state: CanaryState, current: str, target: str, *, keep: bool
) -> tuple[tuple[str, int], ...]:
    """The new revision gets the replicas of its step. The old one keeps at least one until the last step has passed.

    Args:
        keep: whether a revision that has failed keeps a replica.
    """
    if state.phase == "Promoted":
        return ((target, 100),)
    if state.phase == "Failed":
        return ((target, 1), (current, 99)) if keep else ((current, 100),)
    percent = min(plan.steps[min(state.step, len(plan.steps) - 1)].percent, 99)
    return (target, percent), (current, 100 - percent)


# The status


def _read(known: CanaryStatus) -> CanaryState:
    results = tuple(
        GateResult(
            found.metric, found.verdict, _number(found.value), _number(found.base), found.samples, found.base_samples,
            found.message or "",
        )
        for found in known.gates
    )  # fmt: skip
    return CanaryState(
        step=max(known.step - 1, 0),
        percent=known.percent,
        phase=known.phase,
        since=datetime.fromisoformat(known.since) if known.since else None,
        reason=known.reason or "",
        message=known.message or "",
        results=results,
    )


def _written(view: DeploymentView, known: CanaryStatus | None, old: CanaryState, state: CanaryState) -> CanaryStatus:
    """The state for the status. Figures alone change it only each `FIGURES_S`."""
    same = replace(state, results=(), message="") == replace(old, results=(), message="")
    same = same and (not state.over or shortened(state.message) == old.message)
    verdicts = [found.verdict for found in state.results] == [found.verdict for found in old.results]
    if known is not None and same and verdicts and (state.over or _is_young(view, known)):
        return known
    return CanaryStatus(
        phase=state.phase,
        step=state.step + 1,
        percent=state.percent,
        since=timestamp(state.since) if state.since else None,
        reason=state.reason,
        message=shortened(state.message) or None,
        judged_at=view.time,
        gates=tuple(_gate(found) for found in state.results),
    )


def _is_young(view: DeploymentView, known: CanaryStatus) -> bool:
    judged = datetime.fromisoformat(known.judged_at) if known.judged_at else None
    return judged is not None and rest_s(judged, FIGURES_S, view.now) > 0


def _gate(found: GateResult) -> GateStatus:
    return GateStatus(
        metric=found.metric,
        verdict=found.verdict,
        value=_text(found.value),
        base=_text(found.base),
        samples=found.samples,
        base_samples=found.base_samples,
        message=shortened(found.message) or None,
    )


def _events(target: str, old: CanaryState, state: CanaryState) -> tuple[Event, ...]:
    """An Event for each share that begins, and for the end."""
    if (old.phase, old.step) == (state.phase, state.step) or state.phase == "Waiting":
        return ()
    if state.reason == INTERRUPTED:
        return (Event("Normal", "CanaryInterrupted", shortened(f"revision {target}: {state.message}")),)
    kind = "Warning" if state.phase == "Failed" else "Normal"
    reason = {"Holding": "CanaryStep", "Promoted": "CanaryPromoted", "Failed": "CanaryFailed"}[state.phase]
    return (Event(kind, reason, shortened(f"revision {target}: {state.message}")),)


def _number(text: str | None) -> float | None:
    return float(text) if text is not None else None


def _text(value: float | None) -> str | None:
    return None if value is None else f"{value:.6f}".rstrip("0").rstrip(".")
