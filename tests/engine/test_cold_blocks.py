"""Tiers below the host tier change no token: restarts, damage, failing and hanging disks."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.engine.config import StoreConfig
from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.disk.block_folder import SUFFIX, Files
from stoker.engine.core.disk.cold_traffic import LEAST_WAIT_S, PROBE_S, ColdTraffic
from stoker.engine.core.disk.lane_home import disk_tier
from stoker.engine.core.disk.open_tiers import store_tier
from stoker.engine.core.disk.slot_files import SlotFiles
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.host_index import HostIndex
from stoker.engine.core.host_tier import HostTier
from stoker.engine.core.messages import pack, unpack
from stoker.engine.core.stats import ColdTierStats
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.execution.host_link import host_link
from stoker.engine.execution.runner import Runner
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.layout import BlockLayout
from testing.engine.audits import assert_sound
from testing.engine.faulty_files import FaultyFiles, failing, full
from testing.engine.late_link import LateLink
from testing.engine.stats import STATS
from tests.engine.conftest import MakeEngine
from tests.engine.test_engine import drive, random_prompts, tokens_of

PARAMS = SamplingParams(temperature=0.8, seed=11, max_tokens=6, ignore_eos=True)
SMALL = {"num_blocks": 45, "seats": 16, "budget": 64}
PROMPTS = random_prompts(10, seed=3, shared=True)
WAIT_S = 120.0


def disk_below(
    path: Path, *, slots: int = 60, blocks: int = 500, salt: str = "", files: Files | None = None,
    clock: Callable[[], float] = lambda: 0.0, costs: TierCosts | None = None, late: bool = False,
) -> Callable[[BlockManager, Runner], HostTier]:  # fmt: skip
    """Make a host tier of few slots over a disk tier."""

    def make(manager: BlockManager, runner: Runner) -> HostTier:
        data = runner.cache.data
        _, layers, _, size, heads, dim = data.shape
        identity = BlockIdentity(b"f" * 32, salt, BlockLayout(0, layers, size, 0, heads, dim, "float32"))
        manager.root = identity.root
        link = host_link(runner.cache, slots, fused=False)
        if late:
            link.close()
            link = LateLink(data.view(data.shape[0], -1).view(torch.uint8).numpy(), slots)  # type: ignore[assignment]
        index, prices = HostIndex(slots), costs or TierCosts("swap")
        memory = link.slots if isinstance(link, LateLink) else link.memory
        disk = disk_tier(path, identity, blocks, SlotFiles(identity, memory), clock, files)
        cold = ColdTraffic(index, [disk], prices, size, data[0].nbytes, clock)
        return HostTier(manager, index, link, prices, data[0].nbytes, clock, cold)

    return make


def store_below(paths: list[Path]) -> Callable[[BlockManager, Runner], HostTier]:
    """Make a host tier of few slots over a store with a replica on each path."""

    def make(manager: BlockManager, runner: Runner) -> HostTier:
        data = runner.cache.data
        _, layers, _, size, heads, dim = data.shape
        identity = BlockIdentity(b"f" * 32, "", BlockLayout(0, layers, size, 0, heads, dim, "float32"))
        manager.root = identity.root
        link, index, prices = host_link(runner.cache, 60, fused=False), HostIndex(60), TierCosts("swap")
        config = StoreConfig(paths=tuple(map(str, paths)), replicas=len(paths), bytes=10**9)
        store = store_tier(config, identity, lambda: SlotFiles(identity, link.memory), lambda: 0.0)
        cold = ColdTraffic(index, [store], prices, size, data[0].nbytes, lambda: 0.0)
        return HostTier(manager, index, link, prices, data[0].nbytes, lambda: 0.0, cold)

    return make


def store_of(engine: LLMEngine) -> ColdTierStats:
    store = engine.stats().store
    assert store is not None
    return store


def answers(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    tokens = tokens_of(drive(engine))
    return [tokens[str(index), 0] for index in range(len(prompts))]


def one_by_one(engine: LLMEngine) -> list[list[int]]:
    """Answers to requests that never run beside each other."""
    return [answers(engine, [prompt])[0] for prompt in PROMPTS]


def cold_of(engine: LLMEngine) -> ColdTraffic:
    assert engine.tier is not None
    assert engine.tier.cold is not None
    return engine.tier.cold


def disk_of(engine: LLMEngine) -> ColdTierStats:
    disk = engine.stats().disk
    assert disk is not None
    return disk


def settle(engine: LLMEngine) -> None:
    """Let the idle engine write all that it can."""
    until_s = time.monotonic() + WAIT_S
    blocks = engine.scheduler.blocks
    while True:
        engine.rest()
        assert engine.tier is not None
        engine.tier.wait(0.01)
        if cold_of(engine).settled and blocks.num_clean == blocks.num_available and not engine.tier.busy:
            return
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {}


@pytest.fixture
def right(make_engine: MakeEngine, expected: dict[str, list[list[int]]]) -> list[list[int]]:
    """Answers without tiers, computed once."""
    if "tokens" not in expected:
        expected["tokens"] = answers(make_engine(), PROMPTS)
    return expected["tokens"]


def opened(engine: LLMEngine) -> LLMEngine:
    """The engine once its disk is open, so that what a test expects does not depend on a thread."""
    until_s = time.monotonic() + WAIT_S
    while any(tier.stats().state != "ok" for tier in cold_of(engine).tiers):
        engine.rest()
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
def test_prefixes_come_back_from_the_disk_also_after_a_restart(
    overlap: bool, make_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    """The host tier is too small for all prompts, so the second round needs the disk; a new engine needs it for all."""
    first = opened(make_engine(**SMALL, overlap=overlap, make_tier=disk_below(tmp_path)))
    for _ in range(2):
        assert one_by_one(first) == right
        settle(first)
    stats = disk_of(first)
    assert (stats.loaded > 0, stats.damaged, stats.foreign, stats.failed, stats.late) == (True, 0, 0, 0, 0)
    first.close()
    again = opened(make_engine(**SMALL, overlap=overlap, make_tier=disk_below(tmp_path)))
    assert disk_of(again).found == stats.blocks > 0
    assert one_by_one(again) == right
    full_blocks = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert again.stats().prefix_hits > 0.9 * full_blocks
    assert_sound(again.audit())
    again.close()
    other = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path, salt="another tenant")))
    assert disk_of(other).found == 0 or one_by_one(other) == right
    assert disk_of(other).loaded == 0, "blocks of another tenant have other names"
    other.close()


def test_engines_share_prefixes_through_a_store_that_may_be_killed(
    make_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    """The second engine finds what the first computed; then the store goes away in the middle, and comes back."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = opened(make_engine(**SMALL, make_tier=store_below(paths)))
    assert one_by_one(first) == right
    settle(first)
    second = opened(make_engine(**SMALL, make_tier=store_below(paths)))
    assert store_of(second).found > 0
    assert one_by_one(second) == right
    full_blocks = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert second.stats().prefix_hits > 0.9 * full_blocks
    assert (store_of(second).loaded > 0, store_of(second).damaged, store_of(second).foreign) == (True, 0, 0)
    third = opened(make_engine(**SMALL, make_tier=store_below(paths)))
    half = len(PROMPTS) // 2
    assert answers(third, PROMPTS[:half]) == right[:half]
    for path in paths:
        shutil.rmtree(path)
    assert answers(third, PROMPTS[half:]) == right[half:]
    assert answers(first, PROMPTS) == right
    for engine in (first, second, third):
        assert_sound(engine.audit())
        engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_history_over_a_failing_disk_keeps_tokens_and_blocks(
    seed: int, make_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    """Requests come and go at any time, copies end at any time, files are cut, changed, missing or cannot be had."""
    rng = random.Random(seed)
    now = [0.0]
    lock = threading.Lock()

    def fault(kind: str) -> None:
        with lock:
            lot = rng.random()
        if lot < 0.03 and kind != "list":
            (full if lot < 0.01 else failing(kind))("write" if lot < 0.01 else kind)

    def change(data: bytes) -> bytes:
        with lock:
            lot = rng.random()
        return data if lot > 0.05 else data[:-9] if lot > 0.03 else bytes([data[0] ^ 1]) + data[1:]

    files = FaultyFiles(fault)
    files.change = change
    tier = disk_below(tmp_path, slots=rng.choice([9, 60]), blocks=rng.choice([12, 300]), files=files, late=True,
                      clock=lambda: now[0])  # fmt: skip
    engine = make_engine(**SMALL, overlap=bool(seed % 2), make_tier=tier)
    todo = [(f"{index}-{turn}", index) for turn in range(3) for index in range(len(PROMPTS))]
    rng.shuffle(todo)
    tokens: dict[tuple[str, int], list[int]] = {}
    aborted: set[str] = set()
    while todo or engine.has_unfinished:
        while todo and rng.random() < 0.3:
            name, index = todo.pop()
            engine.add_request(name, PROMPTS[index], PARAMS, priority=rng.choice([0, 0, 1]))
        if engine.requests and rng.random() < 0.03:
            _, name = rng.choice(list(engine.requests))
            aborted.add(name)
            engine.abort_request(name)
        for key, more in tokens_of([delta for _, delta in engine.step()]).items():
            tokens.setdefault(key, []).extend(more)
        now[0] += rng.choice([0.0, 0.0, 0.1])
        assert engine.tier is not None
        if isinstance(engine.tier.link, LateLink) and rng.random() < 0.5:
            engine.tier.link.advance()
        assert_sound(engine.audit())
    for index in range(len(PROMPTS)):
        for name in (f"{index}-{turn}" for turn in range(3)):
            got = tokens.get((name, 0), [])
            assert got == (right[index][: len(got)] if name in aborted else right[index])
    assert engine.stats().owned_blocks == 0
    engine.close()


def test_changed_files_are_computed_again_and_removed(
    make_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    first = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path)))
    one_by_one(first)
    settle(first)
    first.close()
    rng = random.Random(1)
    for file in tmp_path.rglob(f"*{SUFFIX}"):
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 + rng.randrange(255)
        file.write_bytes(data)
    again = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path)))
    assert one_by_one(again) == right
    stats = disk_of(again)
    assert stats.found > 0
    assert stats.damaged + stats.foreign > 0
    again.close()


def test_a_disk_that_hangs_delays_a_request_only_as_long_as_it_may(
    make_engine: MakeEngine, right: list[list[int]], tmp_path: Path
) -> None:
    first = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path)))
    one_by_one(first)
    settle(first)
    first.close()
    now, answers_now, files = [0.0], threading.Event(), FaultyFiles()
    engine = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path, files=files, clock=lambda: now[0])))
    files.before = lambda _: (answers_now.wait(WAIT_S), None)[1]
    engine.add_request("0", PROMPTS[0], PARAMS)
    for _ in range(3):
        assert engine.step() == [], "its blocks are on their way"
    now[0] += LEAST_WAIT_S + 0.05 * len(PROMPTS[0])
    assert tokens_of(drive(engine)) == {("0", 0): right[0]}
    assert disk_of(engine).late == 1
    now[0] += PROBE_S
    assert answers(engine, [PROMPTS[1]]) == [right[1]], "nothing more is sent for while it hangs"
    assert "hangs" in disk_of(engine).state
    answers_now.set()
    settle(engine)
    assert disk_of(engine).state == "ok"
    assert_sound(engine.audit())
    engine.close()


def test_a_disk_that_is_slower_than_computing_is_left_out_and_probed(make_engine: MakeEngine, tmp_path: Path) -> None:
    now, costs = [0.0], TierCosts("auto")
    engine = opened(make_engine(**SMALL, make_tier=disk_below(tmp_path, clock=lambda: now[0], costs=costs)))
    cold = cold_of(engine)
    costs.prefill.value, costs.fetched.value = 1e9, 1.0
    assert cold._pays(3), "never tried in this minute"
    cold._last_fetch_s = 0.0
    assert not cold._pays(3)
    now[0] += PROBE_S
    assert cold._pays(3)
    engine.close()


@pytest.mark.parametrize(
    ("prefill", "reads", "fetched", "fetches"),
    [
        (None, 1.0, 1.0, True),
        (100.0, 3000.0, None, True),
        (100.0, 3000.0, 3000.0, True),  # 1 s to compute; 0.33 s for each of two ways
        (100.0, None, 1500.0, True),
        (100.0, 1500.0, 1500.0, False),
        (100.0, 1e9, 900.0, False),
    ],
)
def test_blocks_are_fetched_where_that_is_measured_to_be_faster(
    prefill: float | None, reads: float | None, fetched: float | None, fetches: bool
) -> None:
    costs = TierCosts("auto")
    costs.prefill.value, costs.reads.value, costs.fetched.value = prefill, reads, fetched
    assert costs.fetches(100, 1000) is fetches
    costs.preemption = "swap"
    assert costs.fetches(100, 1000)


def test_stats_of_the_disk_travel() -> None:
    disk = ColdTierStats("ok", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1.5, 2.5)
    for stats in (replace(STATS, disk=disk), replace(STATS, store=disk)):
        assert unpack(pack(stats)) == stats
