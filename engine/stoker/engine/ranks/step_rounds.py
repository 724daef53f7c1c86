"""The agreement of data-parallel ranks on their steps: which is next, and how many tokens each has in it. Pure.

A rank asks for its next step with the number of its tokens; idle ranks, which hear of it, ask for it with none. The
step begins when all have asked. A rank can be one step ahead of another that has asked for a step and not begun it; one
that is further ahead, or repeats or leaves out a step, is an error with its number.

Changed by `step_links`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Proposal(NamedTuple):
    """A rank asks for a step."""

    rank: int
    number: int
    tokens: int


class StepRound(NamedTuple):
    """A step that all ranks have asked for."""

    number: int
    tokens: tuple[int, ...]
    """Of each rank."""


class RanksParted(RuntimeError):
    """A rank asks for another step than its next one."""


class StepRounds:
    """What one rank knows of all."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.number = 0
        """The next step that this rank begins."""
        self._asked: list[deque[int]] = [deque() for _ in range(size)]
        """Each rank's tokens in the steps from `number` on that it has asked for."""

    @property
    def wanted(self) -> bool:
        """Whether another rank waits for this one."""
        return not self._asked[self.rank] and any(self._asked)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not asked for the next step."""
        return tuple(rank for rank, asked in enumerate(self._asked) if not asked)

    def propose(self, tokens: int) -> Proposal:
        """Ask for this rank's next step; return what the others must hear."""
        proposal = Proposal(self.rank, self.number + len(self._asked[self.rank]), tokens)
        self.hear(proposal)
        return proposal

    def hear(self, proposal: Proposal) -> None:
        """Note what a rank asks for. Raises RanksParted."""
        rank, number, tokens = proposal
        asked = self._asked[rank]
        ahead = len(asked)
        if number != self.number + ahead:
            raise RanksParted(f"data rank {rank} asks for step {number}, its next one is {self.number + ahead}")
        if ahead and (ahead > 1 or rank == self.rank or not self._asked[self.rank]):
            raise RanksParted(f"data rank {rank} asks for step {number}, although step {self.number} has not begun")
        asked.append(tokens)

    def take(self) -> StepRound | None:
        """Begin the next step; None until all ranks have asked for it."""
        if not all(self._asked):
            return None
        begun = StepRound(self.number, tuple(asked.popleft() for asked in self._asked))
        self.number += 1
        return begun
