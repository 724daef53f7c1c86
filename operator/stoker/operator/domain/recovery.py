"""Reactions to a failure: its root cause, the action that `stoker.pod.causes` gives it, and the restart budget.

Pure; called by the reconcilers when a pod has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from stoker.operator.domain.clock import rest_s
from stoker.operator.domain.labels import NODE_RANK
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import PodExit, PodState, exit_of, label_number, pod_state
from stoker.pod.causes import Action, Cause, action_after, root_cause_rank

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
MAX_TASK_TRIES = 3


@dataclass(frozen=True)
class Ending:
    """The end of an attempt: the most telling exit of its pods."""

    cause: Cause
    detail: str
    exit_code: int | None
    step: int | None
    rank: int | None
    node_rank: int
    node: str
    pod: str
    disrupted: bool

    @property
    def action(self) -> Action:
        """The action of the table. A pod that was evicted, refused by a full node or lost is never the job's fault."""
        action = action_after(self.cause)
        return Action.RETRY_FREE if action is Action.RETRY and self.disrupted else action


def first_failure(pods: Iterable[Object]) -> Ending | None:
    """The most telling failure among the pods that have failed so far; None while there is none.

    One confirmed failure is enough: the others of the gang can never finish without it.
    """
    failed = [pod for pod in pods if pod_state(pod) is PodState.FAILED]
    endings = [_ending(pod, exit_of(pod)) for pod in failed]
    return root_cause(endings)


def first_removal(pods: Iterable[Object]) -> Ending | None:
    """The stop of a pod that another client deletes and that has not ended yet: its peers may miss it before it ends.

    Only for pods of an attempt that goes on: those of one that is over are deleted by the operator.
    """
    leaving = (pod for pod in pods if pod_state(pod) is PodState.TERMINATING)
    return root_cause(_removal(pod) for pod in leaving)


def root_cause(endings: Iterable[Ending]) -> Ending | None:
    """The ending that explains the others; of equal causes the one of the lowest node rank."""
    return min(endings, key=_root_cause_first, default=None)


def disruption(pods: Iterable[Object]) -> Ending | None:
    """The first cause among failures from outside of the job: a lost node, an eviction."""
    return first_failure(pod for pod in pods if exit_of(pod).disrupted or exit_of(pod).refused)


def lost_pod(node_rank: int, name: str) -> Ending:
    """The ending of a pod that is gone without a trace (deleted by force, its node removed)."""
    return Ending(Cause.RANK_KILLED, f"pod {name} is gone", None, None, None, node_rank, "", name, disrupted=True)


def retry_delay_s(failures_in_a_row: int) -> float:
    """Delay before a retry: 1 s, 2 s, 4 s ... up to 5 minutes. `failures_in_a_row` counts from 1."""
    return min(FIRST_DELAY_S * 2.0 ** min(max(failures_in_a_row - 1, 0), 20), LONGEST_DELAY_S)


def task_delay_s(tries: int) -> float:
    """Delay before a task is tried again: 10 s after the first try, then 60 s, while storage may be away."""
    return 10.0 if tries <= 1 else 60.0


def left_s(ended: datetime | None, delay_s: float, now: datetime) -> float:
    """Rest of a delay after an end that another clock noted; never more than the whole delay.

    It is over where the end seems to lie more than the whole delay ahead: a clock was put back.
    """
    return 0.0 if ended is None else min(rest_s(ended, delay_s, now), delay_s)


def exhausted(failures_in_a_row: int, backoff_limit: int) -> bool:
    """Whether there were more failures without progress between them than the job allows."""
    return failures_in_a_row > backoff_limit


def _ending(pod: Object, exit_: PodExit) -> Ending:
    message = exit_.message
    return Ending(
        cause=exit_.cause,
        detail=exit_.detail,
        exit_code=exit_.exit_code,
        step=message.step if message else None,
        rank=message.rank if message else None,
        node_rank=label_number(pod, NODE_RANK),
        node=str(pod["spec"].get("nodeName", "")),
        pod=str(pod["metadata"]["name"]),
        disrupted=exit_.disrupted or exit_.refused,
    )


def _removal(pod: Object) -> Ending:
    name = str(pod["metadata"]["name"])
    node, node_rank = str(pod["spec"].get("nodeName", "")), label_number(pod, NODE_RANK)
    return Ending(Cause.INTERRUPTED, f"pod {name} is being deleted", None, None, None, node_rank, node, name, True)


def _root_cause_first(ending: Ending) -> tuple[int, int]:
    return root_cause_rank(ending.cause), ending.node_rank
