"""The host tier changes no token: saved and loaded blocks, swapped sequences, late copies, damage, aborts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stoker.engine.core.blocks import BlockContent, BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.host_tier import HostTier
from stoker.engine.core.messages import Delta, pack, unpack
from stoker.engine.core.stats import HostTierStats, Stats
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.execution.host_link import HostMemoryLink, host_link
from stoker.engine.execution.runner import Runner
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.port import Move, ReadableLink
from testing.engine.audits import assert_sound
from testing.engine.late_link import LateLink
from testing.engine.stats import STATS
from tests.engine.conftest import MakeEngine
from tests.engine.test_engine import drive, random_prompts, tokens_of

PARAMS = SamplingParams(temperature=0.8, seed=11, max_tokens=16, ignore_eos=True)
SMALL = {"num_blocks": 45, "seats": 16, "budget": 64}


def tier_of(
    slots: int = 300, *, late: bool = False, costs: TierCosts | None = None
) -> Callable[[BlockManager, Runner], HostTier]:
    """Make a tier that always swaps and loads, over a thread's link or one that is late."""

    def make(blocks: BlockManager, runner: Runner) -> HostTier:
        data = runner.cache.data
        link: ReadableLink = host_link(runner.cache, slots, fused=False)
        if late:
            link.close()
            link = LateLink(data.view(data.shape[0], -1).view(torch.uint8).numpy(), slots)
        return HostTier(blocks, HostIndex(slots), link, costs or TierCosts("swap"), data[0].nbytes, lambda: 0.0)

    return make


def answers(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    tokens = tokens_of(drive(engine))
    return [tokens[str(index), 0] for index in range(len(prompts))]


def stats_of(engine: LLMEngine) -> HostTierStats:
    stats = engine.stats().host
    assert stats is not None
    return stats


PROMPTS = random_prompts(14, seed=3, shared=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {}


def undisturbed(make_engine: MakeEngine, known: dict[str, list[list[int]]]) -> list[list[int]]:
    """Answers without a tier and without preemption, computed once."""
    if "tokens" not in known:
        known["tokens"] = answers(make_engine(num_blocks=1200), PROMPTS)
    return known["tokens"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_swapped_sequences_come_back_with_the_same_tokens(
    overlap: bool, late: bool, make_engine: MakeEngine, expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(**SMALL, overlap=overlap, make_tier=tier_of(late=late))
    assert answers(engine, PROMPTS) == undisturbed(make_engine, expected)
    stats = stats_of(engine)
    assert stats.swapped > 0
    assert stats.loaded > 0
    assert (stats.damaged, stats.failed, stats.late) == (0, 0, 0)
    engine.close()


def test_cold_prefixes_come_back_from_the_tier(make_engine: MakeEngine, expected: dict[str, list[list[int]]]) -> None:
    """One request at a time, in a cache that holds two or three: the second round finds the first's prefixes."""
    plain, tiered = make_engine(**SMALL), make_engine(**SMALL, make_tier=tier_of(late=True))
    hits = []
    for engine in (plain, tiered):
        for _ in range(2):
            before = engine.stats().prefix_hits
            for index, prompt in enumerate(PROMPTS):
                (tokens,) = answers(engine, [prompt], replace(PARAMS, max_tokens=2))
                assert tokens == undisturbed(make_engine, expected)[index][:2]
        hits.append(engine.stats().prefix_hits - before)
    full = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert hits[0] < full / 2
    assert hits[1] > full * 0.9
    stats = stats_of(tiered)
    assert (stats.saved > 0, stats.loaded > 0, stats.swapped) == (True, True, 0)


def test_cold_prefixes_come_back_with_their_own_salt_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(**SMALL, make_tier=tier_of(1000, late=True))
    hits, tokens = [], []
    for salt in ("a", "b", "a", None):
        before = engine.stats().prefix_hits
        params = replace(PARAMS, max_tokens=2, cache_salt=salt)
        tokens.append([answers(engine, [prompt], params) for prompt in PROMPTS])
        hits.append(engine.stats().prefix_hits - before)
    full = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert max(hits[0], hits[1], hits[3]) < full / 2, "prompts of a round have beginnings in common"
    assert hits[2] > full * 0.9
    assert all(one == tokens[0] for one in tokens)
    engine.close()


def test_a_full_tier_gives_up_the_least_recently_used(
    make_engine: MakeEngine, expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(**SMALL, make_tier=tier_of(9))
    for _ in range(2):
        assert answers(engine, PROMPTS) == undisturbed(make_engine, expected)
    stats = stats_of(engine)
    assert stats.evicted > 0
    assert 0 < stats.used_blocks <= stats.total_blocks == 9
    engine.close()


def test_damaged_blocks_are_given_up_and_computed_again(
    make_engine: MakeEngine, expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(**SMALL, make_tier=tier_of(late=True))
    tier = engine.scheduler.tier
    assert tier is not None
    assert isinstance(tier.link, LateLink)
    rng = random.Random(5)
    for index, prompt in enumerate([*PROMPTS, *PROMPTS]):
        engine.add_request(str(index), prompt, PARAMS)
    deltas: list[Delta] = []
    while engine.has_unfinished:
        for _ in range(60):
            tier.link.damage(rng)
        deltas += [delta for _, delta in engine.step()]
        assert_sound(engine.audit())
    tokens = tokens_of(deltas)
    assert [tokens[str(index), 0] for index in range(2 * len(PROMPTS))] == undisturbed(make_engine, expected) * 2
    assert stats_of(engine).damaged > 0


def test_failed_copies_cost_nothing_but_time(make_engine: MakeEngine, expected: dict[str, list[list[int]]]) -> None:
    engine = make_engine(**SMALL, make_tier=tier_of(late=True))
    tier = engine.scheduler.tier
    assert tier is not None
    assert isinstance(tier.link, LateLink)
    rng = random.Random(6)
    tier.link.fails = lambda: rng.random() < 0.5
    assert answers(engine, PROMPTS) == undisturbed(make_engine, expected)
    assert stats_of(engine).failed > 0


@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_copies_aborts_and_priorities_keeps_tokens_and_blocks(
    seed: int, make_engine: MakeEngine, expected: dict[str, list[list[int]]]
) -> None:
    """Copies end at random moments, or not before they are fenced; requests come, go and overtake at any time."""
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.choice([40, 45, 60]), seats=16, budget=rng.choice([32, 64]), overlap=bool(seed % 2),
        make_tier=tier_of(rng.choice([8, 30, 300]), late=True),
    )  # fmt: skip
    tier = engine.scheduler.tier
    assert tier is not None
    assert isinstance(tier.link, LateLink)
    todo = [(f"{index}-{turn}", index) for turn in range(2) for index in range(len(PROMPTS))]
    rng.shuffle(todo)
    aborted: set[str] = set()
    deltas: list[Delta] = []
    while todo or engine.has_unfinished:
        while todo and rng.random() < 0.4:
            name, index = todo.pop()
            engine.add_request(name, PROMPTS[index], PARAMS, priority=rng.choice([0, 0, 1, -1]))
        if engine.requests and rng.random() < 0.05:
            _, name = rng.choice(list(engine.requests))
            aborted.add(name)
            engine.abort_request(name)
        if rng.random() < 0.5:
            tier.link.advance()
        if rng.random() < 0.2:
            tier.link.damage(rng)
        if rng.random() < 0.1:
            tier.link.fails = lambda: rng.random() < 0.2
        deltas += [delta for _, delta in engine.step()]
        assert_sound(engine.audit())
    right = undisturbed(make_engine, expected)
    tokens = tokens_of(deltas)
    for index in range(len(PROMPTS)):
        for name in (f"{index}-0", f"{index}-1"):
            length = len(tokens.get((name, 0), [])) if name in aborted else PARAMS.max_tokens
            assert tokens.get((name, 0), []) == right[index][:length]
    while tier.link.posted:
        tier.link.advance()
    engine.scheduler.take_up_transfers()
    assert_sound(engine.audit())
    assert engine.stats().owned_blocks == 0
    assert engine.stats().running + engine.stats().waiting == 0


def test_several_choices_and_prompt_scores_are_the_same(make_engine: MakeEngine) -> None:
    params = replace(PARAMS, n=3, logprobs=2)
    scored = replace(PARAMS, prompt_logprobs=1)
    results = []
    for make_tier in (None, tier_of(late=True)):
        engine = make_engine(num_blocks=60 if make_tier else 1200, seats=16, budget=64, make_tier=make_tier)
        for index, prompt in enumerate(PROMPTS[:10]):
            engine.add_request(str(index), prompt, scored if index % 3 == 0 else params)
        deltas = drive(engine)
        given = {delta.request_id: delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None}
        scores = {name: [one.logprob for one in ones if one is not None] for name, ones in given.items()}
        results.append((tokens_of(deltas), scores))
    (tokens, scores), (tiered_tokens, tiered_scores) = results
    assert tokens == tiered_tokens
    assert scores.keys() == tiered_scores.keys()
    for name, ones in scores.items():
        assert ones == pytest.approx(tiered_scores[name], abs=1e-4)


def content(number: int, parent: bytes = b"") -> BlockContent:
    return BlockContent(bytes([number]), parent, (number,))


def test_an_entry_is_found_when_it_is_published_and_kept_while_it_is_loaded() -> None:
    index = HostIndex(2)
    first = index.begin_save(content(1))
    assert first is not None
    assert index.begin_save(content(1)) is None
    found = index.find(content(1))
    assert found is first
    assert found.sum is None
    assert index.find(content(1, b"other")) is None
    index.publish(first, 7)
    index.pin(first)
    second = index.begin_save(content(2))
    assert second is not None
    assert index.begin_save(content(3)) is None  # one is loaded, the other is being saved
    index.drop(first)
    assert index.find(content(1)) is None
    assert index.begin_save(content(3)) is None
    assert not list(index.faults())
    index.unpin(first)
    third = index.begin_save(content(3))
    assert third is not None
    assert third.slot == first.slot
    index.drop(second)
    index.publish(second, 9)
    assert index.find(content(2)) is None
    assert (index.num_used, list(index.faults())) == (1, [])


@pytest.mark.parametrize(
    ("preemption", "prefill", "copy", "swaps", "loads"),
    [
        ("auto", None, None, True, True),
        ("auto", 100.0, None, True, True),
        ("auto", 100.0, 3000.0, True, True),  # 1 s to compute; 1000 bytes take 0.33 s each way
        ("auto", 100.0, 1500.0, False, True),
        ("auto", 100.0, 900.0, False, False),
        ("swap", 100.0, 900.0, True, True),
        ("recompute", None, None, False, True),
        ("recompute", 100.0, 900.0, False, False),
    ],
)
def test_blocks_are_moved_where_that_is_measured_to_be_faster(
    preemption: str, prefill: float | None, copy: float | None, swaps: bool, loads: bool
) -> None:
    costs = TierCosts(preemption)  # type: ignore[arg-type]
    costs.prefill.value, costs.reads.value, costs.writes.value = prefill, copy, copy
    assert (costs.swaps(100, 1000), costs.loads(100, 1000)) == (swaps, loads)


def test_a_late_load_is_not_waited_for(make_engine: MakeEngine, expected: dict[str, list[list[int]]]) -> None:
    """Once reads are measured to be slow, sequences compute; a load that was begun before ends beside them."""
    costs = TierCosts("auto")
    engine = make_engine(**SMALL, make_tier=tier_of(late=True, costs=costs))
    right = undisturbed(make_engine, expected)
    for index, prompt in enumerate(PROMPTS):
        assert answers(engine, [prompt], replace(PARAMS, max_tokens=1)) == [right[index][:1]]
    engine.step()
    costs.reads.value = None
    engine.add_request("late", PROMPTS[0], PARAMS)
    engine.scheduler.take_up_transfers()
    assert engine.scheduler.schedule(0.0).chunks == []  # its blocks are on their way
    costs.reads.value, costs.prefill.value = 1.0, 1e9
    assert tokens_of(drive(engine)) == {("late", 0): right[0]}
    assert stats_of(engine).late == 1
    assert_sound(engine.audit())


def test_the_links_copy_and_sum_and_refuse_after_their_end(make_engine: MakeEngine) -> None:
    cache = torch.arange(4 * 64, dtype=torch.uint8).view(4, 64).numpy().copy()
    thread, late = HostMemoryLink(cache.copy(), 3), LateLink(cache.copy(), 3)
    sums = []
    for link in (thread, late):
        write = link.write([Move(1, 2), Move(3, 0)], b"")
        read = link.read([Move(0, 2), Move(2, 0)], b"")
        assert read.wait(60)
        assert (write.error(), read.error()) == (None, None)
        assert write.sums == read.sums
        sums.append(write.sums)
        assert (link.blocks[[0, 2]] == cache[[1, 3]]).all()
    assert sums[0] == sums[1]
    assert thread.write([Move(9, 0)], b"").wait(60)
    thread.close()
    assert thread.lost is not None
    refused = thread.write([Move(0, 0)], b"")
    assert refused.wait(60)
    assert refused.error() is not None


def test_stats_of_the_tier_travel() -> None:
    host = HostTierStats(9, 1, 2, 3, 4, 5, 6, 7, 8, 64, 1.5, 2.5, "host-memory")
    stats = replace(STATS, host=host)
    assert unpack(pack(stats)) == stats
    assert isinstance(unpack(pack(STATS)), Stats)
