"""The next attempt of a TrainingJob: open it, then make its gang of pods.

Pure. Called by `reconcile`; pods are rendered by `render/trainer`.
"""

from __future__ import annotations

from itertools import takewhile

from stoker.operator.api.trainingjob_status import Attempt, Pinned, Progress
from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.labels import ATTEMPT
from stoker.operator.domain.plan import Event, Object, Plan
from stoker.operator.domain.pods import PodState, ended, is_owned, label, pod_state
from stoker.operator.domain.recovery import exhausted, retry_delay_s
from stoker.operator.domain.schedulers import Missing, Scheduler, choose
from stoker.operator.reconcile.trainingjob.at_once import nodes_at_once
from stoker.operator.reconcile.trainingjob.attempt import (
    failures_without_progress,
    gang_size,
    moment,
    scheduler_of,
    undeleted,
)
from stoker.operator.reconcile.trainingjob.end import finish
from stoker.operator.reconcile.trainingjob.orphaned_saves import list_orphaned_saves, needs_listing
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome, changed_attempt, changed_failure
from stoker.operator.reconcile.trainingjob.pinning import pinned_for_next_attempt
from stoker.operator.reconcile.trainingjob.resume import Blocked, Choice, choose_resume, resolve_start
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.attempt_group import attempt_group, attempt_group_objects
from stoker.operator.render.keys import keys_config_map
from stoker.operator.render.names import attempt_config_name
from stoker.operator.render.network_policy import trainer_policies
from stoker.operator.render.trainer import (
    attempt_config,
    attempt_pods,
    service,
)
from stoker.pod.causes import Action
from stoker.pod.writer import writer_of

MAX_ATTEMPTS_KEPT = 10


def start(view: TrainingView) -> JobOutcome | None:
    """Open the next attempt when the old one is over, then make its pods."""
    attempt = view.attempt
    if attempt is None or attempt.ended_at is not None:
        return _open_attempt(view, attempt)
    if attempt.phase is not None or len(view.gang) >= gang_size(view):
        return None
    return _make_gang(view, attempt)


def _open_attempt(view: TrainingView, last: Attempt | None) -> JobOutcome:
    waiting = _wait_before_start(view, last)
    if waiting is not None:
        return waiting
    scheduler = _scheduler(view)
    if isinstance(scheduler, Missing):
        return _blocked(view, Blocked("SchedulerMissing", scheduler.message))
    found = resolve_start(view)
    if isinstance(found, Blocked):
        return _blocked(view, found)
    choice = choose_resume(view, found)
    if isinstance(choice, Blocked):
        return _blocked(view, choice)
    pinned = pinned_for_next_attempt(view, found)
    attempt = _next_attempt(view, last, choice, pinned, scheduler)
    message = f"attempt {attempt.number} " + (f"resumes step {attempt.first_step}" if choice.saved else "starts")
    changes = JobChanges(
        attempt=attempt,
        started_at=view.job.status.started_at or view.time,
        pinned=pinned,
        requests=(),
        elastic=view.size,  # one that is not in force must not come back with limits or a spec of before
        world_size=view.job.spec.world_size,
        data_parallel=view.job.spec.data_parallel,
    )
    config = attempt_config(view.job, view.seen.resource, pinned, attempt.number, choice.resume)
    children = _children(view, config, pinned, attempt)
    event = Event("Normal", "AttemptStarted", message)
    return JobOutcome(
        phase="Starting",
        health=Health.PROGRESSING,
        reason="Starting",
        message=message,
        changes=changes | _account(view, last, attempt.first_step or 0),
        plan=Plan(apply=children, delete=undeleted(_outlived(view, attempt)), events=(event,)),
    )


def _next_attempt(
    view: TrainingView, last: Attempt | None, choice: Choice, pinned: Pinned, scheduler: Scheduler
) -> Attempt:
    number = last.number + 1 if last else 0
    return Attempt(
        number=number,
        writer=writer_of(view.job.metadata.uid, number),
        scheduler=None if scheduler == "stoker" else scheduler,
        revision=pinned.revision,
        started_at=view.time,
        first_step=choice.saved.step if choice.saved else 0,
        resumed_from=choice.saved,
    )


def _account(view: TrainingView, last: Attempt | None, step: int) -> JobChanges:
    """History and sums over earlier attempts, when one begins at `step`."""
    status = view.job.status
    if last is None:
        return JobChanges()
    last = _with_found_saves(last)
    return JobChanges(
        attempts=(last, *status.attempts)[:MAX_ATTEMPTS_KEPT],
        restarts=status.restarts + (last.failure is not None),
        lost_steps=status.lost_steps + max(0, (last.last_step or 0) - step),
        progress=Progress(step=step, total_steps=status.progress.total_steps) if status.progress else None,
    )


def _wait_before_start(view: TrainingView, last: Attempt | None) -> JobOutcome | None:
    """Wait until old pods are gone, their saves known, and the delay over; None when nothing is left to wait for."""
    if view.live:
        return JobOutcome(plan=Plan(delete=undeleted(view.live), create=new_checkpoints(view)))
    if last is None:
        return None
    if needs_listing(view):
        return list_orphaned_saves(view)
    fresh = new_checkpoints(view)
    if fresh:
        return JobOutcome(plan=Plan(create=fresh))
    if _spent(view, last):
        return _give_up(view, last)
    delay_s = _delay_s(view, last)
    if delay_s and last.ended_at:
        left_s = rest_s(moment(last.ended_at), delay_s, view.now)
        if left_s > 0:
            return JobOutcome(plan=Plan(requeue_after_s=left_s))
    return None


def _spent(view: TrainingView, last: Attempt) -> bool:
    """Whether the budget is spent, and no later cause gave the last retry back."""
    failed = last.failure is not None and last.failure.action == Action.RETRY
    return failed and exhausted(failures_without_progress(view), view.job.spec.run.backoff_limit)


def _give_up(view: TrainingView, last: Attempt) -> JobOutcome:
    assert last.failure is not None
    failure = changed_failure(last.failure, action=Action.FAIL.value)
    message = f"{failure.cause}: {failure.detail or ''}".rstrip(": ")
    changes = JobChanges(attempt=changed_attempt(last, failure=failure), last_failure=failure)
    return finish(view, "Failed", Health.STALLED, failure.cause, message, changes)


def _delay_s(view: TrainingView, last: Attempt) -> float:
    """Delay before the next attempt: after a failure, or after repeated evictions without progress."""
    action = last.failure.action if last.failure else None
    if action == Action.RETRY:
        return retry_delay_s(failures_without_progress(view))
    idle = sum(1 for _ in takewhile(_evicted_idle, (last, *view.job.status.attempts)))
    return retry_delay_s(idle - 1) if idle > 1 else 0.0


def _evicted_idle(attempt: Attempt) -> bool:
    free = attempt.failure is not None and attempt.failure.action == Action.RETRY_FREE
    return free and (attempt.last_step or 0) <= (attempt.first_step or 0)


def _outlived(view: TrainingView, attempt: Attempt) -> list[Object]:
    """Objects that only earlier attempts needed. Pods of the attempt before this one stay for their logs.

    Those that succeeded go where Volcano is the scheduler: it counts them as running members of the PodGroup, and would
    start fewer pods of the next gang than `minMember`.
    """
    configs = [found for found in view.seen.of_kind("ConfigMap") if is_owned(found, view.job.metadata.uid)]
    old = [found for found in configs if label(found, ATTEMPT) not in ("", str(attempt.number))]
    last = view.gang if scheduler_of(attempt) == "volcano" else ()
    counted = [pod for pod in last if pod_state(pod) is PodState.SUCCEEDED]
    return [*(pod for pod in (*view.older, *view.tasks) if ended(pod)), *counted, *old]


def _blocked(view: TrainingView, blocked: Blocked) -> JobOutcome:
    """Wait for something outside of the job; the message names it."""
    return JobOutcome(
        phase=None if view.job.status.attempt else "Pending",
        health=Health.STALLED if blocked.stalled else Health.PROGRESSING,
        reason=blocked.reason,
        message=blocked.message,
    )


def _scheduler(view: TrainingView) -> Scheduler | Missing:
    wanted, settings = view.job.spec.scheduling, view.settings
    alone = view.job.spec.workers.replicas == 1
    kept = settings.places_gangs or alone
    return choose(wanted.backend, wanted.queue_name, settings.installed, kept_together=kept)


def _children(view: TrainingView, config: Object, pinned: Pinned, attempt: Attempt) -> tuple[Object, ...]:
    """Public keys, policy, Service and group of the gang; the attempt's configuration is last: its pods wait for it."""
    job, resource, settings = view.job, view.seen.resource, view.settings
    rendered = pinned.rendered or {}
    group = attempt_group(job, scheduler_of(attempt), attempt.number, rendered)
    return (
        keys_config_map(resource, settings),
        *trainer_policies(job, resource, settings),
        service(job, resource, settings),
        *attempt_group_objects(job, resource, group, rendered, settings.installed),
        config,
    )


def _make_gang(view: TrainingView, attempt: Attempt) -> JobOutcome:
    """Make the pods, once their configuration exists. Names are deterministic: a repeated create finds its own pod."""
    pinned = view.job.status.pinned
    assert pinned is not None, "an attempt is opened together with its pinned rendering"
    name = attempt_config_name(view.job.metadata.name, view.job.metadata.uid, attempt.number)
    present = {found["metadata"]["name"] for found in view.seen.of_kind("ConfigMap")}
    if not {name, view.settings.control_keys_config_map} <= present:
        choice = choose_resume(view, None, attempt)
        if isinstance(choice, Blocked):
            return _blocked(view, choice)
        config = attempt_config(view.job, view.seen.resource, pinned, attempt.number, choice.resume)
        return JobOutcome(plan=Plan(apply=_children(view, config, pinned, attempt)))
    nodes = nodes_at_once(view, attempt)
    if isinstance(nodes, JobOutcome):
        return nodes
    existing = {pod["metadata"]["name"] for pod in view.gang}
    scheduler = scheduler_of(attempt)
    pods = attempt_pods(view.job, view.seen.resource, pinned, attempt.number, view.settings, scheduler, nodes)
    return JobOutcome(plan=Plan(create=tuple(pod for pod in pods if pod["metadata"]["name"] not in existing)))


def _with_found_saves(last: Attempt) -> Attempt:
    """The attempt, with at least the step that it saved as its last one."""
    done = max((step for step in (last.last_step, last.announced_step) if step is not None), default=None)
    return changed_attempt(last, last_step=done)
