"""The whole status of an EnginePool, derived from what is observed and what the pass decided. Pure.

Called by `reconcile`; no other module derives the pool's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.api.enginepool import EngineStatus, RevisionReplicas
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.pods import ended, is_endpoint, is_ready
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.enginepool.outcome import PoolFields, PoolOutcome
from stoker.operator.reconcile.enginepool.replica import draining, revision_of
from stoker.operator.reconcile.enginepool.startup import last_start
from stoker.operator.reconcile.enginepool.view import PoolView
from stoker.operator.reconcile.intent import edit_conditions, edit_events
from stoker.operator.reconcile.outcome import derive_plan
from stoker.operator.render.engine import engine_url, leader_selector

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
    ready = [found for found in view.serving if found.ready]
    accepted = view.intent.accepted
    return PoolFields(
        phase=outcome.phase,
        replicas=sum(not found.broken and not found.leaving for found in view.replicas),
        ready_replicas=len(ready),
        updated_replicas=sum(found.revision in view.shared for found in ready),
        queued_replicas=sum(found.queued for found in view.replicas),
        selector=",".join(f"{name}={value}" for name, value in sorted(leader_selector(view.pool).items())),
        revisions=_revision_counts(view),
        engines=tuple(_engine_status(view, pod, broken) for pod, broken in _listed_pods(view)),
        failures=outcome.failures.count,
        last_failure=outcome.failures.last,
        retry_at=outcome.failures.retry_at,
        last_start=last_start(view),
        accepted_spec=dict(accepted) if accepted is not None else None,
    )


def _listed_pods(view: PoolView) -> list[tuple[Object, bool]]:
    """At most `MAX_ENGINES` pods in the order of their names, and whether their replica is broken.

    The list is the memory of drains and failures, so pods of draining and broken replicas are kept before the others.
    """
    ranked = sorted(view.replicas, key=lambda found: not (found.draining or found.broken))
    listed = [(pod, found.broken) for found in ranked for pod in found.pods][:MAX_ENGINES]
    return sorted(listed, key=lambda item: str(item[0]["metadata"]["name"]))


def _revision_counts(view: PoolView) -> tuple[RevisionReplicas, ...]:
    names = {revision.name for revision in view.pool.spec.revisions}
    names |= {found.revision for found in view.replicas if found.revision}
    counts = []
    for name in sorted(names):
        mine = [found for found in view.replicas if found.revision == name and not found.broken]
        desired = view.wanted.get(name, 0)
        ready = sum(found.ready for found in mine)
        counts.append(RevisionReplicas(name=name, desired=desired, replicas=len(mine), ready=ready))
    return tuple(counts[:MAX_REVISIONS])


def _engine_status(view: PoolView, pod: Object, broken: bool) -> EngineStatus:
    """One line of the list of engines."""
    known = view.known(pod)
    body = view.report(pod)
    if body is None:
        body = _remembered_report(known)
    requested_at = (known.drain_requested_at if known else None) or view.time
    return EngineStatus(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        revision=revision_of(pod) or None,
        url=engine_url(pod, view.settings.engine_port) if is_endpoint(pod) else None,
        phase=_engine_phase(str(body.get("phase") or "Pending"), broken=broken),
        ready=is_ready(pod) and not ended(pod),
        draining=draining(pod),
        message=shortened(str(body.get("message") or "")) or None,
        model_digest=str(body.get("model_digest") or "")[:128] or None,
        drain_requested_at=min(requested_at, view.time) if draining(pod) else None,  # anew when a clock is put back
    )


def _remembered_report(known: EngineStatus | None) -> Mapping[str, Any]:
    """Phase, message and digest from the last status: an operator that has just started has no report yet."""
    if known is None:
        return {}
    return {"phase": known.phase, "message": known.message, "model_digest": known.model_digest}


def _engine_phase(reported: str, *, broken: bool) -> str:
    """The reported phase.

    `Failed` is kept for pods of a replica that has ended and is counted. One that is about to end is `Failing`.
    """
    if broken:
        return "Failed"
    return "Failing" if reported == "Failed" else reported
