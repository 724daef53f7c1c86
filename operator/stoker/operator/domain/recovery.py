"""What follows a failure: its root cause, the action that `stoker.pod.causes` gives it, and the restart budget that progress refills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import Exit, PodState, exit_of, label, pod_state
from stoker.pod.causes import Action, Cause, action_after, root_cause_rank

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
MAX_TASK_TRIES = 3


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: the most telling exit of its pods."""

    cause: Cause
    detail: str
    exit_code: int | None
    step: int | None
    rank: int | None
    node_rank: int
    node: str
    disrupted: bool

    @property
    def action(self) -> Action:
        """From the table; a disrupted pod (evicted, node lost) is never the job's fault."""
        action = action_after(self.cause)
        return Action.RETRY_FREE if action is Action.RETRY and self.disrupted else action


def first_failure(pods: Iterable[Object]) -> Ending | None:
    """The most telling failure among the pods that have failed so far; None while there is none.

    One confirmed failure is enough: the others of the gang can never finish without it.
    """
    failed = [pod for pod in pods if pod_state(pod) is PodState.FAILED]
    endings = [_ending(pod, exit_of(pod)) for pod in failed]
    return min(endings, key=_root_cause_first, default=None)


def disruption(pods: Iterable[Object]) -> Ending | None:
    """The most telling failure that something outside of the job brought about: a lost node, an eviction."""
    return first_failure(pod for pod in pods if exit_of(pod).disrupted)


def lost_pod(node_rank: int, name: str) -> Ending:
    """A pod of a started attempt that is gone without a trace (deleted by force, its node removed)."""
    return Ending(Cause.RANK_KILLED, f"pod {name} is gone", None, None, None, node_rank, "", disrupted=True)


def retry_delay_s(failures_in_a_row: int) -> float:
    """1 s, 2 s, 4 s ... up to 5 minutes; `failures_in_a_row` counts from 1 and starts over with progress."""
    return min(FIRST_DELAY_S * 2.0 ** min(max(failures_in_a_row - 1, 0), 20), LONGEST_DELAY_S)


def task_delay_s(tries: int) -> float:
    """10 s after the first try of a task, then 60 s: storage that is away for a moment spoils nothing."""
    return 10.0 if tries <= 1 else 60.0


def left_s(ended: datetime | None, delay_s: float, now: datetime) -> float:
    """What remains of the delay after an end that another clock has noted; never more than the whole."""
    if ended is None:
        return 0.0
    return min(max((ended - now).total_seconds() + delay_s, 0.0), delay_s)


def exhausted(failures_in_a_row: int, backoff_limit: int) -> bool:
    """More failures without progress between them than the job allows."""
    return failures_in_a_row > backoff_limit


def _ending(pod: Object, exit_: Exit) -> Ending:
    word = exit_.word
    return Ending(
        cause=exit_.cause,
        detail=exit_.detail,
        exit_code=exit_.exit_code,
        step=word.step if word else None,
        rank=word.rank if word else None,
        node_rank=int(label(pod, "node-rank") or 0),
        node=str(pod["spec"].get("nodeName", "")),
        disrupted=exit_.disrupted,
    )


def _root_cause_first(ending: Ending) -> tuple[int, int]:
    return root_cause_rank(ending.cause), ending.node_rank
