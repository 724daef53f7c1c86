"""Task pods of a Checkpoint: one at a time, a few tries with growing delays, answers by termination message.

Called by `reconcile` and `delete`; the pods' rendering is `render/task`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.labels import TASK, TASK_TRY
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import PodState, ended, ended_at, exit_of, label, label_number, pod_state
from stoker.operator.domain.recovery import MAX_TASK_TRIES, left_s, task_delay_s
from stoker.operator.domain.waiting import Waiting, waiting
from stoker.operator.reconcile.checkpoint.view import CheckpointView
from stoker.operator.render.names import stem
from stoker.operator.render.task import folder_arguments, task_pod
from stoker.pod.causes import Cause

ANSWERS = (Cause.COMPLETED, Cause.TASK_FAILED)


@dataclass(frozen=True)
class TaskAnswer:
    """State of one task.

    It is still to be made (`pod`), under way (nothing set), answered (`result`), or given up (`problem`).
    """

    pod: Object | None = None
    result: dict[str, Any] | None = None
    succeeded: bool = False
    problem: str = ""
    waiting: Waiting | None = None
    """The thing that its pod waits for, while it does not run."""
    retry_in_s: float | None = None
    """Seconds until the next try."""


def ask_task(view: CheckpointView, verb: str, folder: str, digest: str | None) -> TaskAnswer:
    """The state of the task `verb` on `folder`.

    An answer is final, good or bad. A task that dies, or could not read the disk, is tried again. A pod that was
    evicted or lost with its node does not count as a try.
    """
    mine = sorted((pod for pod in view.tasks if label(pod, TASK) == verb), key=lambda pod: label_number(pod, TASK_TRY))
    for pod in mine:
        message = exit_of(pod).message if ended(pod) else None
        if message is not None and message.result and message.cause in ANSWERS:
            if pod_state(pod) is PodState.SUCCEEDED:
                return TaskAnswer(result=dict(message.result), succeeded=True)
            return TaskAnswer(
                result=dict(message.result), problem=message.detail or f"the {verb} task refused without a reason"
            )
    running = next((pod for pod in mine if not ended(pod)), None)
    if running is not None:
        return TaskAnswer(waiting=waiting(running))
    failed = [pod for pod in mine if not exit_of(pod).disrupted]
    if len(failed) >= MAX_TASK_TRIES:
        return TaskAnswer(problem=f"the {verb} task failed {len(failed)} times: {exit_of(failed[-1]).detail}")
    rest_s = left_s(ended_at(mine[-1]), task_delay_s(len(mine)), view.now) if mine else 0.0
    if rest_s:
        return TaskAnswer(retry_in_s=rest_s)
    number = label_number(mine[-1], TASK_TRY) + 1 if mine else 0
    return TaskAnswer(pod=_pod(view, verb, folder, digest, number))


def _pod(view: CheckpointView, verb: str, folder: str, digest: str | None, number: int) -> Object:
    found = view.checkpoint
    storage = view.storage
    assert storage is not None, "a folder is only known together with its storage"
    return task_pod(
        view.seen.resource,
        f"{stem(found.metadata.name, found.metadata.uid)}-{verb}-{number}",
        verb,
        folder_arguments(storage, "", folder, digest),
        storage=storage,
        fields=found.spec.task,
        labels={"checkpoint-uid": found.metadata.uid, "try": str(number)},
        settings=view.settings,
    )
