"""The verdict of each gate of a canary, with the figures that it was made from. Pure.

A gate compares the new revision with a limit, with the old revision in the same window, or with both. It passes or
fails only on enough answers; until then it waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stoker.operator.domain.rollout.evidence import Evidence, RevisionCounts

ENOUGH = 20
"""Samples that a 95th percentile or a comparison needs at least, and answers where a step names no number."""
ERROR_RATE = "errorRate"
"""Metric of a revision whose answers help no client, while those of a slow one do."""
METRICS = (ERROR_RATE, "ttftP95Ms", "itlP95Ms", "queueP95Ms")
TRANSFERS = "transferErrorRate"
"""Metric of the gate that every canary of prefill and decode pools has: what fails there, no client sees."""
MOST_FAILED, MOST_RATIO = 0.05, 2.0
"""Share of failed transfers that fails it, if it is also so many times that of the old revision."""
EVAL = "eval:"
"""Beginning of the metric of an eval gate's result."""
Verdict = Literal["Passed", "Failed", "Waiting"]


@dataclass(frozen=True)
class Gate:
    """Limits of one metric of the new revision; at least one of both."""

    metric: str
    max: float | None = None
    max_ratio: float | None = None
    """Of the new revision's value over the old one's."""


@dataclass(frozen=True)
class GateResult:
    """A verdict and its inputs: values in the metric's unit, sample counts of both revisions."""

    metric: str
    verdict: Verdict
    value: float | None
    base: float | None
    """The old revision's value; None where the gate does not compare."""
    samples: int
    base_samples: int
    message: str


@dataclass(frozen=True)
class EvalLimits:
    """Limits of one eval gate, as shares of its questions."""

    name: str
    min_score: float
    max_drop: float | None = None
    """Of the score, against the old revision."""
    max_divergence: float | None = None
    """Greedy answers that differ from the old revision's; for equal weights."""

    @property
    def compares(self) -> bool:
        """Whether the old revision's answers count."""
        return self.max_drop is not None or self.max_divergence is not None


def judge_eval(limits: EvalLimits, result: Mapping[str, Any]) -> GateResult:
    """Judge the result of an eval task (`stoker.router.evaluate`)."""
    try:
        number, differs = int(result["questions"]), int(result["differs"])
        silent = int(result.get("base_failed", 0)) == number
        score, base = float(result["score"]), float(result["base_score"])
    except (KeyError, TypeError, ValueError):
        return not_evaluated(limits.name, f"its task's result cannot be read: {result}", over=True)
    problem = None
    if score < limits.min_score:
        problem = f"score {score:.3g} is below {limits.min_score:g}"
    elif silent and limits.compares:
        problem = f"the old revision answered none of {number} questions: nothing to compare with"
    elif limits.max_drop is not None and base - score > limits.max_drop:
        problem = f"score {score:.3g} against {base:.3g} of the old revision: a drop of more than {limits.max_drop:g}"
    elif limits.max_divergence is not None and differs > limits.max_divergence * number:
        problem = f"{differs} of {number} answers differ from the old revision's: more than {limits.max_divergence:.0%}"
    text = (
        problem or f"score {score:.3g} of {number} questions, {base:.3g} of the old revision; {differs} answers differ"
    )
    return GateResult(f"{EVAL}{limits.name}", "Failed" if problem else "Passed", score, base, number, number, text)


def not_evaluated(name: str, message: str, *, over: bool = False) -> GateResult:
    """The verdict without a result; `over`: none will come."""
    return GateResult(f"{EVAL}{name}", "Failed" if over else "Waiting", None, None, 0, 0, message)


def judge(gate: Gate, seen: Evidence, needed: int) -> GateResult:
    """Judge one gate on at least `needed` answers of the new revision."""
    value, samples = _measure(gate.metric, seen.new)
    base, base_samples = _measure(gate.metric, seen.old)
    enough = max(needed if gate.metric == "errorRate" else ENOUGH, 1)

    def result(verdict: Verdict, message: str) -> GateResult:
        compared = gate.max_ratio is not None
        return GateResult(
            gate.metric, verdict, value, base if compared else None, samples, base_samples if compared else 0, message
        )

    if seen.new.requests < needed or samples < enough or value is None:
        text = f"{_samples(gate)} {samples} of {enough}, answers {seen.new.requests} of {needed}"
        return result("Waiting", text)
    if gate.max is not None and value > gate.max:
        return result("Failed", f"{_figure(gate, value)} is above {_figure(gate, gate.max)}")
    if gate.max_ratio is None:
        return result("Passed", f"{_figure(gate, value)} is at most {_figure(gate, gate.max or 0)}")
    if base is None or base_samples < ENOUGH:
        return result("Waiting", f"{_samples(gate)} of the old revision: {base_samples} of {ENOUGH}")
    limit = base * gate.max_ratio
    both = f"{_figure(gate, value)} against {_figure(gate, base)} of the old revision"
    if value > limit:
        return result("Failed", f"{both}: more than {gate.max_ratio:g} times as much")
    return result("Passed", f"{both}: at most {gate.max_ratio:g} times as much")


def judge_transfers(seen: Evidence) -> GateResult:
    """Judge the hand-overs between the pools of the new revision. It passes on too few: requests need not be split."""
    new, old = seen.new, seen.old
    value = new.failed_splits / new.splits if new.splits else None
    base = old.failed_splits / old.splits if old.splits >= ENOUGH else None
    limit = max(MOST_FAILED, MOST_RATIO * (base or 0.0))
    beside = f", {base:.2%} of the old revision" if base is not None else ""
    text = f"{new.failed_splits} of {new.splits} transfers between its pools failed{beside}"
    failed = value is not None and new.splits >= ENOUGH and value > limit
    if failed:
        text = f"{text}: more than {limit:.2%}"
    return GateResult(TRANSFERS, "Failed" if failed else "Passed", value, base, new.splits, old.splits, text)


def _measure(metric: str, counts: RevisionCounts) -> tuple[float | None, int]:
    """Value and number of samples."""
    if metric == "errorRate":
        return (counts.errors / counts.requests if counts.requests else None), counts.requests
    if metric not in METRICS:
        raise ValueError(f"metric {metric} is not measured; allowed: {', '.join(METRICS)}")
    times = {"ttftP95Ms": counts.first_token_s, "itlP95Ms": counts.token_gap_s, "queueP95Ms": counts.queue_s}
    found = times[metric]
    seconds = found.quantile(0.95)
    return (seconds * 1000 if seconds is not None else None), found.total


def _samples(gate: Gate) -> str:
    return {"errorRate": "answers", "ttftP95Ms": "streams", "itlP95Ms": "gaps", "queueP95Ms": "queued requests"}[
        gate.metric
    ]


def _figure(gate: Gate, value: float) -> str:
    return f"{value:.2%}" if gate.metric == "errorRate" else f"{value:.1f} ms"
