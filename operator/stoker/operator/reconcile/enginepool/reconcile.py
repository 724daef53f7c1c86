"""EnginePool: how many engine pods of which revision, and which one goes next. It alone makes and drains engine pods. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from stoker.operator.api.enginepool import Revision, RevisionReplicas
from stoker.operator.domain.applied_hash import is_applied
from stoker.operator.domain.conditions import Condition, Health, summary
from stoker.operator.domain.plan import Event, Object, Observed, Plan
from stoker.operator.domain.pods import ended, exit_of, is_ready, label, waiting_reason
from stoker.operator.domain.recovery import retry_delay_s
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.domain.waiting import missing_volume, mounting
from stoker.operator.reconcile.enginepool.drain import begin, go_on, replaceable, victims
from stoker.operator.reconcile.enginepool.step import Counts, next_step, resolve
from stoker.operator.reconcile.enginepool.view import (
    FAILURES_TO_STALL,
    PoolView,
    draining,
    engine_status,
    leaving,
    look,
    settle,
)
from stoker.operator.render.engine import (
    disruption_budget,
    engine_pod,
    engine_service,
    revision_config_map,
    selector_of,
)
from stoker.operator.render.trainer import keys_config_map

MAX_ENGINES = 256
"""As many as the status lists."""


def reconcile_enginepool(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """What should change next; a converged pool gives an empty plan."""
    view = look(seen, settings, now)
    if view.pool.deleting:
        return settle(view, {}, ())  # the pods go with their owner
    refused = unsupported("EnginePool", seen.resource["spec"])
    if refused:
        text = "; ".join(refused)
        return settle(view, {"message": text}, summary(Health.STALLED, "NotSupported", text))
    return _report(view, _change_pods(view))


@dataclass(frozen=True)
class _Pods:
    """Serving pods by revision and readiness."""

    new_ready: tuple[Object, ...]
    new_unready: tuple[Object, ...]
    old_ready: tuple[Object, ...]
    old_unready: tuple[Object, ...]

    @property
    def counts(self) -> Counts:
        return Counts(len(self.new_ready), len(self.new_unready), len(self.old_ready), len(self.old_unready))


def _change_pods(view: PoolView) -> Plan:
    """Children, then one step towards the wanted pods."""
    children = _missing_children(view)
    failed = tuple(pod for pod in view.pods if ended(pod) and not leaving(pod))
    pods = _sort(view)
    spec = view.pool.spec
    surge = resolve(spec.max_surge, spec.replicas, up=True)
    unavailable = resolve(spec.max_unavailable, spec.replicas, up=False)
    step = next_step(spec.replicas, surge, unavailable, pods.counts)
    dropped = (
        *failed,
        *victims(view, pods.old_unready, step.drop_old_unready),
        *victims(view, pods.new_unready, step.drop_new_unready),
    )
    surplus = (*victims(view, pods.old_ready, step.drain_old), *victims(view, pods.new_ready, step.drain_new))
    leaving_now = replaceable(view, (*pods.old_ready, *pods.new_ready), surplus, spec.replicas - unavailable)
    drain = go_on(view, dropped)
    delay_s = _delay_s(view)
    create = () if children or delay_s > 0 else _new_pods(view, step.create_new)
    requeue = [value for value in (drain.requeue_after_s, delay_s or None) if value is not None]
    return Plan(
        apply=children,
        create=create,
        patch=begin(leaving_now),
        calls=drain.calls,
        delete=drain.delete,
        requeue_after_s=min(requeue, default=None),
    )


def _sort(view: PoolView) -> _Pods:
    """While a rollout is paused no revision is better than another."""
    target, paused = view.target.name, view.pool.spec.paused
    new = [pod for pod in view.serving if paused or label(pod, "revision") == target]
    old = [pod for pod in view.serving if not paused and label(pod, "revision") != target]

    def split(pods: Sequence[Object], *, ready: bool) -> tuple[Object, ...]:
        return tuple(pod for pod in pods if is_ready(pod) is ready)

    return _Pods(split(new, ready=True), split(new, ready=False), split(old, ready=True), split(old, ready=False))


def _missing_children(view: PoolView) -> tuple[Object, ...]:
    """Configuration of every revision, Service, PodDisruptionBudget, public keys: those that are not applied as wanted."""
    pool, resource = view.pool, view.seen.resource
    wanted = (
        keys_config_map(resource, view.settings),
        *(revision_config_map(pool, resource, revision) for revision in pool.spec.revisions),
        engine_service(pool, resource),
        disruption_budget(pool, resource),
    )
    live = {
        (kind, found["metadata"]["name"]): found
        for kind in ("ConfigMap", "Service", "PodDisruptionBudget")
        for found in view.seen.of_kind(kind)
    }
    return tuple(body for body in wanted if not is_applied(body, live.get((body["kind"], body["metadata"]["name"]))))


def _new_pods(view: PoolView, number: int) -> tuple[Object, ...]:
    """Pods with the lowest free indexes."""
    revision: Revision = view.target
    taken = {pod["metadata"]["name"] for pod in view.pods}
    made: list[Object] = []
    index = 0
    while len(made) < number:
        pod = engine_pod(view.pool, view.seen.resource, revision, index)
        if pod["metadata"]["name"] not in taken:
            made.append(pod)
        index += 1
    return tuple(made)


# Failures


def _fresh_failures(view: PoolView) -> tuple[Object, ...]:
    """Ended pods that the status does not count yet."""
    found = []
    for pod in view.pods:
        known = view.known(pod)
        new = known is None or known.phase != "Failed"
        if ended(pod) and not draining(pod) and not leaving(pod) and new and not exit_of(pod).disrupted:
            found.append(pod)
    return tuple(found)


def _delay_s(view: PoolView) -> float:
    """Seconds until a pod that ended may be replaced; pods that keep failing are retried ever more slowly."""
    if _fresh_failures(view):
        return retry_delay_s(_failures(view) + 1)
    if view.pool.status.retry_at is None or _is_new(view):
        return 0.0
    return max((datetime.fromisoformat(view.pool.status.retry_at) - view.now).total_seconds(), 0.0)


def _failures(view: PoolView) -> int:
    """Failures in a row of what the spec asks for now."""
    return 0 if _is_new(view) else view.pool.status.failures


def _is_new(view: PoolView) -> bool:
    """The spec has changed: what failed before says nothing about it."""
    return view.pool.status.observed_generation != view.pool.metadata.generation


def _failure_changes(view: PoolView) -> tuple[dict[str, Any], tuple[Event, ...]]:
    fresh = _fresh_failures(view)
    if fresh:
        exit_ = exit_of(fresh[0])
        why = exit_.detail.removeprefix(f"{exit_.cause}: ")
        text = f"{fresh[0]['metadata']['name']}: {exit_.cause}: {why}".rstrip(": ")[:1024]
        failures = _failures(view) + len(fresh)
        retry_at = view.now + timedelta(seconds=retry_delay_s(failures))
        changes = {"failures": failures, "last_failure": text, "retry_at": retry_at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return changes, (Event("Warning", exit_.cause.value, text),)
    if _is_new(view) or any(is_ready(pod) and label(pod, "revision") == view.target.name for pod in view.serving):
        return {"failures": 0, "retry_at": None}, ()
    return {}, ()


# Status


def _report(view: PoolView, plan: Plan) -> Plan:
    failure, events = _failure_changes(view)
    ready = [pod for pod in view.serving if is_ready(pod)]
    updated = [pod for pod in ready if label(pod, "revision") == view.target.name]
    phase, message = _phase(view, len(ready), len(updated))
    changes = {
        "phase": phase,
        "message": message,
        "replicas": len([pod for pod in view.pods if not ended(pod) and not leaving(pod)]),
        "ready_replicas": len(ready),
        "updated_replicas": len(updated),
        "selector": ",".join(f"{name}={value}" for name, value in sorted(selector_of(view.pool).items())),
        "revisions": _revision_counts(view),
        "engines": tuple(engine_status(view, pod) for pod in _remembered(view)),
        **failure,
    }
    if events:
        plan = Plan(**{**{name: getattr(plan, name) for name in plan.__dataclass_fields__}, "events": events})
    return settle(view, changes, _conditions(view, phase, message), plan)


def _remembered(view: PoolView) -> list[Object]:
    """The pods of the status, by name. It is the memory of drains and failures, so of very many pods those come first."""
    telling = sorted(view.pods, key=lambda pod: not (draining(pod) or ended(pod)))
    return sorted(telling[:MAX_ENGINES], key=lambda pod: str(pod["metadata"]["name"]))


def _phase(view: PoolView, ready: int, updated: int) -> tuple[str, str | None]:
    wanted = view.pool.spec.replicas
    others = [pod for pod in view.pods if not ended(pod) and label(pod, "revision") != view.target.name]
    if updated == wanted and not others and len(view.serving) == wanted:
        leaving_ones = any(draining(pod) for pod in view.pods)
        return ("Scaling", "draining") if leaving_ones else ("Serving", None)
    why = _why_not(view)
    last = (view.pool.status.last_failure or "") if _failures(view) else ""
    if others:
        return "Updating", f"{updated} of {wanted} replicas are updated{f'; {last}' if last else why}"[:1024]
    if ready < wanted and last:
        return ("Degraded" if ready else "Failed"), f"{ready} of {wanted} replicas are ready; {last}"[:1024]
    return ("Scaling" if ready else "Starting"), f"{ready} of {wanted} replicas are ready{why}"[:1024]


def _why_not(view: PoolView) -> str:
    """What the first replica that is not ready waits for."""
    for pod in view.serving:
        report = view.report(pod)
        if not is_ready(pod):
            spec = view.target.template.pod.get("spec", {})
            unmounted = missing_volume(spec, _present(view)) or mounting(pod, spec)
            text = unmounted or waiting_reason(pod) or str((report or {}).get("message") or "")
            return f": {text}" if text else ""
    return ""


def _present(view: PoolView) -> dict[str, set[str]]:
    """Names of the objects that volumes are made of; the configuration of a revision has a placeholder's name in its template."""
    kinds = ["PersistentVolumeClaim", *(["Secret"] if view.settings.sees_secrets else [])]
    return {kind: {found["metadata"]["name"] for found in view.seen.of_kind(kind)} for kind in kinds}


def _conditions(view: PoolView, phase: str, message: str | None) -> tuple[Condition, ...]:
    text = message or f"{view.pool.spec.replicas} replicas are ready"
    if phase == "Serving":
        return summary(Health.READY, phase, text)
    if phase == "Failed" and view.pool.status.failures >= FAILURES_TO_STALL:
        return summary(Health.STALLED, phase, text)
    return summary(Health.PROGRESSING, phase, text)


def _revision_counts(view: PoolView) -> tuple[RevisionReplicas, ...]:
    names = {revision.name for revision in view.pool.spec.revisions}
    names |= {label(pod, "revision") for pod in view.pods if label(pod, "revision")}
    counts = []
    for name in sorted(names):
        mine = [pod for pod in view.pods if label(pod, "revision") == name and not ended(pod)]
        desired = view.pool.spec.replicas if name == view.target.name else 0
        ready = sum(is_ready(pod) for pod in mine)
        counts.append(RevisionReplicas(name=name, desired=desired, replicas=len(mine), ready=ready))
    return tuple(counts[:8])
