"""Why the run of this pod ended: a pure decision over how its ranks ended.

When one rank fails, others fail after it, because it no longer answers them; so the most telling end decides, not the first that was seen.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.pod.exit_code import CAUSES, Cause
from stoker.trainer.protocol.channel import EndEvent

GOOD = (Cause.COMPLETED, Cause.INTERRUPTED, Cause.CANCELLED)

TELLING: tuple[Cause, ...] = (
    Cause.OUT_OF_MEMORY,
    Cause.RANK_KILLED,
    Cause.NON_FINITE,
    Cause.CONFIG_INVALID,
    Cause.MODEL_ERROR,
    Cause.CHECKPOINT_CORRUPT,
    Cause.DATA_ERROR,
    Cause.STORAGE_ERROR,
    Cause.INTERNAL,
    Cause.RANK_FAILED,
    Cause.PEER_LOST,
    Cause.CANCELLED,
    Cause.INTERRUPTED,
    Cause.COMPLETED,
)
"""Most telling first. A lost peer explains nothing as long as a rank of this pod has something of its own to say."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank's process ended."""

    rank: int
    returncode: int
    """As subprocess has it: negative for a signal."""
    end: EndEvent | None
    """Its own report, when it came to that."""
    last_lines: str = ""
    """What it wrote last to its log."""


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    rank: int | None
    step: int | None
    detail: str


def judge(ends: Sequence[RankEnd], *, oom_kills: int, nodes: int) -> Verdict:
    """The verdict over ended ranks, in the order in which they ended. `oom_kills` counts processes that the kernel killed
    for want of memory in this pod's control group since its start."""
    verdicts = [judge_one(end, oom_kills=oom_kills) for end in ends]
    verdict = min(verdicts, key=lambda verdict: TELLING.index(verdict.cause))
    if verdict.cause is Cause.PEER_LOST and nodes == 1:
        return Verdict(Cause.RANK_FAILED, verdict.rank, verdict.step, verdict.detail)
    return verdict


def judge_one(end: RankEnd, *, oom_kills: int) -> Verdict:
    said = end.end
    if said is not None and said.cause in TELLING and said.cause not in GOOD:
        return Verdict(Cause(said.cause), end.rank, said.step, said.detail or f"rank {end.rank} reported {said.cause}")
    if end.returncode < 0:
        return _killed(end, oom_kills)
    if said is not None and said.cause in GOOD and CAUSES.get(end.returncode) in GOOD:
        return Verdict(Cause(said.cause), None, said.step, said.detail)
    cause = CAUSES.get(end.returncode, Cause.RANK_FAILED)
    if cause in GOOD or cause not in TELLING:  # a rank that ends well says so
        cause = Cause.RANK_FAILED
    detail = f"rank {end.rank} ended with exit code {end.returncode} without a word"
    return Verdict(cause, end.rank, None, f"{detail}: {end.last_lines}" if end.last_lines else detail)


def _killed(end: RankEnd, oom_kills: int) -> Verdict:
    number = -end.returncode
    step = end.end.step if end.end is not None else None
    if number == signal.SIGKILL and oom_kills > 0:
        return Verdict(
            Cause.OUT_OF_MEMORY,
            end.rank,
            step,
            f"the kernel killed rank {end.rank}: the pod's memory limit was reached",
        )
    name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
    detail = f"rank {end.rank} was killed by {name}"
    if number != signal.SIGKILL and end.last_lines:
        detail += f": {end.last_lines}"
    return Verdict(Cause.RANK_KILLED, end.rank, step, detail)


def read_oom_kills(events: str) -> int:
    """`oom_kill` of a control group's `memory.events`."""
    counts = dict(line.split(maxsplit=1) for line in events.splitlines() if " " in line)
    return int(counts.get("oom_kill", "0"))
