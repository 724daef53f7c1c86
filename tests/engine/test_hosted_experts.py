"""Engines whose experts wait in main memory answer as those that hold all on the device, and report what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from stoker.engine.cache_size import blocks_beside_weights
from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_engine
from stoker.engine.core.core_group import EXPERT_SUMS, merged_stats
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import pack, unpack
from stoker.engine.core.stats import STEP_TOKENS, ExpertStats
from stoker.engine.hosted_memory import expert_bytes, host_bytes, slot_bytes
from stoker.engine.http.core_metrics import register_core
from stoker.engine.plan import plan_engine
from stoker.engine.stage_cut import layer_parameters, stage_parameters
from stoker.model.hosted_experts import Copy, HostCopies
from stoker.model.weights.source import open_weights
from stoker.pod.config_file import ConfigError
from testing.engine.rank_engines import Answers, answers, config_of, saved, tokens_of
from testing.engine.stats import STATS


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """An engine sets the threads of its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3-moe of two layers with eight experts, three of a token."""
    return saved(twins["qwen3-moe"], tmp_path_factory.mktemp("experts"))


def engine_of(folder: Path, on_device: int | None, **more: Any) -> LLMEngine:
    engine, plan = build_engine(config_of(folder, 1, experts={"on_device": on_device}, **more))
    assert plan.experts_on_device == (on_device if on_device != 8 else None)
    return engine


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    return answers(engine_of(folder, None))


@pytest.mark.parametrize("on_device", [1, 3, 7, 8])
def test_answers_are_those_of_an_engine_that_holds_all(folder: Path, expected: Answers, on_device: int) -> None:
    engine = engine_of(folder, on_device)
    assert answers(engine) == expected, "tokens and log-probabilities, bit for bit"
    stats = engine.stats().experts
    if on_device == 8:
        assert stats is None
        return
    assert stats is not None
    assert (stats.slots, stats.experts, stats.expert_bytes) == (2 * on_device, 16, 3 * 48 * 24 * 4)
    assert stats.loaded_bytes == stats.misses * stats.expert_bytes > 0
    assert stats.hits > 0
    assert stats.waited_s > 0


def test_deterministic_engines_are_equal_too(folder: Path) -> None:
    found = [answers(engine_of(folder, on_device, deterministic=True)) for on_device in (None, 2)]
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("on_device", [1, 3, 7])
def test_answers_on_a_gpu_are_those_of_experts_on_the_device(folder: Path, on_device: int, deterministic: bool) -> None:
    """With fused kernels and graphs to compare with tokens alone: a padded step has other tiles."""
    more = {"device": "cuda", "threads": None, "deterministic": deterministic, "cache": {"num_blocks": 100}}
    wanted, found = (answers(engine_of(folder, number, **more)) for number in (None, on_device))
    assert tokens_of(found) == tokens_of(wanted)
    if deterministic:
        assert found == wanted


class FailsOnce(HostCopies):
    failed = False

    def load(self, copies: Sequence[Copy]) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the copy failed")
        super().load(copies)


def test_a_step_whose_loads_fail_is_computed_again(folder: Path, expected: Answers) -> None:
    engine = engine_of(folder, 2)
    engine.hosted_experts[1].copies = copies = FailsOnce()
    assert tokens_of(answers(engine)) == tokens_of(expected), "in other batches, so not bit for bit"
    assert copies.failed


REFUSED = [
    ("qwen3-moe", {"experts": {"on_device": 9}}, "experts.on_device must be at most 8, the experts of a layer on one"),
    ("qwen3-moe", {"experts": {"on_device": 0}}, "on_device"),
    (
        "qwen3-moe",
        {"experts": {"on_device": 5}, "parallelism": {"tensor": 2, "expert": 2}},
        "experts.on_device must be at most 4, the experts of a layer on one rank, got 5",
    ),
    ("llama", {"experts": {"on_device": 2}}, "experts.on_device must be left out for a model without experts, got 2"),
]


@pytest.mark.parametrize(("architecture", "more", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_is_refused_by_name(
    architecture: str, more: dict[str, Any], message: str, twins: dict[str, Any], tmp_path: Path
) -> None:
    source = open_weights(saved(twins[architecture], tmp_path / "model"))
    with pytest.raises(ValueError, match=message):
        plan_engine(config_of(source.path, 1, **more), source)


def test_more_than_the_machines_memory_is_refused(folder: Path) -> None:
    source = open_weights(folder)
    object.__setattr__(source.config, "moe_intermediate_size", 10**12)
    with pytest.raises(ConfigError, match=r"experts.on_device 2 needs \d+ bytes, this machine has \d+"):
        plan_engine(config_of(folder, 1, experts={"on_device": 2}), source)


def test_steps_ahead_and_graphs_are_for_experts_on_the_device(folder: Path) -> None:
    source = open_weights(folder)
    plan = plan_engine(config_of(folder, 1, experts={"on_device": 2}), source)
    assert (plan.graphs, plan.overlap) == (False, False)
    assert plan_engine(config_of(folder, 1), source).graphs
    scheduler = {"overlap": True}
    assert plan_engine(config_of(folder, 1, experts={"on_device": 2}, scheduler=scheduler), source).overlap


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (2, 2)])
def test_the_cache_gets_the_memory_that_experts_leave(folder: Path, tensor: int, expert: int) -> None:
    model, free, dtype = open_weights(folder).config, 40 * 2**20, torch.bfloat16
    parallelism = {"tensor": tensor, "expert": expert}
    blocks = []
    for on_device in (None, 1):
        config = EngineConfig.model_validate(
            {"model": {"path": "/x"}, "parallelism": parallelism, "experts": {"on_device": on_device}}
        )
        blocks.append(blocks_beside_weights(config, model, dtype, free, 100, 16))
    held, whole = 8 // expert, 3 * 48 * 24 * 2 * expert // tensor
    layers = range(2)
    assert expert_bytes(config, model, dtype) == whole
    assert host_bytes(config, model, dtype, layers) == 2 * held * whole
    assert slot_bytes(config, model, dtype, layers) == 2 * whole
    rest = stage_parameters(model, layers) * 2 // tensor - 2 * held * whole
    assert rest < layer_parameters(model, 0) * 2 * 2, "what is left has no experts"
    assert blocks[1] == int(0.9 * (free - rest - 2 * whole)) // 200
    assert blocks[1] - blocks[0] == pytest.approx(0.9 * 2 * (held - 1) * whole / 200, abs=1)


def test_the_counts_travel_add_up_and_are_shown() -> None:
    experts = ExpertStats(slots=4, experts=16, expert_bytes=100, hits=30, misses=7, loaded_bytes=700, waited_s=0.25)
    stats = replace(STATS, experts=experts, step_tokens=(0,) * (len(STEP_TOKENS) + 1))
    assert unpack(pack(stats)) == stats
    doubled: dict[str, Any] = {name: 2 * getattr(experts, name) for name in EXPERT_SUMS}
    assert merged_stats([stats, stats]).experts == replace(experts, **doubled)
    assert merged_stats([replace(stats, experts=None), stats]).experts == experts
    registry = CollectorRegistry()
    register_core(registry, "tiny", lambda: stats, lambda: None)
    shown = generate_latest(registry).decode()
    labels = 'engine="0",model_name="tiny"'
    for line in (
        f"stoker:expert_slots{{{labels}}} 4.0",
        f"stoker:experts_in_host_memory{{{labels}}} 16.0",
        f"stoker:expert_load_bytes_total{{{labels}}} 700.0",
        f"stoker:expert_load_wait_seconds_total{{{labels}}} 0.25",
        f'stoker:experts_needed_total{{{labels},where="slot"}} 30.0',
        f'stoker:experts_needed_total{{{labels},where="host"}} 7.0',
    ):
        assert line in shown
