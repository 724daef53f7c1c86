"""The policy cacheAware: predicted seconds decide, and a router's memory of beginnings has a fixed size."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.engine.core.blocks import BlockManager
from stoker.engine.transfer.fingerprint import salt_digest
from stoker.router.backend import Backend, Timeouts
from stoker.router.cache_aware import ALIKE, MAX_SESSIONS, PIECE_TOKENS, CacheAware
from stoker.router.connection import Broken
from stoker.router.load import MOST_WAITING, SILENT_S, YOUNG_S, Load, SharedStore, parse_report
from stoker.router.pairs import Pair
from stoker.router.prefix_index import MAX_PIECES, PIECE_BYTES, WAYS, PrefixIndex, Slots, chain_of
from stoker.router.snapshot import BackendEntry, Role
from stoker.router.standing import GAP_S, Standing, measured, standing_of
from stoker.router.stored_prefixes import StoredPrefixes
from stoker.router.work import NO_WORK, Work, session_of, work_of
from testing.router.fake_engine import Exchange, FakeEngine, say_hello
from testing.router.harness import routed, run, until
from testing.router.pair_costs import whole_s
from testing.router.places import PROMPTS


def report(**fields: Any) -> Load:
    return Load(**{"epoch": "e", "seq": 0, "requests": 0, "waiting": 0, "waiting_tokens": 0, **fields})


@dataclass
class Place:
    name: str
    pending: int = 0
    unstarted: tuple[int, ...] = ()
    load: Load | None = None
    silent: bool = False
    epoch: str = "e"
    role: Role = "colocated"
    revision: str = ""
    identity: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.identity = self.name, self.epoch

    @property
    def standing(self) -> Standing:
        return standing_of(self)


PLACES = st.lists(
    st.builds(
        lambda pending, unstarted, load, silent: (pending, unstarted, load, silent and load is None),
        st.integers(0, 40),
        PROMPTS,
        st.none()
        | st.builds(
            lambda requests, prompts, rate, gap: report(
                requests=requests,
                waiting=len(prompts),
                waiting_tokens=sum(prompts),
                prompts=prompts,
                prefill_tokens_per_s=rate,
                gap_s=gap,
            ),
            st.integers(0, 40),
            PROMPTS,
            st.none() | st.floats(100, 50_000),
            st.none() | st.floats(0.001, 0.2),
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def places(drawn: list[Any]) -> list[Place]:
    return [Place(str(number), *values) for number, values in enumerate(drawn)]


def cost_s(one: Place, tokens: int, rate: float = 5000.0) -> float:
    """By the slow twin of what the policy computes."""
    return whole_s(one, measured(one, one.load, rate), tokens)


@given(PLACES, st.integers(0, 20_000), st.integers(0, 10**6))
def test_the_chosen_backend_costs_no_more_than_any_that_reports(drawn: list[Any], tokens: int, turn: int) -> None:
    ready = places(drawn)
    chosen = CacheAware()(ready, turn, Work(tokens))
    able = [one for one in ready if not one.silent] or ready
    assert chosen in able
    rates = [one.load.prefill_tokens_per_s for one in able if one.load is not None and one.load.prefill_tokens_per_s]
    mean = sum(rates) / len(rates) if rates else 5000.0
    costs = {one.name: cost_s(one, tokens, mean) for one in able}
    assert costs[chosen.name] <= min(costs.values()) * ALIKE + 1e-12


@given(PLACES, st.integers(0, 20_000), st.integers(1, 20_000))
@example([(0, (0,), report(waiting=1, waiting_tokens=3, prompts=(3,)), False)], 2, 2)
def test_more_work_never_costs_less(drawn: list[Any], tokens: int, more: int) -> None:
    for place in places(drawn):
        # Where the engine's list counts, a longer one of this router would take its place.
        place.unstarted = tuple(measured(place, place.load).prompts)
        before = cost_s(place, tokens)
        assert cost_s(place, tokens + more) > before
        place.unstarted += (more,)
        assert cost_s(place, tokens) >= before
        place.pending += 100
        assert cost_s(place, tokens) > before


def test_a_short_prompt_goes_where_it_may_pass_and_a_long_one_where_less_waits() -> None:
    """One engine computes a long prompt, the other one more prompts like the short one, which it may not pass."""
    known: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0, "gap_s": 0.01, "step_tokens": 512}
    long = Place("long", unstarted=(50_000,), load=report(**known))
    alike = Place("alike", unstarted=(2000,) * 10, load=report(**known))
    policy = CacheAware()
    assert policy([alike, long], 0, Work(1500)) is long
    assert policy([alike, long], 0, Work(40_000)) is alike


def test_what_other_routers_sent_is_known_by_the_engines_list() -> None:
    known: dict[str, Any] = {"prefill_tokens_per_s": 10_000.0, "gap_s": 0.01, "step_tokens": 512, "requests": 11}
    many = Place("many", unstarted=(1500,), load=report(**known, waiting=11, waiting_tokens=16_500))
    listed = report(**known, waiting=11, waiting_tokens=70_000, prompts=(50_000, *(2000,) * 10))
    short, work = Place("short", unstarted=(50_000,), load=listed), Work(900)
    assert [measured(one, one.load).queue(900) for one in (many, short)] == [16_500, 900]
    assert CacheAware()([many, short], 0, work) is short
    assert list(report(waiting=5, waiting_tokens=100, prompts=(40, 30)).waiting_prompts) == [40, 30, 10, 10, 10]
    assert len(report(waiting=10**9, waiting_tokens=100).waiting_prompts) == MOST_WAITING


def test_a_cached_beginning_draws_as_far_as_the_time_that_it_saves() -> None:
    policy, text = CacheAware(), random.Random(1).randbytes(40 * PIECE_BYTES)
    a, b = (Place(name, load=report(prefill_tokens_per_s=10_000.0, gap_s=0.01)) for name in "ab")
    work = Work(40 * PIECE_TOKENS, chain_of(text))
    first = policy([a, b], 0, work)
    assert first is a
    assert policy([a, b], 1, work) is a
    worth = 40 * PIECE_TOKENS / 10_000 / 0.01  # pending requests that cost as much as the beginning saves
    a.pending = int(0.9 * worth)
    assert policy([a, b], 2, work) is a
    a.pending = int(1.1 * worth)
    assert policy([a, b], 3, work) is b
    a.pending = 0
    assert {policy([a, b], turn, work).name for turn in range(4)} == {"a", "b"}  # now both have it


def test_a_backend_that_restarted_has_no_beginnings() -> None:
    policy = CacheAware()
    work = Work(40 * PIECE_TOKENS, chain_of(bytes(40 * PIECE_BYTES)))
    a, b = Place("a"), Place("b")
    assert policy([a, b], 0, work) is a
    a = Place("a", epoch="later")
    assert {policy([a, Place("c")], turn, work).name for turn in range(1)} == {"a"}
    assert policy.cached_tokens(work)[policy.slots.number(("a", "later"))] == work.tokens
    assert policy.slots.number(("a", "e")) != policy.slots.number(("a", "later"))


def test_a_session_returns_to_its_backend_while_that_saves_time() -> None:
    policy, a, b = CacheAware(), Place("a"), Place("b")
    first = policy([a, b], 1, Work(4000, session=b"s"))
    assert {policy([a, b], turn, Work(4400, session=b"s")).name for turn in range(6)} == {first.name}
    assert {policy([a, b], turn, Work(4400, session=bytes([turn]))).name for turn in range(6)} == {"a", "b"}
    first.pending = round(4000 / 5000 / GAP_S) + 10
    assert policy([a, b], 9, Work(4400, session=b"s")) is not first
    for number in range(MAX_SESSIONS + 10):
        policy.note(Work(1, session=b"%d" % number), Pair(b))
    assert len(policy._sessions) == MAX_SESSIONS


def test_equal_backends_are_used_evenly() -> None:
    policy, ready = CacheAware(), [Place(name) for name in "abc"]
    assert Counter(policy(ready, turn, Work(100)).name for turn in range(30)) == {"a": 10, "b": 10, "c": 10}
    assert policy([ready[0]], 5, NO_WORK) is ready[0]


@given(st.binary(max_size=6000), st.integers(0, 6000), st.binary(max_size=3000))
def test_equal_beginnings_have_equal_keys(text: bytes, cut: int, other: bytes) -> None:
    common = text[:cut]
    one, two = chain_of(text), chain_of(common + other)
    shared = min(len(common), len(text)) // PIECE_BYTES
    assert one[:shared] == two[:shared]
    assert len(one) == len(text) // PIECE_BYTES
    assert len(set(one)) == len(one)  # even of equal pieces
    assert all(0 < key < 2**64 for key in one)


def test_a_long_prompt_has_a_bounded_number_of_keys() -> None:
    assert len(chain_of(bytes((MAX_PIECES + 9) * PIECE_BYTES))) == MAX_PIECES


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5)), max_size=40))
def test_the_index_agrees_with_sets_while_it_has_room(added: list[tuple[int, int, int]]) -> None:
    """Chains of several families; the twin keeps the last backends of each key in a list."""
    index, twin = PrefixIndex(1 << 12), dict[int, list[int]]()
    for family, depth, slot in added:
        chain = chain_of(bytes([family]) * depth * PIECE_BYTES)
        index.add(chain, slot)
        for key in chain:
            twin[key] = [slot, *(one for one in twin.get(key, []) if one != slot)][:4]
    for family in range(1, 7):
        chain = chain_of(bytes([family]) * 9 * PIECE_BYTES)
        expected: dict[int, int] = {}
        for depth, key in enumerate(chain, 1):
            for slot in twin.get(key, []):
                if expected.get(slot, 0) == depth - 1:
                    expected[slot] = depth
        assert index.depths(chain) == expected


def test_the_index_keeps_its_size_and_the_newest_beginnings() -> None:
    index, draw = PrefixIndex(1 << 10), random.Random(3)
    before = index.num_bytes
    for number in range(20_000):
        index.add((draw.getrandbits(64) or 1,), number % 9 + 1)
    newest = draw.getrandbits(64) or 1
    index.add((newest,), 7)
    assert index.depths((newest,)) == {7: 1}
    assert (index.num_bytes, len(index._keys)) == (before, 1 << 10)
    assert WAYS == 4


def test_requests_beyond_what_is_remembered_take_no_more_memory() -> None:
    """Beginnings, sessions, names of a store and engines that come and go, in all that the policy holds."""
    most = 1 << 10
    policy, draw = CacheAware(PrefixIndex(most), max_sessions=most), random.Random(4)
    policy.stored = StoredPrefixes(max_sent_pieces=most)
    policy.stored.reported(("a", "e"), SharedStore(name="s", block_size=16, block_bytes=4096, readable=True))
    policy.slots = Slots(limit=most // 8)

    def traced_after(first: int, end: int) -> int:
        for number in range(first, end):
            work = Work(256, (draw.getrandbits(64) or 1,), b"session %012d" % number)
            policy.note(work, Pair(Place(f"engine-{number // 8:012d}"), None, 256))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full = traced_after(0, 4 * most)
        assert traced_after(4 * most, 20 * most) < 1.02 * full
    finally:
        tracemalloc.stop()


def test_numbers_of_backends_are_given_again_when_they_run_out() -> None:
    slots = Slots(3)
    assert [slots.number(name) for name in "abca"] == [1, 2, 3, 1]
    slots.used("a")
    assert slots.number("d") == 2  # b was not used for longest
    assert slots.number("a") == 1


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        (b'{"messages": [{"role": "user", "content": "\\"user\\": \\"x\\""}]}', [], b""),
        (b'{"model": "m", "user": "ann", "messages": []}', [], b"ann"),
        (b'{"messages": [], "user" : "b\\"c"}', [], b'b\\"c'),
        (b'{"user": "ann"}', [(b"x-session-id", b"mine")], b"mine"),
        (b"", [], b""),
    ],
)
def test_a_session_is_named_by_a_header_or_by_the_user(body: bytes, headers: Any, session: bytes) -> None:
    assert session_of(body, headers) == session


def test_fields_before_the_prompt_do_not_change_its_keys() -> None:
    rest = b'"messages":[{"role":"user","content":"' + b"long " * 1000
    one, two = (work_of(b'{"seed":%d,' % seed + rest + b"x" * seed, []) for seed in (1, 22))
    assert one.chain == two.chain[: len(one.chain)]
    assert len(one.chain) == len(rest) // PIECE_BYTES
    assert one.tokens == pytest.approx(len(rest) / 4, abs=30)


SALTED = [b"", b', "cache_salt": "a"', b', "cache_salt" :"b\\"c"', b', "seed": 1, "cache_salt": null']


def test_a_session_with_a_salt_is_another_one_of_a_bounded_length() -> None:
    bodies = [b'{"user": "ann", "cache_salt": "%s", "prompt": "x"}' % salt for salt in (b"a", b"b", b"c" * 10_000)]
    sessions = {work_of(body, []).session for body in bodies}
    assert len(sessions) == 3
    assert max(map(len, sessions)) < 40


@pytest.mark.parametrize("place", ["before", "after"])
def test_beginnings_have_keys_in_common_where_engines_have_blocks_in_common(place: str) -> None:
    """Two requests with each pair of salts: the index finds the first one's beginning where an engine does."""
    text = b'"prompt": "' + b'long \\"cache_salt\\": \\"x\\" ' * 200 + b'"'
    salts = [None, "a", 'b"c', None]
    bodies = [b'{"user": "ann"' + (salt + b", " + text if place == "before" else b", " + text + salt) + b"}"
              for salt in SALTED]  # fmt: skip
    for first, second in itertools.product(range(len(SALTED)), repeat=2):
        blocks, policy, engine = BlockManager(8, 4), CacheAware(), Place("a")
        blocks.admit("first", range(9), salt=salt_digest(salts[first]))
        blocks.commit("first", range(9), 9)
        policy.note(work_of(bodies[first], []), Pair(engine))
        found = policy.cached_tokens(work_of(bodies[second], []))
        assert bool(found) == bool(blocks.num_findable(range(9), salt_digest(salts[second])))


@pytest.mark.parametrize(
    "event",
    [b"", b"data: {", b"data: []", b'data: {"seq": 1}',
     b'data: {"epoch": "e", "seq": -1, "requests": 0, "waiting": 0, "waiting_tokens": 0}'],
)  # fmt: skip
def test_what_is_no_report_is_refused(event: bytes) -> None:
    with pytest.raises(Broken, match="not a report of load"):
        parse_report(event)


@pytest.mark.parametrize(
    "lie",
    [{"requests": 10**400}, {"waiting_tokens": 10**400}, {"prompts": [10**400]}, {"queue_s": {"1000000": 5}},
     {"queue_s": {"5": -5}}, {"gap_s": float("inf")}, {"prefill_tokens_per_s": float("inf")},
     {"prefill_tokens_per_s": 1e-320}, {"store": {"name": "s", "block_size": 1, "block_bytes": 1, "block_s": 1e300,
     "readable": True}}],
)  # fmt: skip
def test_a_report_with_numbers_that_cannot_be_is_refused(lie: dict[str, Any]) -> None:
    """Taken, the first of these failed every request of the router, and the fourth its metrics."""
    report = {"epoch": "e", "seq": 1, "requests": 0, "waiting": 0, "waiting_tokens": 0}
    parse_report(b"data: " + json.dumps(report).encode())
    with pytest.raises(Broken, match=f"not a report of load.*{next(iter(lie))}"):
        parse_report(b"data: " + json.dumps({**report, **lie}).encode())


def test_reports_age_and_old_ones_have_no_effect() -> None:
    now = [0.0]
    entry = BackendEntry(url="http://127.0.0.1:1", pod_uid="a")
    backend = Backend(entry, Timeouts(connect_s=1, silence_s=1, probe_s=1), lambda: now[0])
    assert (backend.load, backend.silent, backend.identity) == (None, False, ("a", ""))
    backend.reported(report(seq=5, requests=3))
    backend.reported(report(seq=4, requests=9))
    assert backend.load is not None
    assert backend.load.requests == 3
    now[0] = YOUNG_S + 0.1
    assert not backend.silent
    assert backend.load is None  # own requests alone
    now[0] = SILENT_S + 0.1
    assert backend.silent  # last in order, never idle
    backend.reported(report(epoch="later", seq=0))
    assert (backend.silent, backend.identity) == (False, ("a", "later"))


LOADED = {"epoch": "e", "requests": 30, "waiting": 20, "waiting_tokens": 90_000, "prefill_tokens_per_s": 1000.0,
          "gap_s": 0.05}  # fmt: skip
FREE = {**LOADED, "requests": 0, "waiting": 0, "waiting_tokens": 0}
CHAT = {"messages": [{"role": "user", "content": "tell " * 2000}]}


def test_the_router_follows_reports_and_sends_requests_where_they_cost_least() -> None:
    now = [0.0]

    async def scenario() -> None:
        a, b = await FakeEngine("a").start(), await FakeEngine("b").start()
        a.load, b.load = dict(LOADED), dict(FREE)
        async with routed(a, b, policy="cacheAware", connect_timeout_s=20, clock=lambda: now[0]) as (router, client):
            await until(lambda: all(one.load is not None for one in router.backends.all))
            for number in range(4):
                answer = await client.post("/v1/chat/completions", json={**CHAT, "seed": number})
                assert answer.json()["pod"] == "b"
            a.load, b.load = {**LOADED, "epoch": "2"}, {}  # b reports no more: what it said last counts no longer
            await until(lambda: any(one.identity == ("a", "2") for one in router.backends.all))
            now[0] += SILENT_S + 1
            await until(lambda: any(one.load is not None for one in router.backends.all))
            assert [one.silent for one in router.backends.all] == [False, True]
            assert (await client.post("/v1/chat/completions", json=CHAT)).json()["pod"] == "a"
            assert all(one.unstarted == () for one in router.backends.all)

    run(scenario)


def test_engines_without_reports_are_loaded_by_own_counts() -> None:
    """Requests count as soon as they are sent: a burst is spread before any engine has answered."""

    async def scenario() -> None:
        engines: list[FakeEngine] = []

        async def together(exchange: Exchange) -> None:
            await until(lambda: sum(engine.running for engine in engines) == 8)
            await say_hello(exchange)

        engines += [await FakeEngine(name, together).start() for name in "ab"]
        async with routed(*engines, policy="cacheAware", connect_timeout_s=20) as (_, client):
            bodies = [{"messages": [{"role": "user", "content": f"{number} " * 2000}]} for number in range(8)]
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=one) for one in bodies))
            assert Counter(answer.json()["pod"] for answer in answers) == {"a": 4, "b": 4}

    run(scenario)
