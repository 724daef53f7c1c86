"""How a deployment moves from one revision to the next."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.value import Decimal, ForeignName, Int32, Seconds, Value, list_map, rule, rules

ATOMIC = {"x-kubernetes-list-type": "atomic"}


class CanaryStep(Value):
    """One share of the traffic, held until its time and its gates have passed."""

    percent: Annotated[int, Field(ge=1, le=100)]
    hold_seconds: Seconds = 300
    min_requests: Int32 = 0
    """Gates are judged only after the new revision has answered this many."""


class MetricGate(Value):
    """A figure of the new revision, against a limit or against the old revision."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("has(self.max) || has(self.maxRatio)", "a metric gate needs max or maxRatio"))
    )

    metric: Literal["errorRate", "ttftP95Ms", "itlP95Ms", "queueP95Ms"]
    max: Decimal | None = None
    max_ratio: Decimal | None = None
    """New over old: "1.1" allows ten percent more."""


class EvalGate(Value):
    """Questions that the new revision must answer before it gets traffic."""

    name: ForeignName
    prompts: KeyRef
    """Key of a ConfigMap with JSONL lines `{messages, expect}`."""
    min_score: Decimal
    max_drop: Decimal | None = None
    """Against the old revision."""


class Canary(Value):
    """Steps and gates."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.steps.all(step, self.steps.exists_one(other, other.percent == step.percent))",
                "each step needs its own percent",
                field=".steps",
            )
        )
    )

    steps: Annotated[tuple[CanaryStep, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)]
    metric_gates: Annotated[tuple[MetricGate, ...], Field(max_length=8, json_schema_extra=list_map("metric"))] = ()
    eval_gates: Annotated[tuple[EvalGate, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    on_failure: Literal["RollBack", "Pause"] = "RollBack"


class RolloutSettings(Value):
    """`rolling` replaces replicas as the pools' maxSurge and maxUnavailable allow; `canary` shifts traffic in steps."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.type == 'canary' ? has(self.canary) : !has(self.canary)",
                "canary and type: canary belong together",
                field=".canary",
            ),
        )
    )

    type: Literal["rolling", "canary"] = "rolling"
    canary: Canary | None = None
    paused: bool = False
    """Hold the rollout where it is: no replica moves to another revision, and no new revision begins."""
    progress_deadline_seconds: Seconds = 1800
    """A rollout without progress for this long sets `Stalled`; the old revision keeps serving."""
    revision_history_limit: Annotated[int, Field(ge=0, le=20)] = 5
