"""Packing: every trainable position lies in exactly one span, no sequence overflows, the fill is good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.trainer.rank.data.pack import Span, pack

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=60)


def positions(lengths: list[int], whole: list[int], size: int) -> set[tuple[int, int]]:
    return {
        (document, position)
        for document, length in enumerate(lengths)
        for position in range(min(length - 1, size) if whole[document] else length - 1)
    }


@given(lengths=LENGTHS, size=st.integers(1, 20), several=st.booleans(), seed=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_every_position_is_in_exactly_one_span(lengths: list[int], size: int, several: bool, seed: int) -> None:
    whole = np.random.default_rng(seed).integers(0, 2, len(lengths)).tolist()
    packing = pack(lengths, whole, size, several=several)
    seen = [
        (span.document, span.start + offset)
        for index in range(len(packing))
        for span in packing.sequence(index)
        for offset in range(span.length)
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == positions(lengths, whole, size)


@given(lengths=LENGTHS, size=st.integers(1, 20), several=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_sequence_overflows_and_none_is_empty(lengths: list[int], size: int, several: bool) -> None:
    packing = pack(lengths, [0] * len(lengths), size, several=several)
    for index in range(len(packing)):
        spans = packing.sequence(index)
        assert 0 < sum(span.length for span in spans) <= size
        assert several or len(spans) == 1


@pytest.mark.parametrize(
    ("lengths", "whole", "several", "sequences"),
    [
        ([5], [0], True, [[Span(0, 0, 4)]]),
        ([10], [0], True, [[Span(0, 0, 4)], [Span(0, 4, 4)], [Span(0, 8, 1)]]),
        ([10], [1], True, [[Span(0, 0, 4)]]),
        ([3, 3], [0, 0], True, [[Span(0, 0, 2), Span(1, 0, 2)]]),
        ([3, 3], [0, 0], False, [[Span(0, 0, 2)], [Span(1, 0, 2)]]),
        ([2, 4, 3, 3], [0] * 4, True, [[Span(1, 0, 3), Span(0, 0, 1)], [Span(2, 0, 2), Span(3, 0, 2)]]),
        ([0, 1, 2], [0] * 3, True, [[Span(2, 0, 1)]]),
    ],
    ids=["fits", "is split", "keeps its beginning", "two share", "packing off", "best fit", "too short"],
)
def test_documents_become_sequences_of_four(
    lengths: list[int], whole: list[int], several: bool, sequences: list[list[Span]]
) -> None:
    packing = pack(lengths, whole, 4, several=several)
    assert [packing.sequence(index) for index in range(len(packing))] == sequences


def test_natural_lengths_fill_above_99_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 2
    packing = pack(lengths.tolist(), [0] * len(lengths), 1024, several=True)
    assert (lengths - 1).sum() / (len(packing) * 1024) > 0.99
