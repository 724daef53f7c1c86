"""Conversion of a schedule to the plain numbers of a step: the seam between sequences and step values."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.request import Sequence
from stoker.engine.core.schedule import Schedule
from stoker.engine.execution.step import Opening, SeatMask, StepInput, TableEntry


def build_step_input(number: int, schedule: Schedule, blocks: BlockManager) -> StepInput:
    """The schedule as the input of one step."""
    seats, starts, lengths, scored, sample_chunks, sample_seats = [], [], [], [], [], []
    for index, (sequence, start, length, samples, _) in enumerate(schedule.chunks):
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
        masks=tuple(_masks(schedule)),
    )


def seat_of(sequence: Sequence) -> int:
    assert sequence.seat is not None, "only a running sequence takes part in a step"
    return sequence.seat


def _masks(schedule: Schedule) -> Iterator[SeatMask]:
    """The tokens that each constrained sample may be."""
    for sequence in (sequence for chunk in schedule.chunks for sequence in chunk.samples):
        if sequence.constraint is not None:
            before = sequence.num_output + sequence.num_pending - 1  # the token of this step is pending, too
            yield SeatMask(seat_of(sequence), sequence.constraint.allowed(sequence.tokens, before))


def _num_scored(sequence: Sequence, start: int, length: int) -> int:
    """Positions of the chunk whose following token belongs to the prompt and is to be scored."""
    return max(min(length, sequence.num_prompt - 1 - start), 0) if sequence.scores_prompt else 0


def _opening(sequence: Sequence) -> Opening:
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
    """New entries of block tables: whole tables of seats that open, and what other sequences gained."""
    for sequence in schedule.opened:
        yield from _entries(sequence, blocks, 0, len(blocks.table(sequence)))
    for sequence, first, end in schedule.grown:
        yield from _entries(sequence, blocks, first, end)


def _entries(sequence: Sequence, blocks: BlockManager, first: int, end: int) -> Iterator[TableEntry]:
    seat, table = seat_of(sequence), blocks.table(sequence)
    for column in range(first, end):
        yield TableEntry(seat, column, table[column])
