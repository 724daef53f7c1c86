"""Attention over runs, and the cut of documents over context-parallel ranks, against plain formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.model.context_cut import ContextCut, Documents, runs_between
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.runs import Run, pack_runs
from testing.model.run_checks import RUNS, SCALE, check_runs


@pytest.mark.parametrize(("runs", "window"), RUNS)
def test_torch_computes_runs_by_the_formula(runs: list[Run], window: int | None) -> None:
    check_runs(runs, window, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize(("runs", "window"), RUNS)
def test_runs_on_the_gpu(runs: list[Run], window: int | None) -> None:
    torch.set_default_device("cuda")
    try:
        check_runs(runs, window, "fused.kernels")
    finally:
        torch.set_default_device(None)


def test_more_queries_than_a_tile_holds_are_computed_tile_by_tile() -> None:
    check_runs([Run(600, 700, 100)], 300, "reference")


def test_runs_that_do_not_fit_are_refused_with_their_numbers() -> None:
    q, k = torch.zeros(3, 2, 4), torch.zeros(5, 1, 4)
    with pytest.raises(ValueError, match=r"q \(3, 2, 4\).* do not fit 3 queries and 4 keys"):
        Ops().attend_runs(q, k, k, pack_runs([Run(3, 4, 1)]), SCALE)


cuts = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(1, 9), min_size=1, max_size=6))
)


def cut_of(ranks: int, lengths: list[int]) -> tuple[ContextCut, Documents]:
    """The documents, with another that fills the last rank's share up."""
    rest = -sum(lengths) % ranks
    bounds = [0, *itertools.accumulate([*lengths, *([rest] if rest else [])])]
    return ContextCut(bounds[-1], ranks), Documents(bounds)


def document_of(documents: Documents, token: int) -> int:
    return sum(bound <= token for bound in documents.bounds)


@settings(deadline=None)
@given(cuts, st.one_of(st.none(), st.integers(1, 5)))
def test_every_query_sees_its_document_up_to_itself_and_no_further(
    case: tuple[int, list[int]], window: int | None
) -> None:
    cut, documents = cut_of(*case)
    assert sorted(token for rank in range(cut.ranks) for token in cut.tokens(rank)) == list(range(cut.num_tokens))
    assert {len(cut.tokens(rank)) for rank in range(cut.ranks)} == {cut.tokens_per_rank}
    for rank in range(cut.ranks):
        tokens = iter(cut.tokens(rank))
        for run, keys in cut.seen_keys(documents, rank, window):
            assert len(keys) == run.keys
            for place, query in zip(range(run.distance, run.distance + run.queries), tokens, strict=False):
                seen = {keys[key] for key in range(run.keys) if 0 <= place - key < (window or 10**6)}
                own = document_of(documents, query)
                wanted = {token for token in range(query + 1) if document_of(documents, token) == own}
                assert seen == {token for token in wanted if query - token < (window or 10**6)}
        assert next(tokens, None) is None


@settings(deadline=None)
@given(cuts)
def test_pieces_of_two_ranks_together_hold_every_pair_once(case: tuple[int, list[int]]) -> None:
    cut, documents = cut_of(*case)
    pairs = []
    for owner, rank in itertools.product(range(cut.ranks), repeat=2):
        for queries, keys in itertools.product(cut.pieces(rank), cut.pieces(owner)):
            if not queries or not keys or keys.start > queries.start:
                continue
            query, key = queries.start, keys.start
            for run in runs_between(documents, queries, keys):
                pairs += [
                    (query + i, key + j) for i in range(run.queries) for j in range(run.keys) if run.distance + i >= j
                ]
                query, key = query + run.queries, key + run.keys
            assert (query, key) == (queries.stop, keys.stop)
    wanted = [
        (query, key)
        for query in range(cut.num_tokens)
        for key in range(query + 1)
        if document_of(documents, query) == document_of(documents, key)
    ]
    assert sorted(pairs) == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_heads_and_tails_give_ranks_equal_work(ranks: int) -> None:
    cut, documents = ContextCut(48 * ranks, ranks), Documents([0, 48 * ranks])
    work = [sum(run.queries * run.distance for run, _ in cut.seen_keys(documents, rank, None)) for rank in range(ranks)]
    assert len(set(work)) == 1


def test_tokens_that_cannot_be_shared_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match="30 tokens cannot be cut over 4 ranks: 30 % 4 = 2"):
        ContextCut(30, 4)
