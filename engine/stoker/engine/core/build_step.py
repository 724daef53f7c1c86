"""What one step computes and what it gave: plain numbers that can travel to any rank. Knows seats, not requests.

A seat is a row of the runner's per-sequence tensors (tokens, block table, sampling values). A seat is opened once with
everything known about its sequence; afterwards a step names only how far each seat goes. The token sampled in one step
is already in the seat's row when the next step starts, so the host need not have seen it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.messages import TokenLogprobs
from stoker.engine.core.request import Sequence as Running
from stoker.engine.core.scheduler import Schedule
from stoker.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence takes a seat."""

    seat: int
    tokens: tuple[int, ...]
    """All that are known; more than the prompt after a preemption."""
    num_prompt: int
    choice: int
    stop_tokens: tuple[int, ...]
    """Not to be chosen before `params.min_tokens`."""
    params: SamplingParams
    """With a seed."""


class TableEntry(NamedTuple):
    """`block_table[seat, column] = block`."""

    seat: int
    column: int
    block: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step. Its parts apply in the order of the fields; repeating the chunks gives the same result again."""

    number: int
    openings: tuple[Opening, ...]
    table: tuple[TableEntry, ...]
    cleared: tuple[int, ...]
    """Blocks to set to zero."""
    copies: tuple[tuple[int, int], ...]
    """(source, target) blocks, all read before any is written."""
    seats: tuple[int, ...]
    """One per chunk, as `starts`, `lengths` and `scored`."""
    starts: tuple[int, ...]
    """Tokens of the seat that are in the cache already."""
    lengths: tuple[int, ...]
    scored: tuple[int, ...]
    """At so many leading positions of the chunk the log-probability of the prompt token that follows is wanted."""
    sample_chunks: tuple[int, ...]
    """One per token to sample: the chunk whose last position gives the logits."""
    sample_seats: tuple[int, ...]
    """The seat whose sampling values count and that receives the token."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def undone_copies(self) -> tuple[TableEntry, ...]:
        """Entries that bring tables back to the blocks that this step's copies replaced, for a step before it."""
        sources = {target: source for source, target in self.copies}
        return tuple(entry._replace(block=sources[entry.block]) for entry in self.table if entry.block in sources)

    def only(self, chunks: Sequence[int], samples: Sequence[int]) -> StepInput:
        """Some chunks and samples of theirs, in order, for a second attempt: seats and blocks are ready, the table is made again."""
        place = {chunk: new for new, chunk in enumerate(chunks)}
        return replace(
            self,
            openings=(),
            cleared=(),
            copies=(),
            seats=tuple(self.seats[chunk] for chunk in chunks),
            starts=tuple(self.starts[chunk] for chunk in chunks),
            lengths=tuple(self.lengths[chunk] for chunk in chunks),
            scored=tuple(self.scored[chunk] for chunk in chunks),
            sample_chunks=tuple(place[self.sample_chunks[sample]] for sample in samples),
            sample_seats=tuple(self.sample_seats[sample] for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave, on the host."""

    number: int
    tokens: tuple[int, ...]
    """One per sample."""
    valid: tuple[bool, ...]
    """False where the logits were not finite: the token means nothing."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """One per sample; None where the seat does not ask."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    """One per chunk: for the prompt tokens from `start + 1` on, as many as `scored` says."""


def build_step_input(number: int, schedule: Schedule, blocks: BlockManager) -> StepInput:
    """The schedule as plain numbers."""
    seats, starts, lengths, scored, sample_chunks, sample_seats = [], [], [], [], [], []
    for index, (sequence, start, length, samples) in enumerate(schedule.chunks):
        seats.append(seat_of(sequence))
        starts.append(start)
        lengths.append(length)
        scored.append(0 if sequence.request.params.prompt_logprobs is None else _num_scored(sequence, start, length))
        for sampled in samples:
            sample_chunks.append(index)
            sample_seats.append(seat_of(sampled))
    return StepInput(
        number=number,
        openings=tuple(_opening(sequence) for sequence in schedule.opened),
        table=tuple(_table_entries(schedule, blocks)),
        cleared=tuple(schedule.cleared),
        copies=tuple((copy.source, copy.target) for copy in schedule.copies),
        seats=tuple(seats),
        starts=tuple(starts),
        lengths=tuple(lengths),
        scored=tuple(scored),
        sample_chunks=tuple(sample_chunks),
        sample_seats=tuple(sample_seats),
    )


def seat_of(sequence: Running) -> int:
    assert sequence.seat is not None, "only a running sequence takes part in a step"
    return sequence.seat


def _num_scored(sequence: Running, start: int, length: int) -> int:
    """What follows the prompt's last token is not a prompt token."""
    return max(min(length, sequence.num_prompt - 1 - start), 0) if sequence.scores_prompt else 0


def _opening(sequence: Running) -> Opening:
    request = sequence.request
    return Opening(
        seat=seat_of(sequence),
        tokens=tuple(sequence.tokens),
        num_prompt=sequence.num_prompt,
        choice=sequence.choice,
        stop_tokens=tuple(sorted(request.stop_tokens)),
        params=request.params,
    )


def _table_entries(schedule: Schedule, blocks: BlockManager) -> Iterator[TableEntry]:
    """The whole table of a seat that opens; of others what is new."""
    for sequence in schedule.opened:
        yield from _entries(sequence, blocks, 0, len(blocks.table(sequence)))
    for sequence, first, end in schedule.grown:
        yield from _entries(sequence, blocks, first, end)


def _entries(sequence: Running, blocks: BlockManager, first: int, end: int) -> Iterator[TableEntry]:
    seat, table = seat_of(sequence), blocks.table(sequence)
    for column in range(first, end):
        yield TableEntry(seat, column, table[column])
