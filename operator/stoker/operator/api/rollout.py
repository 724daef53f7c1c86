"""The move of a deployment from one revision to the next."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.enginepool import RevisionName
from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.value import (
    Decimal,
    Fraction,
    Int32,
    Positive,
    Seconds,
    Value,
    forbidden,
    list_map,
    rule,
    rules,
)

ATOMIC = {"x-kubernetes-list-type": "atomic"}


class CanaryStep(Value):
    """Share of the traffic, until its time and its gates have passed."""

    percent: Annotated[int, Field(ge=1, le=100)]
    hold_seconds: Seconds = 300
    min_requests: Int32 = 0
    """Answers of the new revision before the gates are evaluated; 0 with metric gates: 20."""


class MetricGate(Value):
    """Metric of the new revision, compared with a limit or the old revision."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("has(self.max) || has(self.maxRatio)", "a metric gate needs max or maxRatio"),
            rule(
                "!has(self.max) || (self.metric == 'errorRate' ? double(self.max) <= 1.0 : double(self.max) > 0.0)",
                "max must be above 0, of errorRate at most 1",
                shown="got {self.max}, allowed: above 0, of errorRate 0 to 1",
                field=".max",
            ),
        )
    )

    metric: Literal["errorRate", "ttftP95Ms", "itlP95Ms", "queueP95Ms"]
    max: Decimal | None = None
    max_ratio: Positive | None = None
    """Limit of new over old: "1.1" allows ten percent more."""


GateName = Annotated[str, Field(max_length=58, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class EvalGate(Value):
    """Questions that the new revision must answer before it gets traffic."""

    name: GateName
    prompts: KeyRef
    """Key of a ConfigMap with JSONL lines `{messages, expect}` or `{prompt, expect}`."""
    min_score: Fraction
    max_drop: Fraction | None = None
    """Largest loss of score against the old revision."""
    max_divergence: Fraction | None = None
    """Largest share of greedy answers that differ from the old revision's, for equal weights."""


MAX_STEPS = 16
_INDEXES = list(range(MAX_STEPS - 1))


class Canary(Value):
    """Steps and gates of a canary."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"{_INDEXES}.all(i, i + 1 >= self.steps.size() || self.steps[i].percent < self.steps[i + 1].percent)",
                "percent must rise from step to step",
                shown="percent must rise, got {self.steps.map(s, s.percent)}",
                field=".steps",
            )
        )
    )

    steps: Annotated[tuple[CanaryStep, ...], Field(min_length=1, max_length=MAX_STEPS, json_schema_extra=ATOMIC)]
    metric_gates: Annotated[tuple[MetricGate, ...], Field(max_length=8, json_schema_extra=list_map("metric"))] = ()
    eval_gates: Annotated[tuple[EvalGate, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    on_failure: Literal["RollBack", "Pause"] = "RollBack"
    """Both take the traffic away; `Pause` keeps a replica of the failed revision."""


class RolloutSettings(Value):
    """`rolling` replaces replicas; `canary` shifts traffic in steps."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.type == 'canary' ? has(self.canary) : !has(self.canary)",
                "canary is needed with type canary, and only there",
                field=".canary",
            ),
            forbidden(
                "self.type == 'canary' || !(has(self.promote) || has(self.abort))",
                "promote and abort need type canary",
            ),
        )
    )

    type: Literal["rolling", "canary"] = "rolling"
    canary: Canary | None = None
    promote: RevisionName | None = None
    """Revision that gets all traffic now, whatever its gates say."""
    abort: RevisionName | None = None
    """Revision that is given up now."""
    paused: bool = False
    """Stop the rollout where it is, and begin no other."""
    progress_deadline_seconds: Seconds = 1800
    """Time without progress that sets `Stalled`; the old revision keeps serving."""
    revision_history_limit: Annotated[int, Field(ge=0, le=20)] = 5
