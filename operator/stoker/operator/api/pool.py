"""One pool of an InferenceDeployment: replicas of one role, alike in hardware and parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.gang_scheduling import PoolScheduling
from stoker.operator.api.pod_fields import POD_RULES, PodFields, ranks_per_pod
from stoker.operator.api.value import Count, IntOrPercent, Seconds, Value, forbidden, rule, rules

Role = Literal["colocated", "prefill", "decode"]
Degree = Annotated[int, Field(ge=1, le=1024)]
Replicas = Annotated[int, Field(ge=0, le=10000)]
PoolName = Annotated[str, Field(max_length=12, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]


class EngineParallelism(Value):
    """Layout of one replica over its ranks."""

    tensor: Degree = 1
    pipeline: Degree = 1
    data: Degree = 1
    expert: Degree = 1
    """Runs of whole experts over the tensor ranks."""


MIN_UP_TO_MAX = rule(
    "self.min <= self.max",
    "min is above max",
    shown="min {self.min} is above max {self.max}",
    field=".min",
)
"""Of two fields that bound the replicas."""


class Autoscaling(Value):
    """Automatic number of replicas; without it `replicas` holds."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            MIN_UP_TO_MAX,
            rule(
                "self.mode != 'slo' || has(self.ttftMs) || has(self.itlMs)",
                "mode slo needs ttftMs, itlMs or both",
                field=".mode",
            ),
            *(
                rule(
                    f"self.mode in {modes} || !has(self.{field})",
                    f"{field} has no effect with this mode",
                    shown=f"{field} has no effect with mode {{self.mode}}",
                    field=f".{field}",
                    reason="FieldValueForbidden",
                )
                for field, modes in (
                    ("ttftMs", ["slo"]),
                    ("itlMs", ["slo"]),
                    ("scaleDownAfterSeconds", ["slo", "load"]),
                )
            ),
        )
    )

    min: Replicas = 1
    """Least replicas, whatever `/scale` has."""
    max: Annotated[int, Field(ge=1, le=10000)]
    """Most replicas, whatever `/scale` has."""
    ttft_ms: Count | None = None
    """Goal of the time to the first token, 95th percentile in milliseconds."""
    itl_ms: Count | None = None
    """Goal of the time between tokens, 95th percentile in milliseconds."""
    mode: Literal["slo", "load", "fixed", "external"] = "slo"
    """`slo`: by goals; `load`: by the use of cache and seats; `fixed`: a constant number, of prefill and decode pools a
    constant ratio of the total in `/scale` of the decode pool; `external`: an HPA or KEDA writes `/scale`."""
    scale_down_after_seconds: Seconds | None = None
    """Time in which fewer replicas sufficed before one goes; default 300."""


class Pool(PodFields):
    """Replicas of one role."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *POD_RULES,
            forbidden(
                "self.role == oldSelf.role", "role cannot be changed: give a pool of another role another name", ".role"
            ),
            rule(
                "self.podsPerReplica * r == p.tensor * p.pipeline * p.data",
                "podsPerReplica x ranksPerPod must equal tensor x pipeline x data",
                shown="podsPerReplica {self.podsPerReplica} x ranksPerPod {r} = {self.podsPerReplica * r} ranks,"
                " but tensor {p.tensor} x pipeline {p.pipeline} x data {p.data} = {p.tensor * p.pipeline * p.data}",
                names={"p": "self.parallelism", "r": ranks_per_pod("self")},
                field=".parallelism",
            ),
            rule(
                "p.tensor % p.expert == 0 || p.expert == p.data && p.tensor * p.pipeline == 1",
                "expert must divide tensor, or be data with tensor and pipeline 1",
                shown="expert {p.expert} does not divide tensor {p.tensor}",
                names={"p": "self.parallelism"},
                field=".parallelism.expert",
            ),
            rule(
                "!has(self.autoscaling)"
                " || (self.replicas >= self.autoscaling.min && self.replicas <= self.autoscaling.max)",
                "replicas must lie between autoscaling.min and autoscaling.max",
                shown="replicas {self.replicas} does not lie between autoscaling.min {self.autoscaling.min}"
                " and autoscaling.max {self.autoscaling.max}",
                field=".replicas",
            ),
            *(
                rule(
                    f"self.role != '{role}' || !has(self.autoscaling) || !has(self.autoscaling.{goal})",
                    f"{goal} is a goal of {other} pools",
                    field=f".autoscaling.{goal}",
                    reason="FieldValueForbidden",
                )
                for role, goal, other in (("prefill", "itlMs", "decode"), ("decode", "ttftMs", "prefill"))
            ),
            rule(
                "[self.maxSurge, self.maxUnavailable].exists(m, m != 0 && m != '0%')",
                "maxSurge and maxUnavailable cannot both be 0: no replica could ever be replaced",
                field=".maxSurge",
            ),
        )
    )

    name: PoolName
    role: Role = "colocated"
    replicas: Replicas = 1
    """Number of replicas; with autoscaling only the first one."""
    pods_per_replica: Degree = 1
    """Pods of one replica."""
    parallelism: EngineParallelism = EngineParallelism()
    scheduling: PoolScheduling | None = None
    autoscaling: Autoscaling | None = None
    max_surge: IntOrPercent = 1
    """Replicas above `replicas` during a rollout: a number or a percentage."""
    max_unavailable: IntOrPercent = 0
    """Replicas that may be missing during a rollout: a number or a percentage."""


SCALED_BY_STOKER = ("slo", "load")
"""Modes of `autoscaling` in which Stoker sets the replicas."""
_OWN_FIELDS = ("name", "role", "replicas", "autoscaling", "max_surge", "max_unavailable")


def flipping_pools(pools: Sequence[Pool]) -> tuple[Pool, Pool] | None:
    """The two pools whose replicas may change their role; None where they differ or Stoker does not scale both.

    A replica of several pods keeps its role.
    """
    if len(pools) != 2 or any(pool.role == "colocated" for pool in pools):
        return None
    one, other = pools
    if any(pool.autoscaling is None or pool.autoscaling.mode not in SCALED_BY_STOKER for pool in pools):
        return None
    if any(pool.pods_per_replica > 1 for pool in pools):
        return None
    alike = all(getattr(one, name) == getattr(other, name) for name in Pool.model_fields if name not in _OWN_FIELDS)
    return (one, other) if alike else None
