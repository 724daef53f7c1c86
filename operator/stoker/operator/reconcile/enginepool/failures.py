"""Engines that end by themselves: how many in a row, why the last one ended, when the next pod may be made. Pure.

Called by `reconcile` and `replicas`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Event, Object
from stoker.operator.domain.pods import ended, exit_of, is_ready
from stoker.operator.domain.recovery import retry_delay_s
from stoker.operator.domain.text import shortened
from stoker.operator.reconcile.enginepool.outcome import Failures
from stoker.operator.reconcile.enginepool.view import PoolView, draining, leaving, revision_of


def count_failures(view: PoolView) -> tuple[Failures, tuple[Event, ...]]:
    """The failures after this pass, with an event for a new one."""
    old = view.pool.status
    fresh = _fresh_failures(view)
    if fresh:
        cause, text = _describe(view, fresh[0])
        count = _failures_in_a_row(view) + len(fresh)
        retry_at = timestamp(view.now + timedelta(seconds=retry_delay_s(count)))
        return Failures(count, text, retry_at), (Event("Warning", cause, text),)
    if view.spec_changed or _all_ready(view):
        return Failures(0, old.last_failure), ()
    return Failures(old.failures, old.last_failure, old.retry_at), ()


def replacement_delay_s(view: PoolView) -> float:
    """Seconds until a pod that ended may be replaced; the delay grows with the failures in a row."""
    if _fresh_failures(view):
        return retry_delay_s(_failures_in_a_row(view) + 1)
    if view.pool.status.retry_at is None or view.spec_changed:
        return 0.0
    return max((datetime.fromisoformat(view.pool.status.retry_at) - view.now).total_seconds(), 0.0)


def _failures_in_a_row(view: PoolView) -> int:
    """Failures of the spec in force that the status counts so far."""
    return 0 if view.spec_changed else view.pool.status.failures


def _all_ready(view: PoolView) -> bool:
    """Whether every wanted replica is ready. While a rollout is paused every revision counts."""
    ready = sum(is_ready(pod) and (view.pool.spec.paused or revision_of(pod) in view.shared) for pod in view.serving)
    return ready >= sum(view.wanted.values())


def _fresh_failures(view: PoolView) -> tuple[Object, ...]:
    """Ended pods that the status does not count yet."""
    found = []
    for pod in view.pods:
        known = view.known(pod)
        new = known is None or known.phase != "Failed"
        if ended(pod) and not draining(pod) and not leaving(pod) and new and not exit_of(pod).disrupted:
            found.append(pod)
    return tuple(found)


def _describe(view: PoolView, pod: Object) -> tuple[str, str]:
    """The cause, and a line with pod, cause and detail.

    Without a termination message the line ends with the pod's last report.
    """
    exit_ = exit_of(pod)
    detail = exit_.detail.removeprefix(f"{exit_.cause}: ")
    known = view.known(pod)
    if exit_.message is None and known is not None and known.message:
        detail = f"{detail}; last reported: {known.message}".removeprefix("; ")
    return exit_.cause.value, shortened(f"{pod['metadata']['name']}: {exit_.cause}: {detail}".rstrip(": "))
