"""The whole status of an EnginePool, derived from what is observed and what the pass decided. Pure.

Called by `reconcile`; no other module derives the pool's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.enginepool import EngineStatus, RevisionReplicas
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.pods import ended, is_ready
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.enginepool.outcome import PoolFields, PoolOutcome
from stoker.operator.reconcile.enginepool.view import PoolView, draining, leaving, revision_of
from stoker.operator.reconcile.intent import edit_conditions, edit_events
from stoker.operator.reconcile.outcome import derive_plan
from stoker.operator.render.engine import engine_url, selector_of

MAX_ENGINES = 256
"""As many as the status lists."""
MAX_REVISIONS = 8


def derive_status(view: PoolView, outcome: PoolOutcome) -> Plan:
    """The outcome's plan with the whole status that follows from view and outcome."""
    status = view.pool.status
    return derive_plan(
        outcome,
        seen=view.seen,
        status=status,
        fields=_fields(view, outcome) if outcome.health is not None else {},
        now=view.now,
        conditions=edit_conditions(view.intent),
        events=edit_events(view.intent, status),
    )


def _fields(view: PoolView, outcome: PoolOutcome) -> PoolFields:
    ready = [pod for pod in view.serving if is_ready(pod)]
    accepted = view.intent.accepted
    return PoolFields(
        phase=outcome.phase,
        replicas=sum(not ended(pod) and not leaving(pod) for pod in view.pods),
        ready_replicas=len(ready),
        updated_replicas=sum(revision_of(pod) in view.shared for pod in ready),
        selector=",".join(f"{name}={value}" for name, value in sorted(selector_of(view.pool).items())),
        revisions=_revision_counts(view),
        engines=tuple(_engine_status(view, pod) for pod in _listed_pods(view)),
        failures=outcome.failures.count,
        last_failure=outcome.failures.last,
        retry_at=outcome.failures.retry_at,
        accepted_spec=dict(accepted) if accepted is not None else None,
    )


def _listed_pods(view: PoolView) -> list[Object]:
    """At most `MAX_ENGINES` pods in the order of their names.

    The list is the memory of drains and failures, so draining and ended pods are kept before the others.
    """
    ranked = sorted(view.pods, key=lambda pod: not (draining(pod) or ended(pod)))
    return sorted(ranked[:MAX_ENGINES], key=lambda pod: str(pod["metadata"]["name"]))


def _revision_counts(view: PoolView) -> tuple[RevisionReplicas, ...]:
    names = {revision.name for revision in view.pool.spec.revisions}
    names |= {revision_of(pod) for pod in view.pods if revision_of(pod)}
    counts = []
    for name in sorted(names):
        mine = [pod for pod in view.pods if revision_of(pod) == name and not ended(pod)]
        desired = view.wanted.get(name, 0)
        ready = sum(is_ready(pod) for pod in mine)
        counts.append(RevisionReplicas(name=name, desired=desired, replicas=len(mine), ready=ready))
    return tuple(counts[:MAX_REVISIONS])


def _engine_status(view: PoolView, pod: Object) -> EngineStatus:
    """One line of the list of engines."""
    known = view.known(pod)
    body = view.report(pod)
    if body is None:
        body = _remembered_report(known)
    requested_at = known.drain_requested_at if known else None
    return EngineStatus(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        revision=revision_of(pod) or None,
        url=engine_url(pod, view.settings.engine_port),
        phase=_engine_phase(pod, str(body.get("phase") or "Pending")),
        ready=is_ready(pod) and not ended(pod),
        draining=draining(pod),
        message=shortened(str(body.get("message") or "")) or None,
        model_digest=str(body.get("model_digest") or "")[:128] or None,
        drain_requested_at=(requested_at or view.time) if draining(pod) else None,
    )


def _remembered_report(known: EngineStatus | None) -> Mapping[str, Any]:
    """Phase, message and digest from the last status: an operator that has just started has no report yet."""
    if known is None:
        return {}
    return {"phase": known.phase, "message": known.message, "model_digest": known.model_digest}


def _engine_phase(pod: Object, reported: str) -> str:
    """The reported phase.

    `Failed` is kept for pods that have ended and are counted as failures. One that is about to end is `Failing`.
    """
    if ended(pod):
        return "Failed"
    return "Failing" if reported == "Failed" else reported
