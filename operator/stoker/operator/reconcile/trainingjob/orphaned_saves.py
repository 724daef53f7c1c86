"""Saves that no report names: a task pod lists what the writer of a lost attempt left behind.

Pure. Called by `start` and `stop` before the next decision.
"""

from __future__ import annotations

from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.trainingjob_status import Resumption
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.labels import NODE_RANK, WRITER
from stoker.operator.domain.plan import Object, Plan
from stoker.operator.domain.pods import PodState, ended, ended_at, exit_of, label, pod_state
from stoker.operator.domain.recovery import MAX_TASK_TRIES, left_s, task_delay_s
from stoker.operator.domain.waiting import waiting
from stoker.operator.reconcile.trainingjob.outcome import JobChanges, JobOutcome
from stoker.operator.reconcile.trainingjob.saves import new_checkpoints
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.names import stem
from stoker.operator.render.task import list_arguments, task_pod


def needs_listing(view: TrainingView) -> bool:
    """Whether the last attempt ended without a termination message of its leader, and its folder is not listed yet."""
    attempt, resumption = view.attempt, view.job.status.resumption
    if attempt is None or attempt.phase is None:
        return False
    if resumption is not None and resumption.listed_writer == attempt.writer:
        return False
    return not any(ended(pod) and exit_of(pod).message for pod in view.gang if label(pod, NODE_RANK) == "0")


def list_orphaned_saves(view: TrainingView) -> JobOutcome:
    """Let a task pod list what the attempt's writer left; the saves that it finds become Checkpoints."""
    attempt = view.attempt
    assert attempt is not None
    assert attempt.writer is not None
    done = [pod for pod in view.tasks if label(pod, WRITER) == attempt.writer and ended(pod)]
    failed = [pod for pod in done if not exit_of(pod).disrupted]
    if any(pod_state(pod) is PodState.SUCCEEDED for pod in done) or len(failed) >= MAX_TASK_TRIES:
        rejected = view.job.status.resumption.rejected if view.job.status.resumption else ()
        resumption = Resumption(listed_writer=attempt.writer, rejected=rejected)
        return JobOutcome(changes=JobChanges(resumption=resumption), plan=Plan(create=new_checkpoints(view)))
    message = f"looking for saves of attempt {attempt.number}, whose leader left no termination message"
    running = [pod for pod in view.tasks if label(pod, WRITER) == attempt.writer and not ended(pod)]
    held = next((found.line for pod in running if (found := waiting(pod))), None)
    message = f"{message}: {held}" if held else message
    ends = [at for pod in done if (at := ended_at(pod)) is not None]
    rest_s = left_s(max(ends), task_delay_s(len(done)), view.now) if ends else 0.0
    create = () if running or rest_s else (_list_task(view, attempt.writer, len(done)),)
    plan = Plan(create=create, requeue_after_s=rest_s or None)
    return JobOutcome(health=Health.PROGRESSING, reason="ListingSaves", message=message, plan=plan)


def _list_task(view: TrainingView, writer: str, tries: int) -> Object:
    job = view.job
    name = f"{stem(job.metadata.name, job.metadata.uid)}-list-{writer}-{tries}"
    labels = {"job": job.metadata.name, "job-uid": job.metadata.uid, "writer": writer}
    arguments = list_arguments(view.storage, job.metadata.name, writer)
    fields = SmallPod(
        service_account_name=job.spec.workers.service_account_name,
        image_pull_secrets=job.spec.workers.image_pull_secrets,
        node_selector=job.spec.workers.node_selector,
        tolerations=job.spec.workers.tolerations,
    )
    return task_pod(
        view.seen.resource,
        name,
        "list",
        arguments,
        storage=view.storage,
        default_path=job.metadata.name,
        fields=fields,
        labels=labels,
        settings=view.settings,
    )
