"""Pools, revisions, engines and traffic of a deployment, from its resources and its programs' metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from stoker.gateway.domain.run_history import saved_at
from stoker.gateway.observations import (
    Bucket,
    EngineLoad,
    EngineState,
    PoolState,
    ReplicaStart,
    RevisionState,
    RolloutState,
    ScalingDecision,
    Traffic,
)
from stoker.gateway.problem import Problem, wrong_field

Object = Mapping[str, Any]
START_PARTS = (
    "schedule", "pull", "start", "plan", "fetch", "ranks", "load", "cache", "kernels", "graphs", "warm", "ready",
)  # fmt: skip
"""Parts of an engine's start in their order; an API server keeps none."""
Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


def pool_states(status: Object) -> list[PoolState]:
    """The pools of a deployment's status."""
    return [
        PoolState(
            name=pool["name"],
            role=str(pool.get("role") or "colocated"),
            replicas=pool.get("replicas") or 0,
            ready=pool.get("ready") or 0,
            updated=pool.get("updated") or 0,
            message=str(pool.get("message") or ""),
            last_start=_start(pool.get("lastStart")),
            decisions=[_decision(one) for one in _newest_first(pool.get("decisions") or ())],
        )
        for pool in status.get("pools") or ()
    ]


def _start(found: Object | None) -> ReplicaStart | None:
    if not found:
        return None
    parts = dict(found.get("parts") or {})
    return ReplicaStart(
        engine=str(found.get("engine") or ""),
        created_at=found.get("createdAt"),
        seconds=found.get("seconds") or 0,
        parts={name: parts[name] for name in START_PARTS if name in parts},
    )


def _newest_first(decisions: Sequence[Object]) -> list[Object]:
    return sorted(decisions, key=lambda one: str(one.get("time") or ""), reverse=True)


def _decision(found: Object) -> ScalingDecision:
    return ScalingDecision(
        time=found.get("time"),
        before=found.get("before") or 0,
        after=found.get("after") or 0,
        reason=str(found.get("reason") or ""),
        message=str(found.get("message") or ""),
        inputs={name: str(value) for name, value in (found.get("inputs") or {}).items()},
    )


def revision_states(status: Object) -> list[RevisionState]:
    """The revisions that the operator remembers, newest first."""
    return [
        RevisionState(
            name=found["name"],
            share=found.get("share") or 0,
            created_at=found.get("createdAt"),
            checkpoint=saved_at(found.get("checkpoint")),
        )
        for found in status.get("revisions") or ()
    ]


def rollout_state(status: Object) -> RolloutState | None:
    """The rollout of a deployment's status; None where there is none."""
    found = status.get("rollout")
    if not found:
        return None
    return RolloutState(
        phase=str(found.get("phase") or "Progressing"),
        from_revision=found.get("fromRevision"),
        to_revision=found.get("toRevision"),
        step=found.get("step"),
        started_at=found.get("startedAt"),
        progressed_at=found.get("progressedAt"),
    )


def service_of(deployment: Object) -> tuple[str, int]:
    """Name and port of the Service in front of a deployment. Raises Problem 409 when it has none yet."""
    endpoint = str((deployment.get("status") or {}).get("endpoint") or "")
    parts = urlsplit(endpoint)
    name = (parts.hostname or "").partition(".")[0]
    if not name:
        raise Problem(409, "conflict", f"deployment {deployment['metadata']['name']} has no endpoint yet")
    return name, parts.port or 80


def earlier_revision(deployment: Object, wanted: str | None) -> Object:
    """The revision to roll back to: the wanted one, else the newest with another checkpoint than the newest of all.

    Raises:
        Problem: 409 when there is none, 422 when the wanted one is not remembered or serves no checkpoint.
    """
    name = deployment["metadata"]["name"]
    remembered: list[Object] = (deployment.get("status") or {}).get("revisions") or []
    known = [one for one in remembered if _checkpoint_name(one)]
    if wanted is not None:
        found = next((one for one in known if one["name"] == wanted), None)
        if found is None:
            allowed = ", ".join(one["name"] for one in known) or "none"
            raise wrong_field("revision", f"{wanted!r} is no revision with a checkpoint; those are: {allowed}")
        return found
    newest = _checkpoint_name(known[0]) if known else None
    older = next((one for one in known[1:] if _checkpoint_name(one) != newest), None)
    if older is None:
        raise Problem(409, "conflict", f"deployment {name} has no earlier revision with another checkpoint")
    return older


def _checkpoint_name(revision: Object) -> str | None:
    """The checkpoint of a revision; None where it serves an address."""
    name: str | None = (revision.get("checkpoint") or {}).get("name")
    return name


def engine_states(pools: Mapping[str, Object], loads: Mapping[str, EngineLoad]) -> list[EngineState]:
    """The engines of all EnginePools by the names of their pools, with what was measured of each."""
    return [
        EngineState(
            pod_name=engine["name"],
            pool=name,
            revision=str(engine.get("revision") or ""),
            phase=str(engine.get("phase") or "Pending"),
            ready=bool(engine.get("ready")),
            draining=bool(engine.get("draining")),
            message=str(engine.get("message") or ""),
            load=loads.get(engine["name"]),
        )
        for name, pool in pools.items()
        for engine in (pool.get("status") or {}).get("engines") or ()
    ]


def engine_port(url: str) -> int:
    """The port of an engine's URL."""
    return urlsplit(url).port or 80


def traffic(metrics: str) -> Traffic:
    """What a router counts. Raises ValueError where the text is no metrics."""
    found = _samples(metrics)
    requests = {labels.get("code", ""): value for labels, value in found.get("stoker_router_requests_total", ())}
    return Traffic(
        requests=requests,
        first_byte_seconds=_buckets(found, "stoker_router_first_byte_seconds"),
        held=_sum(found, "stoker_router_held_requests") or 0.0,
        pending=_sum(found, "stoker_router_pending_requests") or 0.0,
        ready_engines=_sum(found, "stoker_router_ready_backends") or 0.0,
    )


def summed(routers: Sequence[Traffic]) -> Traffic:
    """What all routers of a deployment count together; each of them sees the same engines."""
    codes = {code for one in routers for code in one.requests}
    buckets: dict[float | None, float] = {}
    for bucket in (bucket for one in routers for bucket in one.first_byte_seconds):
        buckets[bucket.up_to] = buckets.get(bucket.up_to, 0.0) + bucket.count
    bounds = sorted(buckets, key=lambda bound: float("inf") if bound is None else bound)
    return Traffic(
        requests={code: sum(one.requests.get(code, 0.0) for one in routers) for code in sorted(codes)},
        first_byte_seconds=[Bucket(up_to=bound, count=buckets[bound]) for bound in bounds],
        held=sum(one.held for one in routers),
        pending=sum(one.pending for one in routers),
        ready_engines=max((one.ready_engines for one in routers), default=0.0),
    )


def engine_load(metrics: str) -> EngineLoad:
    """What an engine measures. Raises ValueError where the text is no metrics."""
    found = _samples(metrics)
    return EngineLoad(
        running=_sum(found, "vllm:num_requests_running"),
        waiting=_sum(found, "vllm:num_requests_waiting"),
        kv_cache_usage=_sum(found, "vllm:kv_cache_usage_perc"),
        first_token_seconds=_buckets(found, "vllm:time_to_first_token_seconds"),
    )


def _samples(metrics: str) -> Samples:
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def _sum(samples: Samples, name: str) -> float | None:
    values = [value for _, value in samples.get(name, ())]
    return sum(values) if values else None


def _buckets(samples: Samples, name: str) -> list[Bucket]:
    """The cumulative buckets of a histogram, summed over its labels."""
    counts: dict[float, float] = {}
    for labels, value in samples.get(f"{name}_bucket", ()):
        bound = float(labels.get("le", "inf"))
        counts[bound] = counts.get(bound, 0.0) + value
    return [Bucket(up_to=None if bound == float("inf") else bound, count=counts[bound]) for bound in sorted(counts)]
