"""The host tier of an engine of several ranks: every rank keeps its part of each block, and no token changes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_engine
from stoker.engine.core.disk.block_folder import SUFFIX
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.rank_tier import RankTier, open_rank_tier
from stoker.engine.core.rank_tier_link import RankTierLink
from stoker.engine.core.stats import HostTierStats
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.host_link import HostMemoryLink
from stoker.engine.ranks import executor
from stoker.engine.ranks.block_calls import (
    BlockReport,
    CallEnded,
    FenceSave,
    LoadBlocks,
    OpenTier,
    SaveBlocks,
    TierOpened,
)
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.ranks.workers import Workers, worker_command
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.port import Move
from stoker.pod.config_file import ConfigError
from testing.engine.audits import assert_sound
from testing.engine.rank_engines import closed, config_of, saved
from testing.engine.transfers import LAYOUT, random_blocks, wait_for
from tests.engine.conftest import MakeEngine
from tests.engine.test_cold_blocks import opened, settle
from tests.engine.test_core import PLAN
from tests.engine.test_engine import drive, random_prompts, tokens_of

PARAMS = SamplingParams(temperature=0.8, seed=11, max_tokens=16, ignore_eos=True)
PROMPTS = random_prompts(14, seed=3, shared=True)
SHAPES: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(twins["qwen3"], tmp_path_factory.mktemp("model"))


def started(folder: Path, parallelism: dict[str, int], *, deterministic: bool = True, **cache: Any) -> LLMEngine:
    return build_engine(tier_config(folder, parallelism, deterministic=deterministic, **cache))[0]


def tier_config(folder: Path, parallelism: dict[str, int], *, deterministic: bool = True, **cache: Any) -> EngineConfig:
    return config_of(
        folder,
        1,
        deterministic=deterministic,
        parallelism=parallelism,
        cache={"num_blocks": 45, "block_size": 4, "preemption": "swap", **cache},
        scheduler={"max_batch_tokens": 64, "max_requests": 16},
    )


def answers(engine: LLMEngine) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, PARAMS)
    tokens = tokens_of(drive(engine))
    return [tokens[str(index), 0] for index in range(len(PROMPTS))]


@pytest.fixture(params=SHAPES)
def tiered(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLMEngine]:
    engine = started(folder, SHAPES[request.param], host_memory_bytes=1 << 20)
    yield engine
    closed(engine)


def test_swapped_sequences_come_back_with_the_same_tokens(tiered: LLMEngine, folder: Path) -> None:
    """In a cache that is too small for all: each preempted sequence goes to all ranks' slots and comes back."""
    expected = answers(started(folder, {}, num_blocks=1200))
    for _ in range(2):
        assert answers(tiered) == expected
    stats = tiered.stats().host
    assert isinstance(stats, HostTierStats)
    assert stats.swapped > 0
    assert stats.loaded > 0
    assert (stats.damaged, stats.failed) == (0, 0)
    assert_sound(tiered.audit())


def test_engines_of_other_widths_read_the_store_of_two_ranks(folder: Path, tmp_path: Path) -> None:
    """Each starts with nothing but the store, which the first one has filled."""
    expected = answers(started(folder, {}, num_blocks=1200))
    store = {"paths": [str(tmp_path)], "bytes": 10**8}
    for number, shape in enumerate(({"tensor": 2}, {}, {"pipeline": 2})):
        engine = opened(started(folder, shape, deterministic=False, host_memory_bytes=1 << 20, store=store))
        wait_for(lambda: list_again(engine) > 0 or not number, "what the store holds")  # noqa: B023 - called here
        assert answers(engine) == expected
        settle(engine)
        stats = engine.stats().store
        assert stats is not None
        assert stats.loaded > 0 if number else stats.saved > 0
        assert (stats.damaged, stats.foreign, stats.failed, stats.state) == (0, 0, 0, "ok")
        assert_sound(engine.audit())
        engine.close()


def list_again(engine: LLMEngine) -> int:
    """Blocks that are known to be in the store."""
    engine.rest()
    stats = engine.stats().store
    assert stats is not None
    return stats.blocks


def test_a_rank_that_is_killed_while_it_writes_loses_no_token(folder: Path, tmp_path: Path) -> None:
    """Its engine ends; the next one finds whole blocks alone."""
    disk = {"path": str(tmp_path), "bytes": 10**8}
    engine = opened(started(folder, SHAPES["tensor"], host_memory_bytes=1 << 20, disk=disk))
    expected = answers(engine)
    while len(list(tmp_path.rglob(f"*{SUFFIX}"))) < 5:
        engine.rest()
    workers = executor_of(engine).workers
    os.kill(workers.processes[1].pid, signal.SIGKILL)
    wait_for(lambda: workers.lost is not None, "the loss")
    engine.add_request("last", [1, 2, 3], PARAMS)
    with pytest.raises(ExecutorLost, match="rank 1"):
        drive(engine)
    engine.close()
    again = opened(started(folder, SHAPES["tensor"], host_memory_bytes=1 << 20, disk=disk))
    stats = again.stats().disk
    assert stats is not None
    assert stats.found * 2 == len(list(tmp_path.rglob(f"*{SUFFIX}"))) > 0, "no part without the other"
    assert answers(again) == expected
    stats = again.stats().disk
    assert stats is not None
    assert (stats.loaded > 0, stats.damaged, stats.foreign, stats.failed) == (True, 0, 0, 0)
    assert_sound(again.audit())
    closed(again)


BROKEN = """
import sys
from stoker.engine.core.rank_tier import RankTier
from stoker.engine.worker_program import main

def fail(tier, call):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

RankTier.do = fail
main()
"""
"""A further rank whose device fails as soon as it should save a block."""


def broken_worker(rank: int, device: str, link: int) -> Sequence[str]:
    return [sys.executable, "-c", BROKEN, *worker_command(rank, device, link)[3:]]


def fail(_: RankTier, __: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_fails_in_the_tier_ends_the_engine_and_names_the_rank(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed or tried again: after such an error no number of the device is to be trusted."""
    command = broken_worker if rank else worker_command
    config = tier_config(folder, SHAPES["tensor"], host_memory_bytes=1 << 20)
    engine, _ = build_engine(config, start=lambda size, device: Workers(size, device, command=command))
    if not rank:
        monkeypatch.setattr(RankTier, "do", fail)
    with pytest.raises(ExecutorLost, match=f"^rank {rank}: RuntimeError: CUDA error: an illegal memory access"):
        answers(engine)
    if rank:
        with pytest.raises(ExecutorLost, match=r"^rank 1: RuntimeError"):
            engine.step()
    engine.close()


def executor_of(engine: LLMEngine) -> executor.Ranks:
    assert isinstance(engine.executor, executor.Ranks)
    return engine.executor


class Ranks:
    """Stand-ins for the calls to two ranks, of which one has no room."""

    num_ranks = 2

    def __init__(self) -> None:
        self.listeners: list[Callable[[int, BlockReport], None]] = []

    def call(self, rank: int, _: OpenTier) -> None:
        told = TierOpened(None, "", "MemoryError: none is left") if rank else TierOpened(LAYOUT, "host-memory", "")
        for listener in self.listeners:
            listener(rank, told)

    def wait(self, condition: Callable[[], bool]) -> None:
        assert condition()


def test_a_rank_without_room_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^cache.host_memory_bytes: rank 1 has no room for 9 blocks: MemoryError: none"
    ):
        RankTierLink(cast(RankCalls, Ranks()), 9)


def test_a_rank_says_that_it_has_no_room(make_engine: MakeEngine) -> None:
    runner, told = make_engine().executor.runner, list[BlockReport]()  # type: ignore[attr-defined]
    assert open_rank_tier(runner, PLAN, OpenTier(10**13), told.append) is None
    (report,) = told
    assert isinstance(report, TierOpened)
    assert report.error


def test_a_rank_reports_each_save_and_load_with_the_sums_of_its_part() -> None:
    blocks = random_blocks(3, seed=1)
    before, reports = blocks.copy(), list[BlockReport]()
    tier = RankTier(HostMemoryLink(blocks, 2), LAYOUT, reports.append)
    tier.do(SaveBlocks(1, (Move(0, 1), Move(2, 0))))
    tier.do(FenceSave(1))
    blocks[:] = 0
    tier.do(LoadBlocks(2, (Move(1, 1),)))
    tier.do(SaveBlocks(3, (Move(0, 7),)))
    tier.do(FenceSave(99))  # one that has ended
    wait_for(lambda: len(reports) == 3, "the reports")
    tier.close()
    saved_, loaded, wrong = reports
    sums = [int(one) for one in raw_sums(before)]
    assert isinstance(saved_, CallEnded)
    assert (saved_.call, list(saved_.sums), saved_.bytes) == (1, [sums[0], sums[2]], 2 * before.shape[1])
    assert isinstance(loaded, CallEnded)
    assert (loaded.call, list(loaded.sums)) == (2, [sums[0]])
    assert (blocks[1] == before[0]).all()
    assert isinstance(wrong, CallEnded)
    assert (wrong.call, wrong.sums) == (3, ())
    assert "7" in wrong.error
