"""The engine that a configuration becomes, and the refusals."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.cache_size import count_blocks
from stoker.engine.config import CacheConfig, EngineConfig
from stoker.engine.core.build import build_engine, end_tokens, tokenizer_folder
from stoker.engine.plan import BLOCK_SIZES, plan_engine
from stoker.engine.plan_checks import refuse_uneven
from stoker.model.paged_attend import KVCache
from stoker.model.weights.source import WeightsSource, open_weights
from stoker.pod.config_file import ConfigError, parse


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    twins["llama"].save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return folder


@pytest.fixture(scope="module")
def source(folder: Path) -> WeightsSource:
    return open_weights(folder)


def config_of(folder: Path, **more: Any) -> EngineConfig:
    model = {"path": str(folder), "dtype": "float32", **more.pop("model", {})}
    return parse(EngineConfig, {"model": model, "device": "cpu", "cache": {"num_blocks": 30}, **more})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism": {"pipeline": 3}}, "parallelism.pipeline must be at most 2, the model's layers, got 3"),
    ({"parallelism": {"expert": 2}}, "parallelism.expert 2 does not divide parallelism.tensor 1: 1 or a divisor"),
    (
        {"parallelism": {"tensor": 2, "expert": 2}},
        "parallelism.expert must be 1 for a model without experts, got 2",
    ),
    (
        {"cache": {"host_memory_bytes": 1 << 10}, "parallelism": {"tensor": 2}},
        "cache.host_memory_bytes must hold a block of 8192 bytes",
    ),
    ({"kernels": "fused"}, "'fused' needs a CUDA device, not 'cpu'"),
    ({"attention": "cudnn"}, "attention cudnn is not supported yet; allowed: auto, sdpa, stoker, flash"),
    ({"attention": "flash"}, "'flash' is not built for kernels 'reference' with deterministic = False"),
    ({"deterministic": True, "threads": 2}, "threads must be 1 where deterministic is true, got 2"),
    ({"scheduler": {"max_model_len": 161}}, "max_model_len must be at most 160, the max_position_embeddings"),
    (
        {"scheduler": {"max_model_len": 150}, "cache": {"num_blocks": 9}},
        "at most 144, the tokens of the cache, got 150",
    ),
    ({"cache": {"memory_bytes": 100}}, "cache: 100 bytes hold no block of 8192 bytes"),
    ({"cache": {"memory_bytes": 10**16}}, "cache.memory_bytes 10000000000000000 needs 10000000000000000 bytes, this"),
    ({"cache": {"num_blocks": 10**12}}, "cache.num_blocks 1000000000000 needs 8192000000000000 bytes, this"),
    (
        {"cache": {"host_memory_bytes": 1 << 20, "prefix_cache": False}},
        "cache.host_memory_bytes needs cache.prefix_cache true",
    ),
    ({"cache": {"store": {"paths": ["/x"], "bytes": 10**9}}}, "cache.store needs cache.host_memory_bytes"),
    ({"cache": {"store": {"paths": ["/x"], "bytes": 1, "replicas": 2}}}, "replicas must be at most 1, the number of"),
    ({"cache": {"store": {"paths": ["/x", "/x"], "bytes": 1}}}, "paths must differ"),
    (
        {"cache": {"num_blocks": 30, "host_memory_bytes": 1 << 20, "store": {"paths": ["/x"], "bytes": 9000}}},
        "cache.store.bytes must hold a file of 16384 bytes, got 9000",
    ),
    ({"cache": {"disk": {"path": "/x", "bytes": 10**9}}}, "cache.disk needs cache.host_memory_bytes"),
    (
        {"cache": {"num_blocks": 30, "host_memory_bytes": 1 << 20, "disk": {"path": "/x", "bytes": 9000}}},
        "cache.disk.bytes must hold a file of 16384 bytes, got 9000",
    ),
    ({"cache": {"host_memory_bytes": 100}}, r"must hold a block of 8192 bytes \(16 tokens\), got 100"),
    ({"cache": {"host_memory_bytes": 10**16}}, "cache.host_memory_bytes 10000000000000000 needs 10000000000000000 by"),
    ({"cache": {"preemption": "never"}}, "preemption"),
    ({"parallelism": {"tensor": 4}}, "parallelism.tensor 4 does not divide the model's 6 attention heads"),
    (
        {"parallelism": {"tensor": 3}},
        "parallelism.tensor 3 is neither a divisor nor a multiple of the model's 2 key and value heads",
    ),
    ({"model": {"digest": "abc"}}, "digest"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_built_is_refused_by_name(more: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(config_of(folder, **more))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said(folder: Path, source: WeightsSource) -> None:
    with pytest.raises(ConfigError, match="has no CUDA device; allowed: auto, cpu"):
        plan_engine(config_of(folder, device="cuda"), source)


def test_the_plan_holds_every_choice(folder: Path, source: WeightsSource) -> None:
    plan = plan_engine(config_of(folder, model={"dtype": "bfloat16"}, deterministic=True), source)
    assert (plan.device, plan.dtype, plan.kernels, plan.attention) == ("cpu", torch.bfloat16, "reference", "stoker")
    assert (plan.threads, plan.block_size, plan.num_blocks, plan.max_model_len) == (1, 16, 30, 160)
    assert not plan.overlap, "on the CPU there is nothing to overlap with"
    assert plan_engine(config_of(folder, scheduler={"overlap": True}), source).overlap


def test_seats_are_no_more_than_tokens_of_a_step(folder: Path, source: WeightsSource) -> None:
    plan = plan_engine(config_of(folder, scheduler={"max_batch_tokens": 8, "max_requests": 100}), source)
    assert plan.num_seats == 8


def test_the_cache_takes_the_memory_that_it_is_given(folder: Path, source: WeightsSource) -> None:
    block_bytes = KVCache.block_bytes(source.config, block_size=16, dtype=torch.float32)
    config = config_of(folder, cache={"memory_bytes": 10 * block_bytes + 5})
    assert count_blocks(config, source.config, 16, torch.float32, "cpu") == 10
    free = config_of(folder, cache={"memory_fraction": 0.001})
    assert 1 <= count_blocks(free, source.config, 16, torch.float32, "cpu") * block_bytes < 2**32


def test_the_cache_follows_from_the_rank_with_least_memory(folder: Path, source: WeightsSource) -> None:
    config = config_of(folder, cache={"memory_fraction": 0.5}, parallelism={"tensor": 2})
    weights = source.config.num_parameters * 4
    block_bytes = KVCache.block_bytes(source.config, block_size=16, dtype=torch.float32, tp_size=2)
    assert block_bytes == KVCache.block_bytes(source.config, block_size=16, dtype=torch.float32, tp_size=4), "a copy"
    plan = plan_engine(config, source, others_free_bytes=weights + 2 * 1000 * block_bytes)
    assert plan.num_blocks == 500, "half of what is left, for two ranks in one memory"
    config = config_of(folder, cache={"memory_fraction": 0.5}, parallelism={"data": 2})
    plan = plan_engine(config, source, others_free_bytes=2 * weights + 2 * 1000 * block_bytes)
    assert plan.num_blocks == 250, "each of two cores has weights of its own, and blocks of all heads"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("intermediate_size", 81, "tensor 2 does not divide the model's 81 columns of the feed-forward part"),
        ("num_heads", 3, "tensor 2 does not divide the model's 3 attention heads"),
        ("num_kv_heads", 3, "tensor 2 is neither a divisor nor a multiple of the model's 3 key and value heads"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused_by_name(
    field: str, value: int, message: str, folder: Path, source: WeightsSource
) -> None:
    model = copy(source.config)
    object.__setattr__(model, field, value)  # no model that could be loaded
    with pytest.raises(ConfigError, match=message):
        refuse_uneven(config_of(folder, parallelism={"tensor": 2}), model)
    refuse_uneven(config_of(folder, parallelism={"tensor": 2}), replace(source.config, vocab_size=321))


def test_blocks_are_larger_on_a_gpu_unless_their_size_is_given(folder: Path, source: WeightsSource) -> None:
    assert BLOCK_SIZES == {"cuda": 64, "cpu": 16}
    assert CacheConfig().block_size is None, "the device decides"
    given = plan_engine(config_of(folder, cache={"num_blocks": 3, "block_size": 24}), source)
    assert (given.block_size, given.max_model_len) == (24, 72)


def test_the_host_tier_takes_the_memory_that_it_is_given(folder: Path) -> None:
    engine, plan = build_engine(config_of(folder, cache={"num_blocks": 30, "host_memory_bytes": 5 * 8192 + 5}))
    try:
        assert plan.num_host_blocks == 5
        assert engine.tier is not None
        assert engine.tier.costs.preemption == "auto"
        host = engine.stats().host
        assert host is not None
        assert (host.total_blocks, host.block_bytes, host.transport) == (5, 8192, "host-memory")
    finally:
        engine.close()
    without, _ = build_engine(config_of(folder))
    assert without.tier is None
    without.close()


def test_end_tokens_come_from_both_configurations(source: WeightsSource) -> None:
    assert end_tokens(source) == (2, 7)


def test_a_folder_serves_its_own_tokenizer(folder: Path, source: WeightsSource, tmp_path: Path) -> None:
    assert tokenizer_folder(plan_engine(config_of(folder), source), tmp_path) == folder
