"""The choice of a pair: a request is split only where that is predicted to be cheaper, between engines that fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.router.cache_aware import CacheAware
from stoker.router.load import Load
from stoker.router.pairs import (
    BYTES_PER_TOKEN,
    HANDOVER_S,
    SPLIT_GAIN,
    Pair,
    exposed_s,
    link_rate,
    of_role,
    prompt_costs,
    split_or_whole,
)
from stoker.router.standing import AGAINST_ROLE_S, Measured, measured
from stoker.router.work import Work
from testing.router.pair_costs import against, decode_s, whole_s
from testing.router.places import FLEETS, Engine, named, peer, report


def naive_split_s(answers: Engine, helper: Engine, tokens: int, rate: float) -> float | None:
    """The cost of one pair by the formulas of `pairs`, from nothing else; None where the two do not fit."""
    one, other = answers.load, helper.load
    if one is None or other is None or one.peer is None or other.peer is None or helper.silent:
        return None
    if answers is helper or answers.revision != helper.revision:
        return None
    seen, help_ = measured(answers, one, rate), measured(helper, other, rate)
    exposed = exposed_s(one.peer, other.peer, tokens, tokens / help_.rate)
    if exposed is None:
        return None
    prices = against(answers, "prefill") + against(helper, "decode")
    return help_.prefill_s(tokens) + exposed + decode_s(seen) + prices


def naive_best(fleet: list[Engine], tokens: int, rate: float) -> tuple[float, float | None]:
    """The cheapest engine alone, and the cheapest pair."""
    able = [one for one in fleet if not one.silent] or fleet
    alone = min(whole_s(one, measured(one, one.load, rate), tokens) for one in able)
    pairs = [naive_split_s(one, other, tokens, rate) for one in able for other in fleet]
    return alone, min((cost for cost in pairs if cost is not None), default=None)


def mean_rate(fleet: list[Engine]) -> float:
    able = [one for one in fleet if not one.silent] or fleet
    rates = [one.load.prefill_tokens_per_s for one in able if one.load and one.load.prefill_tokens_per_s]
    return sum(rates) / len(rates) if rates else 5000.0


@given(FLEETS, st.integers(0, 20_000), st.integers(0, 1000))
def test_the_pair_is_the_one_that_a_search_over_all_pairs_finds(drawn: list[Engine], tokens: int, turn: int) -> None:
    fleet = named(drawn)
    pair = CacheAware().pair(fleet, fleet, turn, Work(tokens))
    rate = mean_rate(fleet)
    alone, split = naive_best(fleet, tokens, rate)
    if pair.helper is None:
        assert split is None or split * SPLIT_GAIN >= alone * (1 - 1e-9)
        return
    cost = naive_split_s(pair.answers, pair.helper, tokens, rate)
    assert cost is not None
    assert split is not None
    assert cost <= split * (1 + 1e-9)
    assert cost * SPLIT_GAIN < alone * (1 + 1e-9)  # a split is never the slower way


@given(FLEETS, st.integers(0, 20_000))
def test_a_helper_has_the_same_revision_and_fingerprint_and_a_young_report(drawn: list[Engine], tokens: int) -> None:
    fleet = named(drawn)
    for pair in (
        CacheAware().pair(fleet, fleet, 0, Work(tokens)),
        split_or_whole(fleet[0], fleet, tokens, {}),
    ):
        if pair.helper is not None:
            one, other = pair.answers, pair.helper
            assert one is not other
            assert one.revision == other.revision
            assert one.load is not None
            assert other.load is not None
            assert one.load.peer is not None
            assert other.load.peer is not None
            assert one.load.peer.fingerprint == other.load.peer.fingerprint
            assert link_rate(one.load.peer, other.load.peer) is not None
            assert not other.silent


@given(FLEETS, st.integers(0, 20_000))
def test_another_policys_engine_is_split_only_where_that_is_cheaper_for_it(drawn: list[Engine], tokens: int) -> None:
    fleet = named(drawn)
    pair = split_or_whole(fleet[0], fleet, tokens, {}, 5000.0)
    assert pair.answers is fleet[0]
    alone = whole_s(fleet[0], measured(fleet[0], fleet[0].load, 5000.0), tokens)
    costs = [naive_split_s(fleet[0], other, tokens, 5000.0) for other in fleet]
    best = min((cost for cost in costs if cost is not None), default=None)
    assert (pair.helper is not None) == (best is not None and best < alone / SPLIT_GAIN)


def pools(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> list[Engine]:
    """One engine of each role, of equal rates."""
    known = {"prefill_tokens_per_s": 10_000.0, "gap_s": 0.02, "peer": peer()}
    p = Engine("p", "prefill", report(**{**known, **(prefill or {})}))
    return [p, Engine("d", "decode", report(**{**known, **(decode or {})}))]


@pytest.mark.parametrize(
    ("prefill", "decode", "tokens", "helper"),
    [
        pytest.param({}, {}, 8000, None, id="idle engines do not split"),
        pytest.param({}, {"requests": 20}, 8000, "p", id="a long prompt leaves the streams alone"),
        pytest.param({}, {"requests": 20}, 50, None, id="a short prompt is not worth the hand-over"),
        pytest.param(
            {"waiting": 1, "waiting_tokens": 60_000, "prompts": (60_000,)},
            {"requests": 20},
            8000,
            None,
            id="a queue there, none here",
        ),
        pytest.param(
            {}, {"requests": 1, "waiting": 1, "waiting_tokens": 8000}, 8000, "p", id="a queue here, none there"
        ),
        pytest.param({"peer": None}, {"requests": 20}, 8000, None, id="exchanges no blocks"),
        pytest.param({"peer": peer(fingerprint="x")}, {"requests": 20}, 8000, None, id="another fingerprint"),
        pytest.param({"peer": peer(transports=("nixl",))}, {"requests": 20}, 8000, None, id="no common transport"),
        pytest.param({}, {"requests": 20, "peer": peer(handover_s=9)}, 8000, None, id="slow hand-over"),
        pytest.param(
            {}, {"requests": 20, "peer": peer(link_bytes_per_s=1e7)}, 8000, None, id="slower link than computing"
        ),
    ],
)
def test_when_a_prompt_is_computed_elsewhere(
    prefill: dict[str, Any], decode: dict[str, Any], tokens: int, helper: str | None
) -> None:
    fleet = pools(prefill, decode)
    joint = CacheAware().pair(fleet, fleet, 0, Work(tokens))
    apart = split_or_whole(fleet[1], fleet, tokens, {})
    for pair in (joint, apart):
        assert pair.answers.name == "d"
        assert (pair.helper.name if pair.helper else None) == helper


def test_a_role_is_a_preference() -> None:
    p, d = pools()
    assert CacheAware().pair([p, d], [p, d], 0, Work(100)).answers is d
    assert CacheAware().pair([p], [p], 0, Work(100)) == Pair(p, None, 100)  # degraded: it serves alone
    d.pending = round(AGAINST_ROLE_S / 0.02) + 40
    assert CacheAware().pair([p, d], [p, d], 0, Work(100)).answers is p  # saves more than the preference is worth
    assert list(of_role([p, d])) == [d]
    assert list(of_role([p])) == [p]
    d.silent = True
    assert list(of_role([p, d])) == [p, d]


def test_own_dispatches_count_at_once() -> None:
    known = {"prefill_tokens_per_s": 10_000.0, "gap_s": 0.02, "peer": peer()}
    fleet = [Engine(name, "prefill", report(**known)) for name in "pq"]
    fleet.append(Engine("d", "decode", report(**known, requests=40)))
    used = []
    for turn in range(4):
        pair = CacheAware().pair(fleet, fleet, 0, Work(8000))
        assert pair.helper is not None, turn
        pair.computes.unstarted += (pair.uncached,)
        used.append(pair.helper.name)
    assert sorted(used) == ["p", "p", "q", "q"]


def test_a_split_costs_the_helper_what_it_has_not_cached() -> None:
    p, d = pools(None, {"requests": 40})
    policy, work = CacheAware(), Work(8000, chain=tuple(range(1, 32)))
    first = policy.pair([p, d], [p, d], 0, work)
    policy.note(work, first)
    assert (first.helper, first.uncached) == (p, 8000)
    assert policy.cached_tokens(work).keys() == {policy.slots.number(one.identity) for one in (p, d)}
    again = policy.pair([p, d], [p, d], 1, work)  # now D has the prompt itself
    assert (again.answers, again.helper) == (d, None)


def test_the_hand_over_hides_behind_the_prefill() -> None:
    one = peer(block_bytes=1 << 20, link_bytes_per_s=1e9, handover_s=0.01)
    whole = -(-1000 // 16) * (1 << 20) / 1e9
    assert exposed_s(one, peer(), 1000, 0.0) == pytest.approx(0.01 + whole)
    assert exposed_s(one, peer(), 1000, whole / 2) == pytest.approx(0.01 + whole / 2)
    assert exposed_s(one, peer(), 1000, 2 * whole) == pytest.approx(0.01)
    assert exposed_s(one, peer(), -5, 0.0) == pytest.approx(0.01)
    unmeasured = peer(block_bytes=None, handover_s=None, transports=("tcp",))
    expected = HANDOVER_S + 16 * BYTES_PER_TOKEN / 0.5e9
    assert exposed_s(unmeasured, unmeasured, 16, 0.0) == pytest.approx(expected)


def test_transports_of_one_host_do_not_join_two() -> None:
    near = peer(transports=("shared-memory", "tcp"))
    assert link_rate(near, near) == 2e9
    assert link_rate(near, peer(host_id="two")) == 0.5e9
    assert link_rate(peer(host_id=""), peer(host_id="")) == 0.5e9  # a host that is not known is no common one
    assert link_rate(peer(transports=("shared-memory",)), peer(host_id="two")) is None
    assert link_rate(peer(transports=("new",)), peer(transports=("new",))) == 0.5e9


def test_more_decoding_sequences_make_a_prompt_dearer() -> None:
    idle, busy = (Measured((), 0, decoding, 1000.0, 0.02).prefill_s(1000) for decoding in (0, 20))
    assert (idle, busy) == (1.0, 2.0)
    assert Load(epoch="e", seq=0, requests=2, waiting=5, waiting_tokens=0).decoding == 0


@given(FLEETS, st.integers(-100, 20_000), st.floats(100, 50_000))
def test_the_fast_cost_of_an_engine_is_the_formulas(drawn: list[Engine], uncached: int, rate: float) -> None:
    fleet = named(drawn)
    standings = [one.standing for one in fleet]
    costs = prompt_costs(standings, [uncached] * len(fleet), rate)
    for one, standing, cost in zip(fleet, standings, costs, strict=True):
        seen = measured(one, one.load, rate)
        assert cost + standing.answering_s == pytest.approx(whole_s(one, seen, uncached), rel=1e-9)
        assert cost + standing.helping_s == pytest.approx(seen.prefill_s(uncached) + against(one, "decode"), rel=1e-9)
        assert standing.answering_s == pytest.approx(decode_s(seen) + against(one, "prefill"), rel=1e-9)
