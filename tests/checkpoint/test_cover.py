"""The proof of exact cover."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.box import Box
from stoker.checkpoint.cover import cover_problems, covers_exactly, tensor_problem
from stoker.checkpoint.manifest import Manifest, Piece, TensorInfo

HASH = "0" * 64


def piece(box: Box, flat: tuple[int, int] | None = None, *, offset: int = 0, file: str = "r.bin") -> Piece:
    first, end = flat or (0, box.volume)
    return Piece("w", box, first, end, "uint8", file, offset, end - first, HASH)


@pytest.mark.parametrize(
    ("shape", "pieces", "message"),
    [
        ((4, 4), [piece(Box((0, 0), (4, 4)))], None),
        ((4, 4), [piece(Box((0, 0), (2, 4))), piece(Box((2, 0), (2, 2))), piece(Box((2, 2), (2, 2)))], None),
        ((4, 4), [piece(Box((0, 0), (4, 4)), (0, 5)), piece(Box((0, 0), (4, 4)), (5, 16))], None),
        ((), [piece(Box((), ()))], None),
        ((0, 3), [], None),
        ((4, 4), [], r"no piece holds \[0:4, 0:4\]"),
        ((), [], r"no piece holds \[\]"),
        ((4, 4), [piece(Box((0, 0), (3, 4)))], r"no piece holds \[3:4, 0:4\]"),
        ((4,), [piece(Box((0,), (3,))), piece(Box((2,), (2,)))], r"pieces overlap at \[2:3\]"),
        ((4,), [piece(Box((0,), (4,))), piece(Box((0,), (4,)))], r"pieces overlap at \[0:4\]"),
        # the number of elements is right, the places are not
        ((4,), [piece(Box((0,), (2,))), piece(Box((1,), (2,)))], r"pieces overlap at \[1:2\]"),
        ((2, 2), [piece(Box((0, 0), (2, 1))), piece(Box((0, 0), (1, 2)))], r"pieces overlap at \[0:1, 0:1\]"),
        (
            (4, 4),
            [piece(Box((0, 0), (4, 4)), (0, 5)), piece(Box((0, 0), (4, 4)), (6, 16))],
            r"no piece holds \[1:2, 1:2\]",
        ),
    ],
)
def test_gaps_and_overlaps_are_named(shape: tuple[int, ...], pieces: list[Piece], message: str | None) -> None:
    problem = tensor_problem(TensorInfo("w", shape, "uint8"), pieces)
    if message is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(message, problem), problem


boxes_2d = st.builds(
    lambda a, b, c, d: Box((min(a, b), min(c, d)), (abs(a - b), abs(c - d))),
    *(st.integers(0, 3) for _ in range(4)),
)


@settings(max_examples=300, deadline=None)
@given(boxes=st.lists(boxes_2d, max_size=6))
def test_the_proof_agrees_with_counting_every_element(boxes: list[Box]) -> None:
    counts: dict[tuple[int, ...], int] = dict.fromkeys(product(range(3), repeat=2), 0)
    for box in boxes:
        for index in product(*(range(a, b) for a, b in zip(box.start, box.end, strict=True))):
            counts[index] += 1
    assert covers_exactly(Box.whole((3, 3)), boxes) == all(count == 1 for count in counts.values())


@settings(max_examples=100, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(1, 7)), max_size=12))
def test_every_guillotine_cut_is_an_exact_cover_and_loses_it_with_any_piece(cuts: list[tuple[int, int, int]]) -> None:
    boxes = [Box.whole((8, 8, 8))]
    for pick, dim, place in cuts:
        box = boxes[pick % len(boxes)]
        low = box.start[dim] + place
        if low < box.end[dim]:
            boxes.remove(box)
            first = tuple(place if axis == dim else size for axis, size in enumerate(box.size))
            start = tuple(low if axis == dim else value for axis, value in enumerate(box.start))
            rest = tuple(size - place if axis == dim else size for axis, size in enumerate(box.size))
            boxes += [Box(box.start, first), Box(start, rest)]
    assert covers_exactly(Box.whole((8, 8, 8)), boxes)
    for index in range(len(boxes)):
        assert not covers_exactly(Box.whole((8, 8, 8)), boxes[:index] + boxes[index + 1 :])
        assert not covers_exactly(Box.whole((8, 8, 8)), [*boxes, boxes[index]])


def test_bytes_between_pieces_of_a_file_are_found() -> None:
    tensor = TensorInfo("w", (4,), "uint8")
    pieces = [piece(Box((0,), (2,))), piece(Box((2,), (2,)), offset=3)]
    manifest = Manifest.build(step=1, writer="00000000", tensors=[tensor], pieces=pieces)
    assert [problem.split(": ")[-1] for problem in cover_problems(manifest)] == ["the piece before it ends at 2"]


def test_the_proof_is_linear_in_the_pieces() -> None:
    count = 20_000
    tensor = TensorInfo("w", (count, 8), "uint8")
    pieces = [piece(Box((row, 0), (1, 8))) for row in range(count)]
    assert tensor_problem(tensor, pieces) is None
    assert "no piece holds [19999:20000, 0:8]" in (tensor_problem(tensor, pieces[:-1]) or "")
