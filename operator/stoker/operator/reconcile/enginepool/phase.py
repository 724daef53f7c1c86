"""The state of an EnginePool in one word and one line. Pure.

Called by `reconcile` at the end of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.operator.api.enginepool import PoolPhase
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.pods import is_ready, waiting_reason
from stoker.operator.domain.waiting import missing_volume, mounting
from stoker.operator.reconcile.enginepool.drain import not_admitted
from stoker.operator.reconcile.enginepool.outcome import Failures
from stoker.operator.reconcile.enginepool.queueing import Hold, hold_of
from stoker.operator.reconcile.enginepool.view import FAILURES_TO_STALL, PoolView
from stoker.operator.render.engine import with_replica_key


@dataclass(frozen=True)
class PoolState:
    """Health, phase, and the line with the reason why the pool does not serve in full."""

    health: Health
    phase: PoolPhase
    message: str | None = None
    reason: str | None = None
    """Of its conditions; None: the phase."""


def pool_state(view: PoolView, failures: Failures, unplaced: str | None = None) -> PoolState:
    """The state of the pool as observed, after `failures`. `unplaced`: why a replica has no nodes."""
    hold = hold_of(view)
    state = _state(view, failures, unplaced, hold)
    return replace(state, reason=hold.reason) if hold and state.health is Health.PROGRESSING else state


def _state(view: PoolView, failures: Failures, unplaced: str | None, hold: Hold | None) -> PoolState:
    wanted = sum(view.wanted.values())
    ready = sum(found.ready for found in view.serving)
    updated = sum(found.ready and found.revision in view.shared for found in view.serving)
    others = [found for found in view.replicas if not found.broken and found.revision not in view.shared]
    split = all(sum(found.revision == name for found in view.serving) == number for name, number in view.wanted.items())
    if updated == wanted and not others and len(view.serving) == wanted and split:
        return _complete_state(view)
    held = unplaced or (hold.line if hold is not None else "")
    why = f": {held}" if held else _reason_not_ready(view)
    last = (failures.last or "") if failures.count else ""
    if others:
        why = why or (f": {unreached}" if (unreached := not_admitted(view)) else "")
        text = f"{updated} of {wanted} replicas are updated{why}{f'; last failure: {last}' if last else ''}"
        return PoolState(Health.PROGRESSING, "Updating", text)
    if ready < wanted and last:
        text = f"{ready} of {wanted} replicas are ready{why}; last failure: {last}"
        if ready:
            return PoolState(Health.PROGRESSING, "Degraded", text)
        given_up = failures.count >= FAILURES_TO_STALL
        return PoolState(Health.STALLED if given_up else Health.PROGRESSING, "Failed", text)
    phase: PoolPhase = "Scaling" if ready else "Starting"
    return PoolState(Health.PROGRESSING, phase, f"{ready} of {wanted} replicas are ready{why}")


def _complete_state(view: PoolView) -> PoolState:
    """The wanted replicas are ready; others may still be draining."""
    draining = sum(found.draining for found in view.replicas)
    if draining:
        return PoolState(Health.PROGRESSING, "Scaling", f"draining engines: {draining}")
    if view.pool.spec.bounded_replicas == 0:
        return PoolState(Health.IDLE, "ScaledToZero", "scaled to zero: spec.replicas is 0")
    return PoolState(Health.READY, "Serving")


def _reason_not_ready(view: PoolView) -> str:
    """`: ` and what the first replica that is not ready waits for; empty when that is not known."""
    for pod in (pod for found in view.serving if not found.ready for pod in found.pods):
        if is_ready(pod):
            continue
        spec = with_replica_key(view.target.template.pod.get("spec", {}), view.pool)
        unmounted = missing_volume(spec, _present_volumes(view)) or mounting(pod, spec)
        text = unmounted or waiting_reason(pod) or str((view.report(pod) or {}).get("message") or "")
        return f": {text}" if text else ""
    return ""


def _present_volumes(view: PoolView) -> dict[str, set[str]]:
    """Names of the objects that volumes are made of, by kind.

    ConfigMaps are left out: a template holds a placeholder for the name of its revision's configuration.
    """
    kinds = ["PersistentVolumeClaim", *(["Secret"] if view.settings.sees_secrets else [])]
    return {kind: {found["metadata"]["name"] for found in view.seen.of_kind(kind)} for kind in kinds}
