"""The next state of a canary: which share the new revision gets, or that it is given up. Pure.

1. A step's share begins when the replicas for it are ready; its window begins with it.
2. A canary that ends without promotion is `Failed`: by a gate, by hand, at its deadline, or because another revision is
   wanted. Its share never rises again; it keeps what the replicas of the old revision cannot take until they are back.
   It keeps none where its answers help no client (`errorRate`), or where a person takes it away (abort).
3. A share rises only when every report is there, every gate has passed on enough answers, and the step's time is over.
4. A pause keeps the share; gates are judged on. Abort and promotion by hand count before everything else.

Called by the InferenceDeployment's reconcile, which keeps the state in the status.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from stoker.operator.domain.rollout.evidence import Evidence
from stoker.operator.domain.rollout.gates import (
    ENOUGH,
    ERROR_RATE,
    EVAL,
    Gate,
    GateResult,
    judge,
    judge_transfers,
)

Phase = Literal["Waiting", "Holding", "Promoted", "Failed"]
WAITS = "WaitingForReplicas"
"""Reason while the replicas of a step are not ready."""
INTERRUPTED = "Interrupted"
"""Reason of a canary that ends because another revision is wanted."""


@dataclass(frozen=True)
class Step:
    """Share of the traffic, until its time and its gates have passed."""

    percent: int
    hold_s: float
    min_requests: int = 0


@dataclass(frozen=True)
class CanaryPlan:
    """What the user asks for."""

    steps: tuple[Step, ...]
    gates: tuple[Gate, ...] = ()
    transfers: bool = False
    """Whether the pools hand requests over to each other, so that transfers are judged."""
    deadline_s: float = 1800.0
    """Time in which the replicas of a step must become ready; infinite while one waits in a queue."""

    def needed(self, step: Step) -> int:
        """Answers of the new revision before the gates of the step are judged."""
        return step.min_requests or (ENOUGH if self.gates else 0)


@dataclass(frozen=True)
class CanaryState:
    """Kept in the status from pass to pass."""

    step: int = 0
    percent: int = 0
    """Of the traffic, now."""
    phase: Phase = "Waiting"
    since: datetime | None = None
    """When the step was entered (`Waiting`) or its share began (`Holding`)."""
    reason: str = ""
    message: str = ""
    results: tuple[GateResult, ...] = ()

    @property
    def over(self) -> bool:
        return self.phase in ("Promoted", "Failed")


@dataclass(frozen=True)
class Hand:
    """What people ask for by the spec."""

    paused: bool = False
    abort: bool = False
    promote: bool = False
    instead: str | None = None
    """Another revision that is wanted in place of this one."""


def decide(
    plan: CanaryPlan,
    state: CanaryState,
    seen: Evidence,
    *,
    ready: bool,
    hand: Hand,
    now: datetime,
    checks: tuple[GateResult, ...] = (),
    carried: int = 100,
) -> CanaryState:
    """Decide the next state.

    Args:
        seen: what the routers counted since the present share began.
        ready: whether the replicas for the present step are ready.
        checks: verdicts that must be there before the first share.
        carried: percent of the traffic that the old revision can take now.
    """
    state = _by_hand(state, hand)
    if not state.over:
        since = min(state.since or now, now)  # a clock that was put back begins the time of the step anew
        state = _judge(plan, replace(state, step=min(state.step, len(plan.steps) - 1), since=since), seen)
    if not state.over:
        if state.phase == "Holding":
            state = _hold(plan, state, seen, hand, now)
        elif state.percent == 0 and ready and checks:
            state = _check(plan, replace(state, results=checks), hand, now)
        else:
            state = _wait(plan, state, ready, hand, now)
    if state.phase != "Failed":
        return state
    return replace(state, percent=0 if hand.abort else min(state.percent, 100 - carried))


def _by_hand(state: CanaryState, hand: Hand) -> CanaryState:
    """The state as the spec ends it, if it does."""
    if hand.instead is not None:
        return _failed(state, INTERRUPTED, f"revision {hand.instead} is wanted in its place")
    if hand.promote and state.phase != "Promoted":
        return replace(
            state, phase="Promoted", percent=100, reason="PromotedByHand", message="spec.rollout.promote names it"
        )
    if hand.abort and not state.over:
        return _failed(state, "AbortedByHand", "spec.rollout.abort names it")
    return state


def window_step(state: CanaryState) -> int | None:
    """The step in whose window the present share is measured; None before the first."""
    return None if state.percent == 0 else state.step - 1 if state.phase in ("Waiting", "Promoted") else state.step


def left_s(plan: CanaryPlan, state: CanaryState, now: datetime) -> float | None:
    """Seconds until time alone can change the state; None where no time runs."""
    if state.over or state.since is None:
        return None
    limit_s = plan.deadline_s if state.phase == "Waiting" else plan.steps[min(state.step, len(plan.steps) - 1)].hold_s
    left = limit_s - (now - state.since).total_seconds()
    return left if 0 < left < math.inf else None


def _check(plan: CanaryPlan, state: CanaryState, hand: Hand, now: datetime) -> CanaryState:
    """Begin the first share when every check has passed."""
    bad = next((found for found in state.results if found.verdict == "Failed"), None)
    if bad is not None:
        return _failed(state, "GateFailed", f"{bad.metric}: {bad.message}")
    waiting = next((found for found in state.results if found.verdict == "Waiting"), None)
    if waiting is not None:
        return replace(state, reason="Evaluating", message=f"{waiting.metric}: {waiting.message}")
    return _wait(plan, state, True, hand, now)


def _wait(plan: CanaryPlan, state: CanaryState, ready: bool, hand: Hand, now: datetime) -> CanaryState:
    """Begin the step's share when its replicas are ready."""
    step = plan.steps[state.step]
    assert state.since is not None
    if hand.paused:
        return replace(state, since=now, reason="Paused", message=f"{_at(plan, state)} waits: spec.rollout.paused")
    if ready:
        text = f"{_at(plan, state)} begins"
        return replace(
            state,
            phase="Holding",
            percent=step.percent,
            since=now,
            reason="StepBegan",
            message=text,
            results=evaluated(state),
        )
    if (now - state.since).total_seconds() > plan.deadline_s:
        return _failed(state, "NotReady", f"the replicas for {step.percent} % were not ready in {plan.deadline_s:g} s")
    return replace(state, reason=WAITS, message=f"{_at(plan, state)} waits for its replicas")


def _hold(plan: CanaryPlan, state: CanaryState, seen: Evidence, hand: Hand, now: datetime) -> CanaryState:
    """Go on when everything has passed."""
    step = plan.steps[state.step]
    obstacle = _obstacle(step, state, seen, plan.needed(step), hand, now)
    if obstacle is not None:
        reason, text = obstacle
        return replace(state, reason=reason, message=f"{_at(plan, state)}: {text}")
    if state.step + 1 == len(plan.steps):
        return replace(state, phase="Promoted", percent=100, reason="GatesPassed", message="every step has passed")
    text = f"{_at(plan, state)} has passed"
    return replace(state, step=state.step + 1, phase="Waiting", since=now, reason="GatesPassed", message=text)


def evaluated(state: CanaryState) -> tuple[GateResult, ...]:
    """The verdicts of eval gates."""
    return tuple(found for found in state.results if found.metric.startswith(EVAL))


def _judge(plan: CanaryPlan, state: CanaryState, seen: Evidence) -> CanaryState:
    """Judge the gates of the present share. The first one that failed ends the canary, before others that of wrong
    answers, which leave it no share."""
    step = window_step(state)
    if step is None:
        return state
    judged = tuple(_judged(gate, seen, plan.needed(plan.steps[step]), state) for gate in plan.gates)
    judged += (judge_transfers(seen),) if plan.transfers else ()
    state = replace(state, results=(*evaluated(state), *judged))
    failed = sorted((found for found in judged if found.verdict == "Failed"), key=lambda one: one.metric != ERROR_RATE)
    if not failed:
        return state
    text = f"{failed[0].metric} at {state.percent} %: {failed[0].message}"
    percent = 0 if failed[0].metric == ERROR_RATE else state.percent
    return replace(_failed(state, "GateFailed", text), percent=percent)


def _judged(gate: Gate, seen: Evidence, needed: int, state: CanaryState) -> GateResult:
    """The verdict. With all traffic there is no old revision to compare with; an earlier step has compared them."""
    result = judge(gate, seen, needed)
    compared = state.percent == 100 and state.step > 0 and gate.max_ratio is not None
    alone = compared and result.verdict == "Waiting"
    if alone and seen.new.requests >= needed and result.samples >= ENOUGH:
        return replace(result, verdict="Passed", message="at 100 % there is no old revision to compare with")
    return result


def _obstacle(
    step: Step, state: CanaryState, seen: Evidence, needed: int, hand: Hand, now: datetime
) -> tuple[str, str] | None:
    """Reason and text of what keeps the share from rising."""
    assert state.since is not None
    if hand.paused:
        return "Paused", "spec.rollout.paused"
    if seen.missing:
        return "MissingData", "; ".join(seen.missing)
    if seen.new.requests < needed:
        return "TooFewRequests", f"{seen.new.requests} of {needed} answers of the new revision"
    waiting = next((found for found in state.results if found.verdict != "Passed"), None)
    if waiting is not None:
        return "TooFewRequests", f"{waiting.metric} waits: {waiting.message}"
    if now - state.since < timedelta(seconds=step.hold_s):
        return "Holding", f"its gates pass; it is held for {step.hold_s:g} s"
    return None


def _failed(state: CanaryState, reason: str, message: str) -> CanaryState:
    return replace(state, phase="Failed", reason=reason, message=message)


def _at(plan: CanaryPlan, state: CanaryState) -> str:
    return f"step {state.step + 1} of {len(plan.steps)} ({plan.steps[state.step].percent} %)"
