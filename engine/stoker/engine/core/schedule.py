"""A decision of the scheduler: the work of one step, in sequences and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.engine.core.blocks import Copy
from stoker.engine.core.request import Sequence, State


class TableChange(NamedTuple):
    """Columns [first, end) of a running sequence's block table are new."""

    sequence: Sequence
    first: int
    end: int


class Chunk(NamedTuple):
    """Tokens `start` to `start + length` of one sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int
    samples: tuple[Sequence, ...]
    """Sequences that sample a token from the chunk's last position: the sequence itself and its new forks. Empty for a
    chunk that does not reach the end of the known tokens."""
    preemptions: int
    """Those of the sequence when the chunk was scheduled."""

    @property
    def is_outdated(self) -> bool:
        """Whether the sequence was preempted since and runs again: on other blocks, and perhaps on another seat."""
        return self.sequence.state is State.RUNNING and self.sequence.preemptions > self.preemptions

    @property
    def is_current(self) -> bool:
        """Whether the sequence still runs, on the blocks and the seat that it had then."""
        return self.sequence.state is State.RUNNING and self.sequence.preemptions == self.preemptions


@dataclass
class Schedule:
    """One step's work."""

    chunks: list[Chunk] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    """Blocks to set to zero first: numbers that are not finite would reach their next owner even under a mask."""
    copies: list[Copy] = field(default_factory=list)
    opened: list[Sequence] = field(default_factory=list)
    """Sequences that took a seat in this step."""
    grown: list[TableChange] = field(default_factory=list)
    """New entries in the tables of other sequences."""
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
