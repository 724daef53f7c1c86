"""What the router knows of a store: announcements, their price against computing, memory, and the name on the wire."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.pod.beginnings import BEGINNING_HEADER, beginning_in
from stoker.router.cache_aware import ALIKE, PIECE_TOKENS, CacheAware
from stoker.router.load import STORE_BYTES_PER_S, Load, SharedStore
from stoker.router.pairs import Pair
from stoker.router.prefix_index import PIECE_BYTES, PrefixIndex, chain_of
from stoker.router.standing import STREAM_WEIGHT, measured
from stoker.router.stored_prefixes import MAX_ENGINES, StoredPrefixes, name_of
from stoker.router.work import Work
from testing.router.fake_engine import FakeEngine
from testing.router.harness import routed, run, until
from testing.router.places import PROMPTS, Engine, report

HEADER = BEGINNING_HEADER.decode()
BLOCK = 16


def store(announced: dict[str, bool] | None = None, **fields: Any) -> SharedStore:
    known = {"name": "s", "block_size": BLOCK, "block_bytes": 1 << 20, "block_s": 0.001, "readable": True}
    return SharedStore(**{**known, "announced": announced or {}, **fields})


def chain(seed: int, pieces: int) -> tuple[int, ...]:
    return chain_of(random.Random(seed).randbytes(pieces * PIECE_BYTES))


FAMILIES = [chain(seed, 6) for seed in range(3)]
"""Prompts by their beginnings: any number of a family's pieces."""
STORES = st.none() | st.builds(
    store,
    name=st.sampled_from(["s", "s", "t"]),
    block_s=st.none() | st.floats(0, 0.05),
    readable=st.booleans(),
)
FLEETS = st.lists(
    st.tuples(
        st.none()
        | st.builds(
            report,
            requests=st.integers(0, 20),
            waiting=st.integers(0, 5),
            waiting_tokens=st.integers(0, 4000),
            prefill_tokens_per_s=st.none() | st.floats(100, 20_000),
            gap_s=st.none() | st.floats(0.001, 0.1),
            store=STORES,
        ),
        st.integers(0, 20),
        PROMPTS,
    ),
    min_size=1,
    max_size=6,
)
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from("st"), st.booleans()), max_size=10)
"""Announcements: a beginning of a family, at a store, stored or gone."""


class SlowStores:
    """The slow twin: whole beginnings in sets, prices in seconds by the definition."""

    def __init__(self) -> None:
        self.pieces: set[tuple[str, int]] = set()

    def announce(self, name: str, own: tuple[int, ...], *, is_there: bool) -> None:
        if is_there:
            self.pieces |= {(name, key) for key in own}
        else:
            self.pieces.discard((name, own[-1]))

    def tokens(self, name: str, own: tuple[int, ...]) -> int:
        depth = next((at for at, key in enumerate(own) if (name, key) not in self.pieces), len(own))
        return depth * PIECE_TOKENS

    def cost_s(self, engine: Engine, work: Work, mean: float) -> tuple[float, float]:
        """Lowest and highest: the policy rounds the loading to whole tokens."""
        load = engine.load
        rate = load.prefill_tokens_per_s or mean if load is not None else mean
        pending = max(engine.pending, load.requests if load is not None else 0)
        share = 1 + (load.decoding if load is not None else 0) * STREAM_WEIGHT
        seen = measured(engine, load, mean)
        prefill_s = seen.prefill_s(work.tokens)
        if load is not None and load.store is not None and load.store.readable:
            loaded = min(self.tokens(load.store.name, work.chain), work.tokens)
            one_s = load.store.block_s if load.store.block_s is not None else (1 << 20) / STORE_BYTES_PER_S
            load_s = -(-loaded // BLOCK) * one_s
            prefill_s = min(prefill_s, seen.prefill_s(work.tokens - loaded + int(load_s * rate / share)))
        gap = load.gap_s if load is not None and load.gap_s else 0.02
        whole = prefill_s + pending * gap
        return whole - share / rate, whole


@settings(max_examples=150, deadline=None)
@given(fleet=FLEETS, events=EVENTS, family=st.integers(0, 2), pieces=st.integers(0, 6), turn=st.integers(0, 99))
def test_the_choice_counts_what_is_stored_by_the_time_of_loading_it(
    fleet: list[Any], events: list[tuple[int, int, str, bool]], family: int, pieces: int, turn: int
) -> None:
    engines = [Engine(str(number), "colocated", *values) for number, values in enumerate(fleet)]
    policy, twin = CacheAware(), SlowStores()
    policy.stored.reported(("x", "e"), store())  # from now on names are kept
    for one in FAMILIES:
        for depth in range(1, 7):
            policy.stored.sent(one[:depth])
    for number, (of, depth, name, is_there) in enumerate(events):
        own = FAMILIES[of][:depth]
        policy.stored.reported((f"x{number}", "e"), store({name_of(own): is_there}, name=name))
        twin.announce(name, own, is_there=is_there)
    work = Work(pieces * PIECE_TOKENS + 100, FAMILIES[family][:pieces])
    chosen = policy.pair(engines, (), turn, work).answers
    rates = [one.load.prefill_tokens_per_s for one in engines if one.load and one.load.prefill_tokens_per_s]
    mean = sum(rates) / len(rates) if rates else 5000.0
    costs = {one.name: twin.cost_s(one, work, mean) for one in engines}
    assert costs[chosen.name][0] <= min(high for _, high in costs.values()) * ALIKE + 1e-9


@given(
    adds=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.booleans()), max_size=40),
    asked=st.integers(1, 3),
)
def test_a_table_forgets_what_is_removed_and_nothing_else(adds: list[tuple[int, int, bool]], asked: int) -> None:
    index, known = PrefixIndex(1 << 10), set[tuple[int, int]]()
    for key, slot, is_added in adds:
        if is_added:
            index.add([key], slot)
            known = {one for one in known if one != (key, slot)} | {(key, slot)}
        else:
            index.remove(key, slot)
            known.discard((key, slot))
    found = set(index.depths([asked]))
    assert found <= {slot for key, slot in known if key == asked}
    if sum(key == asked for key, _ in known) <= 4 and sum(key == asked for key, _, is_added in adds if is_added) <= 4:
        assert found == {slot for key, slot in known if key == asked}


def test_an_engine_that_never_had_a_prompt_gets_it_when_the_store_is_faster_than_computing() -> None:
    policy, own = CacheAware(), chain(7, 40)
    work = Work(40 * PIECE_TOKENS, own)
    rates: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0, "gap_s": 0.01}
    a, b = (Engine(name, load=report(**rates, store=store())) for name in "ab")
    for one in (a, b):
        assert one.load is not None
        policy.reported(one, one.load)
    assert policy.name_of(work) == name_of(own)
    policy.note(work, Pair(a, None, work.tokens))
    a.pending = 80  # 0.8 s
    assert policy([a, b], 0, work) is a, "computing 40 pieces takes 1.02 s"
    policy = CacheAware()
    policy.reported(a, report(store=store()))
    policy.note(work, Pair(a, None, work.tokens))
    policy.reported(a, report(store=store({name_of(own): True})))
    assert policy.pair([a, b], (), 0, work) == Pair(b, None, 6400), "640 blocks in 0.64 s count as 6,400 tokens"
    policy.reported(a, report(store=store({name_of(own): False})))
    assert policy.pair([a, b], (), 0, work).answers is b, "39 of the pieces are left"
    b.load = report(**rates, store=store(readable=False))
    assert policy.pair([a, b], (), 0, work).answers is a


def test_names_that_were_not_sent_and_fleets_without_a_store_take_no_memory() -> None:
    known = StoredPrefixes(max_sent_pieces=100)
    known.sent(chain(1, 5))
    assert (known.index, known.num_sent_pieces, known.depths(chain(1, 5))) == (None, 0, {})
    known.reported(("a", "e"), store({name_of(chain(1, 5)): True}))
    assert known.depths(chain(1, 5)) == {}, "this router did not send it"
    for seed in range(200):
        known.sent(chain(seed, 1 + seed % 9))
        known.sent(chain(seed, 1 + seed % 9))
        assert known.num_sent_pieces <= 100
    assert known.num_sent_pieces == sum(map(len, known._sent.values()))
    assert known.index is not None
    size = known.index.num_bytes
    for number in range(MAX_ENGINES + 50):
        known.reported((str(number), "e"), store({f"{number:016x}": True}))
    assert len(known._seen) == MAX_ENGINES
    assert known.index.num_bytes == size


def test_a_name_that_an_engine_announces_anew_is_taken_again() -> None:
    known, own = StoredPrefixes(), chain(3, 4)
    known.reported(("a", "e"), store())
    known.sent(own)
    name = name_of(own)
    for is_there, depth in ((True, 4), (False, 3), (True, 4)):
        known.reported(("a", "e"), store({name: is_there}))
        assert list(known.depths(own).values()) == [depth]


def test_what_others_stored_is_known_once_this_router_sends_the_first_such_prompt() -> None:
    known, own = StoredPrefixes(), chain(3, 4)
    for _ in range(2):
        known.reported(("a", "e"), store({name_of(own): True}))
        assert known.depths(own) == {}
    known.sent(own)
    known.reported(("a", "e"), store({name_of(own): True}))
    assert list(known.depths(own).values()) == [4]


@pytest.mark.parametrize("value", [b"x", b"A", b"0" * 17, b"12 "])
def test_a_name_that_no_router_sends_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=f"header {HEADER}: 1 to 16 hexadecimal digits are allowed"):
        beginning_in(value)
    assert beginning_in(b"") == ""
    assert beginning_in(name_of((5,)).encode()) == "0000000000000005"


def test_engines_with_a_store_get_the_name_and_a_client_s_is_dropped() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        engine.load = Load(epoch="e", seq=0, requests=0, waiting=0, waiting_tokens=0).model_dump(exclude={"seq"})
        body = {"prompt": "p" * 3000}

        async def ask(client: httpx.AsyncClient) -> dict[str, str]:
            headers = (await client.post("/v1/completions", json=body, headers={HEADER: "77"})).json()["headers"]
            assert isinstance(headers, dict)
            return headers

        async with routed(engine, policy="cacheAware") as (router, client):
            await until(lambda: router.backends.all[0].load is not None)
            assert HEADER not in await ask(client), "no engine has a store"
            engine.load = {**engine.load, "store": store().model_dump()}
            await until(
                lambda: router.backends.all[0].load is not None and router.backends.all[0].load.store is not None
            )
            first = (await ask(client))[HEADER]
            assert len(first) == 16
            assert (await ask(client))[HEADER] == first
            policy: Any = router.backends.policy
            engine.load = {**engine.load, "store": store({first: True}).model_dump()}
            await until(lambda: bool(policy.stored.index.num_bytes and policy.stored._seen))
            (own,) = policy.stored._sent.values()
            await until(lambda: list(policy.stored.depths(own).values()) == [len(own)])

    run(scenario)
