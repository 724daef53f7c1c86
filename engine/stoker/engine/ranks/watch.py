"""The rules by which ranks count as lost. Pure: messages, ends of processes and the time are passed in.

A rank is lost when its process ends, when it is silent for too long, when its tokens differ from rank 0's, when it
fails in a step where others do not, or when a step does not end. One lost rank makes others fail, so the rank to name
is chosen a moment after the first sign: a killed process before a silent one, before the first that reported an error.
Only time in which the watch itself ran counts as silence, so a suspended machine accuses no one.

Changed by `workers` with each message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LISTEN_S = 0.25
"""How often the watch looks."""


@dataclass(frozen=True)
class RankLimits:
    """Times after which ranks count as lost."""

    silent_s: float = 20.0
    """Without a sign of life, once the rank is ready; they come every second."""
    silent_loading_s: float = 120.0
    """The same before: the process imports torch, and reading weights may hold it up."""
    step_s: float = 120.0
    """For one step over all ranks."""
    settle_s: float = 0.5
    """From the first sign to the choice of the rank to name."""


@dataclass
class RankRecord:
    """What is known of one rank."""

    joined: bool = True
    """Whether it has connected. A rank of another pod does so when that pod runs, and is not silent before."""
    pod: str = ""
    """Name of its pod, where that is another one."""
    pid: int = 0
    closed: bool = False
    """Whether its connection has ended, which is all that is seen of the end of another pod's process."""
    ready: bool = False
    begun: int = 0
    """Steps begun."""
    done: int = 0
    silence_s: float = 0.0
    exit_code: int | None = None
    """Of its process; negative: the signal that killed it."""
    error: str = ""
    failed_s: float | None = None
    """When it reported the error."""


@dataclass
class RankWatch:
    """All ranks; rank 0 is the one that watches."""

    size: int
    limits: RankLimits = RankLimits()
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    step_since_s: float | None = None
    """When rank 0 began to wait for the oldest step that has not ended."""
    differing: Mapping[int, int] = field(default_factory=dict)
    """Ranks with other tokens than rank 0: rank -> steps until it was noticed."""
    parted: str | None = None
    """The rank that failed in a step in which others did not (`failures`)."""
    _listened_s: float | None = None
    _sign_s: float | None = None
    """When the first sign was noticed."""

    def __post_init__(self) -> None:
        self.ranks = {rank: RankRecord() for rank in range(self.size)}

    def heard(self, rank: int) -> RankRecord:
        """Note a sign of life."""
        record = self.ranks[rank]
        record.silence_s = 0.0
        return record

    def failed(self, rank: int, error: str, now_s: float) -> None:
        """Note the first error of a rank."""
        record = self.ranks[rank]
        if record.failed_s is None:
            record.error, record.failed_s = error, now_s

    def listen(self, now_s: float) -> None:
        """Add the time since the last call to everyone's silence."""
        if self._listened_s is not None:
            for record in (found for found in self.ranks.values() if found.joined):
                record.silence_s += min(now_s - self._listened_s, 2 * LISTEN_S)
        self._listened_s = now_s

    def verdict(self, now_s: float) -> str | None:
        """The rank that is lost, and why; None while there is nothing to report."""
        named = self._named(now_s)
        if named is None:
            return None
        if self._sign_s is None:
            self._sign_s = now_s
        return named if now_s - self._sign_s >= self.limits.settle_s else None

    def _named(self, now_s: float) -> str | None:
        killed = [
            rank
            for rank, record in self._further()
            if (record.exit_code is not None or record.closed) and not record.error
        ]
        if killed:
            return "; ".join(f"{self._name(rank)} {_ended(self.ranks[rank].exit_code)}" for rank in killed)
        silent = [rank for rank, record in self._further() if record.silence_s > self._silent_limit_s(record)]
        if silent:
            return "; ".join(f"{self._name(rank)} is silent for {self.ranks[rank].silence_s:.0f} s" for rank in silent)
        failed = [(record.failed_s, rank) for rank, record in self.ranks.items() if record.failed_s is not None]
        if failed:
            _, rank = min(failed)
            return f"{self._name(rank)}: {self.ranks[rank].error}"
        if self.parted is not None:
            return self.parted
        if self.differing:
            rank, steps = next(iter(self.differing.items()))
            return f"rank {rank} has sampled other tokens than rank 0 in one of its first {steps} steps"
        return self._stuck(now_s)

    def _stuck(self, now_s: float) -> str | None:
        if self.step_since_s is None or now_s - self.step_since_s <= self.limits.step_s:
            return None
        places = ", ".join(f"rank {rank} has begun {record.begun}" for rank, record in self._further())
        return f"a step has not ended in {now_s - self.step_since_s:.0f} s; steps: {places}"

    def _name(self, rank: int) -> str:
        pod = self.ranks[rank].pod
        return f"rank {rank} in pod {pod}" if pod else f"rank {rank}"

    def _further(self) -> list[tuple[int, RankRecord]]:
        return [(rank, record) for rank, record in self.ranks.items() if rank]

    def _silent_limit_s(self, record: RankRecord) -> float:
        return self.limits.silent_s if record.ready else self.limits.silent_loading_s


def _ended(code: int | None) -> str:
    if code is None:
        return "has ended: its connection is closed"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
