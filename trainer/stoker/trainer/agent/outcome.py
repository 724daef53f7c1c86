"""Diagnose why the run of this pod ended, from how its ranks ended. Pure.

When one rank fails, the others fail after it, because it no longer answers them. So the root cause among all ends
decides (`stoker.pod.causes.ROOT_CAUSE_ORDER`), not the end that was seen first.

Called by the agent at the end.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.pod.causes import ORDERLY_ENDS, Cause, cause_of_exit_code, root_cause_rank
from stoker.trainer.protocol.messages import EndEvent

NOT_OF_RANKS = {Cause.HANG, Cause.TASK_FAILED}
"""Causes that an agent or a task gives, never a rank."""


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank's process."""

    rank: int
    returncode: int
    """The value of `subprocess`: negative for a signal."""
    end: EndEvent | None
    """Its own report, if it sent one."""
    last_lines: str = ""
    """The last lines of its log."""


@dataclass(frozen=True)
class RunOutcome:
    """The cause of the end of this pod's part of the run; the agent makes the termination message from it."""

    cause: Cause
    rank: int | None
    """The rank that failed; None when none did."""
    step: int | None
    detail: str


def diagnose(ends: Sequence[RankEnd], *, oom_kills: int, nodes: int) -> RunOutcome:
    """The root cause among the ranks that have ended, given in the order in which they ended.

    `oom_kills`: processes of this pod's control group that the kernel has killed for lack of memory since the pod's
    start.
    """
    outcome = min(
        (diagnose_rank(end, oom_kills=oom_kills) for end in ends), key=lambda outcome: root_cause_rank(outcome.cause)
    )
    if outcome.cause is Cause.PEER_LOST and nodes == 1:  # the peer is in this pod
        return replace(outcome, cause=Cause.RANK_FAILED)
    return outcome


def diagnose_rank(end: RankEnd, *, oom_kills: int) -> RunOutcome:
    """The outcome as one rank's end shows it: its own report, else the signal that killed it, else its exit code."""
    report = end.end
    reported = _reportable(report.cause) if report is not None else None
    if report is not None and reported is not None and reported not in ORDERLY_ENDS:
        return RunOutcome(reported, end.rank, report.step, report.detail or f"rank {end.rank} reported {reported}")
    if end.returncode < 0:
        return _killed(end, oom_kills)
    if report is not None and reported is not None and cause_of_exit_code(end.returncode) in ORDERLY_ENDS:
        return RunOutcome(reported, None, report.step, report.detail)
    return _ended_without_report(end)


def _reportable(cause: str) -> Cause | None:
    """The cause that a rank reports; None for text that is no cause, and for causes that only agents and tasks have."""
    return Cause(cause) if cause in set(Cause) - NOT_OF_RANKS else None


def _ended_without_report(end: RankEnd) -> RunOutcome:
    cause = cause_of_exit_code(end.returncode) or Cause.RANK_FAILED
    if cause in ORDERLY_ENDS or cause in NOT_OF_RANKS:  # a rank that ends in order reports it
        cause = Cause.RANK_FAILED
    detail = f"rank {end.rank} ended with exit code {end.returncode} and reported no cause"
    return RunOutcome(cause, end.rank, None, f"{detail}: {end.last_lines}" if end.last_lines else detail)


def _killed(end: RankEnd, oom_kills: int) -> RunOutcome:
    number = -end.returncode
    step = end.end.step if end.end is not None else None
    if number == signal.SIGKILL and oom_kills > 0:
        return RunOutcome(
            Cause.OUT_OF_MEMORY,
            end.rank,
            step,
            f"the kernel killed rank {end.rank}: the pod's memory limit was reached",
        )
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    detail = f"rank {end.rank} was killed by {name}"
    if number != signal.SIGKILL and end.last_lines:
        detail += f": {end.last_lines}"
    return RunOutcome(Cause.RANK_KILLED, end.rank, step, detail)


def read_oom_kills(events: str) -> int:
    """`oom_kill` of a control group's `memory.events`."""
    counts = dict(line.split(maxsplit=1) for line in events.splitlines() if " " in line)
    return int(counts.get("oom_kill", "0"))
