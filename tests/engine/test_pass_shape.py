"""The choice of a step's pass and its inputs: pure decisions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.execution.pass_inputs import ALIGNMENT, pack_inputs, packed_length, sample_places, split
from stoker.engine.execution.pass_shape import (
    MOST_TOKENS,
    WORTH_ROWS,
    PassShape,
    all_output_rows,
    decode_sizes,
    lost_rows,
    padded_rows,
    pass_shapes,
    stand_in,
)
from stoker.engine.execution.step import StepInput
from stoker.engine.execution.step_rows import no_rows, step_rows

MANY = pass_shapes(256, MOST_TOKENS)
CASES = [
    pytest.param((1, 1, 0), PassShape(1, 1, 0), id="one decodes"),
    pytest.param((9, 9, 0), PassShape(16, 16, 0), id="nine decode"),
    pytest.param((128, 0, 1), PassShape(128, 8, 4, False), id="a prompt alone"),
    pytest.param((129, 1, 1), PassShape(192, 8, 6, False), id="a prompt beside a decode"),
    pytest.param((200, 160, 4), PassShape(256, 256, 8, False), id="many decode"),
    pytest.param((100, 90, 4), PassShape(128, 128, 4, False), id="decodes fill the rows at most"),
    pytest.param((60, 0, 5), PassShape(192, 8, 6, False), id="many short prompts"),
    pytest.param((1, 1, 2), PassShape(16, 8, 4, False), id="a decode that forks"),
    pytest.param((2049, 1, 1), None, id="too long"),
    pytest.param((300, 0, 65), None, id="too many prompts"),
]


@pytest.mark.parametrize(("step", "wanted"), CASES)
def test_a_step_takes_the_smallest_pass_that_holds_it(step: tuple[int, int, int], wanted: PassShape | None) -> None:
    assert MANY.choose(*step) == wanted


@given(st.integers(1, 300), st.integers(1, 3000))
def test_every_kind_holds_its_own_numbers_and_fits_the_largest(num_seats: int, max_tokens: int) -> None:
    shapes = pass_shapes(num_seats, max_tokens)
    every = (*shapes.decodes, *shapes.mixed)
    unsampled = {shape for shape in shapes.order if not shape.prompts and not shape.samples}
    assert sorted(set(shapes.order) - unsampled) == sorted(every)
    assert len(set(shapes.order)) == len(shapes.order)
    for shape in every:
        assert shapes.choose(*shape[:3]) == shape
        assert shape.decodes <= min(shape.tokens, num_seats)
        assert all(map(int.__ge__, shapes.largest[:3], shape[:3]))
        assert packed_length(shape) <= packed_length(shapes.largest)
    assert shapes.decodes[-1].decodes == num_seats
    assert max(shape.tokens for shape in shapes.mixed) == max_tokens


def test_capture_begins_with_what_the_first_requests_need() -> None:
    first, largest, *_ = MANY.order[3:]
    assert first == PassShape(8, 8, 0)
    assert largest == MANY.mixed[-1] == MANY.largest._replace(samples=False)
    mixed = [shape[:2] for shape in MANY.order if shape.prompts]
    assert mixed[:4] == [largest[:2], (528, 64), (544, 64), (576, 64)], "a prompt's piece beside decodes, then others"
    decodes_alone = replace(MANY, mixed=())
    assert decodes_alone.order[:6] == (*decodes_alone.first, PassShape(16, 16, 0))
    assert decodes_alone.first[-1] == PassShape(256, 256, 0)
    beside = {(528, 64), (544, 64), (576, 64)}
    assert {shape[:2] for shape in MANY.first if shape.prompts} == {largest[:2], *beside}, "whatever a capture costs"
    assert decodes_alone.choose(128, 0, 1) is None


STEPS = st.one_of(
    st.integers(1, 256).map(lambda decodes: (decodes, decodes, 0)),
    st.tuples(st.integers(0, 200), st.integers(1, 8), st.integers(1, 225)).map(
        lambda one: (one[0] + one[1] * one[2], one[0], one[1])
    ),
)


@given(STEPS, st.sampled_from([(True, False), (True, True), (False, False)]), st.integers(0, len(MANY.order)))
def test_a_stand_in_holds_the_step_with_little_padding(
    step: tuple[int, int, int], kind: tuple[bool, bool], num_captured: int
) -> None:
    """The step is `(tokens, decodes, prompts)`; some first shapes are captured."""
    wanted = MANY.choose(*step)
    assert wanted is not None
    if not wanted.prompts:
        wanted = wanted._replace(samples=kind[0], filtered=kind[1])
    captured = MANY.order[:num_captured]
    found = stand_in(wanted, *step, captured)
    lost = lost_rows(wanted, found)
    if found is None:
        assert lost == WORTH_ROWS
        assert not any(
            all(map(int.__ge__, shape[:3], step)) and shape[:3] == wanted[:3] and not shape.samples
            for shape in captured
        )
        return
    assert found in captured
    assert all(map(int.__ge__, found[:3], step))
    assert bool(found.prompts) == bool(wanted.prompts)
    assert not found.samples or (found.samples, found.filtered) == (wanted.samples, wanted.filtered)
    assert found.tokens <= step[0] + WORTH_ROWS
    assert 1 <= lost <= WORTH_ROWS


@given(STEPS)
def test_the_cover_serves_every_step(step: tuple[int, int, int]) -> None:
    wanted = MANY.choose(*step)
    assert wanted is not None
    captured = (*MANY.first, *MANY.cover)
    found = stand_in(wanted, *step, captured)
    assert found is not None
    if not wanted.prompts:
        assert found.tokens <= 2 * step[0] or found.tokens == 1
        assert stand_in(wanted._replace(filtered=True), *step, captured) is not None
    else:
        assert found.tokens <= max(2 * step[0], 64) + 256


def test_padding_is_at_most_half_of_the_rows() -> None:
    for num_tokens in range(8, MOST_TOKENS + 1):
        shape = MANY.choose(num_tokens, 0, 1)
        assert shape is not None
        assert shape.tokens <= 2 * num_tokens


def test_output_rows_have_every_tile_up_to_the_seats() -> None:
    assert all_output_rows(1) == (1,)
    assert all_output_rows(20) == (24, 16, 8, 4, 3, 2, 1)
    assert all_output_rows(24) == (24, 16, 8, 4, 3, 2, 1)


def test_samples_outside_of_graphs_have_only_numbers_of_rows_whose_kernels_are_loaded() -> None:
    loaded = all_output_rows(100)
    for number in range(1, 101):
        rows = np.arange(number) * 3
        padded = padded_rows(rows)
        assert len(padded) in loaded
        assert padded[:number].tolist() == rows.tolist()
        assert set(padded[number:].tolist()) <= {rows[-1]}


def test_decode_sizes_end_with_the_seats() -> None:
    assert decode_sizes(1) == (1,)
    assert decode_sizes(5) == (1, 2, 4, 5)
    assert decode_sizes(300)[-3:] == (256, 288, 300)


CHUNKS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=6)


def step_of(chunks: list[tuple[int, int, int]]) -> StepInput:
    """Return a step of chunks (start, length, samples): the first sample is the chunk's own, others are forks'."""
    forks = itertools.count(len(chunks))
    seats = tuple(reversed(range(len(chunks))))
    samples = [(i, seat if not k else next(forks)) for i, seat in enumerate(seats) for k in range(chunks[i][2])]
    return StepInput(
        number=0, openings=(), table=(), cleared=(), copies=(),
        seats=seats,
        starts=tuple(start for start, _, _ in chunks),
        lengths=tuple(length for _, length, _ in chunks),
        scored=(0,) * len(chunks),
        sample_chunks=tuple(chunk for chunk, _ in samples),
        sample_seats=tuple(seat for _, seat in samples),
    )  # fmt: skip


@given(CHUNKS)
def test_every_chunk_and_sample_has_its_place_in_the_pass(chunks: list[tuple[int, int, int]]) -> None:
    step = step_of(chunks)
    rows = step_rows(step)
    assert rows.num_decodes == sum(length == 1 and samples > 0 for _, length, samples in chunks)
    for chunk, (seat, (start, length, _)) in enumerate(zip(step.seats, chunks, strict=True)):
        place = rows.places[chunk]
        assert (rows.seats[place], rows.starts[place], rows.lengths[place]) == (seat, start, length)
    shape = pass_shapes(16, 64).choose(rows.num_tokens, rows.num_decodes, max(rows.num_prompts, rows.num_others))
    if shape is None:  # more forks than any pass has prompts
        assert max(rows.num_prompts, rows.num_others) > 4
        return
    blocks = np.arange(rows.num_decodes) + 500
    inputs = split(pack_inputs(shape, rows, blocks), shape)
    places = sample_places(shape, rows)
    assert len(set(places)) == len(step.sample_seats)
    assert inputs.seats[places].tolist() == list(step.sample_seats)
    assert np.delete(inputs.seats, places).tolist() == [-1] * (shape.sequences - len(places))
    assert inputs.following[places].tolist() == [sum(chunks[chunk][:2]) for chunk in step.sample_chunks]
    assert inputs.blocks[: rows.num_decodes].tolist() == blocks.tolist()
    if shape.prompts:
        lasts = [int(rows.begins[rows.places[chunk]]) + chunks[chunk][1] - 1 for chunk in step.sample_chunks]
        assert inputs.rows[places].tolist() == lasts
        taken = inputs.prompt_seats >= 0
        assert taken.tolist() == [True] * rows.num_prompts + [False] * (shape.prompts - rows.num_prompts)
        assert (np.diff(inputs.begins)[taken] > 0).all()
        assert (np.diff(inputs.begins)[~taken] == 0).all()
        assert (inputs.begins[0], inputs.begins[-1]) == (rows.num_decodes, rows.num_tokens)


def test_parts_begin_at_aligned_places_and_do_not_overlap() -> None:
    for shape in (*MANY.decodes, *MANY.mixed):
        run = np.zeros(packed_length(shape), dtype=np.int32)
        for number, part in enumerate(split(run, shape), 1):
            assert (part.__array_interface__["data"][0] - run.__array_interface__["data"][0]) % (4 * ALIGNMENT) == 0
            assert not part.any()
            part.fill(number)


def test_nothing_but_padding_has_no_sequence() -> None:
    for shape in (PassShape(4, 4, 0), PassShape(16, 8, 4), PassShape(16, 0, 4)):
        inputs = split(pack_inputs(shape, no_rows(), np.empty(0, dtype=np.int64)), shape)
        assert set(inputs.seats) == {-1}
        assert set(inputs.prompt_seats) <= {-1}
        assert set(inputs.begins) <= {0}
