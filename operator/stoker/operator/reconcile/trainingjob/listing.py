"""The list of an attempt's saves by task pods. Each lists those after a step, as many as its message has room for.

Pure. Called by `announced_saves`, `orphaned_saves` and `omitted_saves`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.trainingjob_status import Attempt
from stoker.operator.domain.labels import AFTER_STEP, PREFIX, TASK, WRITER
from stoker.operator.domain.plan import Event, Object
from stoker.operator.domain.pods import PodState, ended, ended_at, exit_of, label, pod_state
from stoker.operator.domain.recovery import MAX_TASK_TRIES, left_s, task_delay_s
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.operator.render.names import short_hash, stem
from stoker.operator.render.task import list_arguments, task_pod
from stoker.pod.writer import writer_of

LIST = "list"
"""Verb of the task."""


@dataclass(frozen=True)
class Listing:
    """The pods that list the saves after the last one with a Checkpoint, `after_step`; None before the first."""

    writer: str
    after_step: int | None
    running: tuple[Object, ...]
    ended: tuple[Object, ...]

    @property
    def succeeded(self) -> bool:
        return any(pod_state(pod) is PodState.SUCCEEDED for pod in self.ended)

    @property
    def complete(self) -> bool:
        """Whether a pod left no newer save out, or too many of them failed."""
        failed = [pod for pod in self.ended if not exit_of(pod).disrupted]
        if self.succeeded:
            return not any(_omitted(pod) for pod in self.ended)
        return len(failed) >= MAX_TASK_TRIES

    @property
    def given_up(self) -> bool:
        """Whether too many pods failed, so that what they would have listed stays unknown."""
        return self.complete and not self.succeeded

    def rest_s(self, view: TrainingView) -> float:
        """Time until the next try; 0.0 if it may begin."""
        ends = [at for pod in self.ended if (at := ended_at(pod)) is not None]
        return left_s(max(ends), task_delay_s(len(self.ended)), view.now) if ends else 0.0

    def due(self, view: TrainingView) -> tuple[Object, ...]:
        """The next pod, if one has to begin now."""
        if self.running or self.succeeded or self.complete or self.rest_s(view):
            return ()
        return (_pod(view, self),)


def listing_of(view: TrainingView, attempt: Attempt) -> Listing:
    """How far the list of the attempt's saves is that have no Checkpoint yet."""
    writer = writer_of(view.job.metadata.uid, attempt.number)
    after = attempt.announced_step
    mine = [pod for pod in _pods(view, writer) if label(pod, AFTER_STEP) == ("" if after is None else str(after))]
    running = tuple(pod for pod in mine if not ended(pod))
    return Listing(writer, after, running, tuple(pod for pod in mine if ended(pod)))


def not_listed(attempt: Attempt) -> Event:
    """The event of a list that was given up."""
    text = f"the saves of attempt {attempt.number} could not be listed: those that it did not report have no Checkpoint"
    return Event("Warning", "SavesNotListed", text)


def listed(view: TrainingView, writer: str) -> Iterator[Mapping[str, Any]]:
    """`{folder, step, digest}` of each save of a writer that a task pod has listed."""
    for pod in _pods(view, writer):
        message = exit_of(pod).message if ended(pod) else None
        yield from message.result.get("saves", ()) if message else ()


def _pods(view: TrainingView, writer: str) -> list[Object]:
    return [pod for pod in view.tasks if label(pod, TASK) == LIST and label(pod, WRITER) == writer]


def _omitted(pod: Object) -> int:
    message = exit_of(pod).message
    return int(message.result.get("omitted") or 0) if message and message.result.get("saves") else 0


def _pod(view: TrainingView, listing: Listing) -> Object:
    job, after = view.job, listing.after_step
    page = listing.writer if after is None else short_hash(f"{listing.writer}.{after}", len(listing.writer))
    labels = {"job": job.metadata.name, "job-uid": job.metadata.uid, "writer": listing.writer}
    if after is not None:
        labels[AFTER_STEP.removeprefix(f"{PREFIX}/")] = str(after)
    fields = SmallPod(
        service_account_name=job.spec.workers.service_account_name,
        image_pull_secrets=job.spec.workers.image_pull_secrets,
        node_selector=job.spec.workers.node_selector,
        tolerations=job.spec.workers.tolerations,
    )
    return task_pod(
        view.seen.resource,
        f"{stem(job.metadata.name, job.metadata.uid)}-list-{page}-{len(listing.ended)}",
        LIST,
        list_arguments(view.storage, job.metadata.name, listing.writer, after),
        storage=view.storage,
        default_path=job.metadata.name,
        fields=fields,
        labels=labels,
        settings=view.settings,
    )
