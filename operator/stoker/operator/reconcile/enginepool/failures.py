"""Engines that end by themselves: how many in a row, why the last one ended, when the next pod may be made. Pure.

Called by `reconcile` and `replicas`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from stoker.operator.domain.clock import rest_s, timestamp
from stoker.operator.domain.plan import Event
from stoker.operator.domain.pods import exit_of
from stoker.operator.domain.recovery import retry_delay_s
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.enginepool.outcome import Failures
from stoker.operator.reconcile.enginepool.replica import Replica, number_of
from stoker.operator.reconcile.enginepool.view import PoolView
from stoker.pod.causes import ROOT_CAUSE_ORDER

POD_LOST = "PodLost"
"""Reason of the event when a replica of several pods has lost one."""


def count_failures(view: PoolView) -> tuple[Failures, tuple[Event, ...]]:
    """The failures after this pass, with an event for a new one, and for each replica that has lost a pod."""
    old = view.pool.status
    fresh, lost = _fresh_failures(view), _lost_events(view)
    if fresh:
        cause, text = _describe(view, fresh[0])
        count = _failures_in_a_row(view) + len(fresh)
        retry_at = timestamp(view.now + timedelta(seconds=retry_delay_s(count)))
        return Failures(count, text, retry_at), (Event("Warning", cause, text), *lost)
    if view.spec_changed or _all_ready(view):
        return Failures(0, old.last_failure), lost
    return Failures(old.failures, old.last_failure, old.retry_at), lost


def replacement_delay_s(view: PoolView) -> float:
    """Seconds until a pod that ended may be replaced; the delay grows with the failures in a row."""
    if _fresh_failures(view):
        return retry_delay_s(_failures_in_a_row(view) + 1)
    if view.pool.status.retry_at is None or view.spec_changed:
        return 0.0
    delay_s = retry_delay_s(_failures_in_a_row(view))
    began = datetime.fromisoformat(view.pool.status.retry_at) - timedelta(seconds=delay_s)
    return rest_s(began, delay_s, view.now)


def _failures_in_a_row(view: PoolView) -> int:
    """Failures of the spec in force that the status counts so far."""
    return 0 if view.spec_changed else view.pool.status.failures


def _all_ready(view: PoolView) -> bool:
    """Whether every wanted replica is ready. While a rollout is paused every revision counts."""
    ready = sum(found.ready and (view.pool.spec.paused or found.revision in view.shared) for found in view.serving)
    return ready >= sum(view.wanted.values())


def _fresh_failures(view: PoolView) -> tuple[Replica, ...]:
    """Replicas with pods that ended, which the status does not count yet. One that was disrupted has not failed."""
    return tuple(
        found
        for found in view.replicas
        if found.ended
        and not (found.draining or found.leaving or view.is_known_as_failed(found))
        and not any(exit_of(pod).disrupted for pod in found.ended)
    )


def _lost_events(view: PoolView) -> tuple[Event, ...]:
    """An event for each replica of several pods that is replaced because one of them is gone: lost with its node, or
    deleted by force. It counts as no failure."""
    return tuple(
        Event("Warning", POD_LOST, f"replica {found.name}: {_missing(found)}; all its pods are replaced")
        for found in view.replicas
        if found.lost and not (found.ended or found.draining or found.leaving or view.is_known_as_failed(found))
    )


def _missing(replica: Replica) -> str:
    present = {number_of(pod) for pod in replica.pods}
    numbers = [str(number) for number in range(replica.size) if number not in present]
    return f"pod {', '.join(numbers)} of {replica.size} is gone"


def _describe(view: PoolView, replica: Replica) -> tuple[str, str]:
    """The cause, and a line with pod, cause and detail.

    Of several pods that ended, the one whose cause explains the others. Without a termination message the line ends
    with the pod's last report.
    """
    pod = min(replica.ended, key=lambda found: ROOT_CAUSE_ORDER.index(exit_of(found).cause))
    exit_ = exit_of(pod)
    detail = exit_.detail.removeprefix(f"{exit_.cause}: ")
    known = view.known(pod)
    if exit_.message is None and known is not None and known.message:
        detail = f"{detail}; last reported: {known.message}".removeprefix("; ")
    whole = f"replica {replica.name}: " if replica.size > 1 else ""
    return exit_.cause.value, shortened(f"{whole}{pod['metadata']['name']}: {exit_.cause}: {detail}".rstrip(": "))
