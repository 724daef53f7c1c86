"""The order of samples: a bijection per epoch, exact shares, determined by seed and number alone."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.trainer.rank.data.order import Order, Sample, mix, permute

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 0.7, 1.0, 3.0, 1e-3]), min_size=1, max_size=4)


@given(size=st.integers(1, 3000), key=st.text(max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_permutation_hits_every_index_once(size: int, key: str) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_the_permutation_stays_the_same_for_ever() -> None:
    assert permute(np.arange(10), 10, "7/books/0").tolist() == GOLDEN


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {
        tuple(permute(np.arange(50), 50, f"{seed}/s/{epoch}").tolist()) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_every_index_comes_first_about_equally_often() -> None:
    firsts = Counter(int(permute(np.array([0]), 7, str(key))[0]) for key in range(1400))
    assert set(firsts) == set(range(7))
    assert all(140 < count < 260 for count in firsts.values())


@given(weights=WEIGHTS, first=st.integers(0, 10**9), count=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_every_stretch_holds_each_sources_share(weights: list[float], first: int, count: int) -> None:
    sources, _ = mix(np.arange(first, first + count), weights)
    for source, weight in enumerate(weights):
        share = count * weight / sum(weights)
        assert abs((sources == source).sum() - share) <= len(weights)


@given(weights=WEIGHTS, count=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_each_source_is_counted_without_gaps(weights: list[float], count: int) -> None:
    sources, ranks = mix(np.arange(count), weights)
    for source in range(len(weights)):
        assert ranks[sources == source].tolist() == list(range(int((sources == source).sum())))


@given(weights=WEIGHTS, sizes=st.data(), cuts=st.lists(st.integers(0, 120), max_size=5))
@settings(max_examples=50, deadline=None)
def test_samples_do_not_depend_on_how_they_are_asked_for(
    weights: list[float], sizes: st.DataObject, cuts: list[int]
) -> None:
    counts = sizes.draw(st.lists(st.integers(1, 40), min_size=len(weights), max_size=len(weights)))
    order = Order(seed=3, names=tuple("abcd"[: len(weights)]), sizes=tuple(counts), weights=tuple(weights))
    edges = sorted({0, 120, *cuts})
    pieces = [sample for low, high in itertools.pairwise(edges) for sample in order.samples(low, high)]
    assert pieces == order.samples(0, 120)


def test_an_epoch_of_one_source_holds_each_sequence_once() -> None:
    order = Order(seed=1, names=("a",), sizes=(13,), weights=(1.0,))
    for epoch in range(3):
        samples = order.samples(13 * epoch, 13 * (epoch + 1))
        assert sorted(sample.sequence for sample in samples) == list(range(13))


def test_another_source_does_not_reorder_the_first() -> None:
    alone = Order(seed=1, names=("a",), sizes=(9,), weights=(1.0,)).samples(0, 9)
    both = Order(seed=1, names=("a", "b"), sizes=(9, 5), weights=(1.0, 2.0)).samples(0, 27)
    assert [sample for sample in both if sample.source == 0] == alone


def test_no_samples_are_asked_for() -> None:
    assert Order(seed=1, names=("a",), sizes=(9,), weights=(1.0,)).samples(4, 4) == []


@pytest.mark.parametrize("sample", [0, 10**15])
def test_far_samples_are_as_cheap_as_near_ones(sample: int) -> None:
    found = Order(seed=1, names=("a", "b"), sizes=(9, 5), weights=(0.3, 0.7)).samples(sample, sample + 1)[0]
    assert isinstance(found, Sample)


GOLDEN = [4, 7, 0, 1, 6, 5, 8, 9, 3, 2]


@given(
    st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.0, 7.0]), min_size=1, max_size=5),
    st.integers(0, 400),
)
def test_the_samples_drawn_of_each_source_are_those_of_the_order(weights: list[float], samples: int) -> None:
    sizes = tuple(range(3, 3 + len(weights)))
    order = Order(seed=0, names=tuple(map(str, sizes)), sizes=sizes, weights=tuple(weights))
    walked = Counter(sample.source for sample in order.samples(0, samples))
    assert order.drawn(samples) == tuple(walked[source] for source in range(len(weights)))
