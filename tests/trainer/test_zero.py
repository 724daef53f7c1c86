"""ZeRO over flat buckets: against torch's optimizer, and every layout against one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.model.kernels.ops import Ops
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import make_buckets
from stoker.trainer.rank.bucket_state import ZeroSettings
from stoker.trainer.rank.clip import GradientNorm, clip_factor
from stoker.trainer.rank.communicator import Alone, Communicator, make_communicator
from stoker.trainer.rank.gradient_sum import merges_after
from stoker.trainer.rank.lamb import Lamb, sum_over_holders
from stoker.trainer.rank.mesh import Mesh, data_parallel_mesh
from stoker.trainer.rank.optimizer import Adam, Optimizer
from stoker.trainer.rank.zero import Zero
from testing.trainer.rank_world import run_ranks

STEPS, MICRO_BATCHES, RATE = 4, 8, 1e-2
FP32 = ZeroSettings(stage=1, compute_dtype=torch.float32, any_data_parallel=True)
CONFIG = OptimizationConfig(learning_rate=RATE, weight_decay=0.1)
LAMB = OptimizationConfig(optimizer="lamb", learning_rate=RATE, weight_decay=0.1)
ALONE = Alone()


class Net(nn.Module):
    """A model with the shape of a decoder (embedding, blocks, tied head) and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 60), nn.SiLU(), nn.LayerNorm(60), nn.Linear(60, 24)) for _ in range(3)]
        )
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.embedding.weight).float()


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, 50, (11,), generator=generator)
    return tokens[:-1], tokens[1:]


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    tokens, targets = micro_batch(step, index)
    return nn.functional.cross_entropy(model(tokens), targets, reduction="sum") / (10 * MICRO_BATCHES)


def make_optimizer(config: OptimizationConfig, mesh: Mesh, settings: ZeroSettings) -> Optimizer:
    if config.optimizer != "lamb":
        return Adam(config, Ops())
    return Lamb(
        config,
        Ops(),
        lambda kind, cells: sum_over_holders(cells, kind, mesh, is_whole=settings.stage == 0),
        by_line=settings.any_data_parallel,
    )


def train(
    communicator: Communicator, settings: ZeroSettings, config: OptimizationConfig = CONFIG, clipping: float = 0.5
) -> dict[str, Any]:
    """Return the norms of every step, and all parameters and moments at the end, as this rank sees them."""
    model, mesh = Net(), data_parallel_mesh(communicator)
    units = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    ops = Ops()
    zero = Zero(
        make_buckets(list(units.items()), model, mesh.cuts),
        mesh,
        make_optimizer(config, mesh, settings),
        GradientNorm(ops, by_line=settings.any_data_parallel),
        settings,
    )
    mine = MICRO_BATCHES // communicator.size
    norms = []
    for step in range(STEPS):
        zero.begin_step(mine)
        for index in range(communicator.rank * mine, (communicator.rank + 1) * mine):
            for state in zero.states:
                zero.ready(state.bucket.unit)
            loss_of(model, step, index).backward()
            zero.end_micro_batch()
        zero.finish_reduce()
        norm = zero.gradient_norm()
        norms.append(float(norm))
        zero.update(step + 1, RATE, clip_factor(norm, clipping).float())
    zero.wait_parameters()
    shards = [{kind: shard.numpy().copy() for kind, shard in state.shards().items()} for state in zero.states]
    parameters = {name: value.detach().float().numpy().copy() for name, value in model.named_parameters()}
    return {"norms": norms, "parameters": parameters, "shards": shards}


def reference(config: OptimizationConfig, clipping: float) -> dict[str, Any]:
    """Run the same training with torch's own optimizer and clipping."""
    model = Net()
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=RATE, betas=(config.beta1, config.beta2), eps=config.epsilon)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            loss_of(model, step, index).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))))
        optimizer.step()
    return {
        "norms": norms,
        "parameters": {name: value.detach().numpy().copy() for name, value in model.named_parameters()},
    }


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("tree", [False, True])
def test_one_rank_equals_torchs_optimizer(optimizer: str, clipping: float, tree: bool) -> None:
    config = CONFIG.model_copy(update={"optimizer": optimizer})
    got = train(ALONE, replace(FP32, any_data_parallel=tree), config, clipping)
    expected = reference(config, clipping)
    np.testing.assert_allclose(got["norms"], expected["norms"], rtol=1e-5)
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(got["parameters"][name], value, atol=2e-6, rtol=1e-5, err_msg=name)


def test_bf16_parameters_are_the_rounded_fp32_masters() -> None:
    got = train(ALONE, replace(FP32, compute_dtype=torch.bfloat16))
    exact = train(ALONE, FP32)
    np.testing.assert_allclose(got["norms"], exact["norms"], rtol=0.1)
    embedding = torch.from_numpy(got["shards"][0]["model"][: 50 * 24].reshape(50, 24))
    np.testing.assert_array_equal(got["parameters"]["embedding.weight"], embedding.bfloat16().float().numpy())
    assert not torch.equal(embedding, embedding.bfloat16().float())


CASES = {
    "four, lamb": ((0, 1, 2, 3), FP32),
    "four, lamb, stage 0": ((0, 1, 2, 3), replace(FP32, stage=0)),
    "two, lamb, serial": ((0, 1), replace(FP32, any_data_parallel=False)),
    "two": ((0, 1), FP32),
    "four": ((0, 1, 2, 3), FP32),
    "four, stage 0": ((0, 1, 2, 3), replace(FP32, stage=0)),
    "two, serial": ((0, 1), replace(FP32, any_data_parallel=False)),
    "four, stage 2": ((0, 1, 2, 3), replace(FP32, stage=2, any_data_parallel=False)),
    "two, bf16": ((0, 1), replace(FP32, compute_dtype=torch.bfloat16)),
    "four, bf16, stage 0": ((0, 1, 2, 3), replace(FP32, compute_dtype=torch.bfloat16, stage=0)),
}


def config_of(case: str) -> OptimizationConfig:
    return LAMB if "lamb" in case else CONFIG


def train_all_cases(rank: int, size: int) -> dict[str, Any]:
    results = {}
    for name, (ranks, settings) in CASES.items():
        if (communicator := make_communicator(ranks, torch.device("cpu"))) is not None:
            results[name] = train(communicator, settings, config_of(name))
    return results


@pytest.fixture(scope="module")
def many() -> list[dict[str, Any]]:
    return run_ranks(train_all_cases, 4)


def assert_same_bits(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["norms"] == expected["norms"]
    for name, value in expected["parameters"].items():
        np.testing.assert_array_equal(got["parameters"][name], value, err_msg=name)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("two", torch.float32),
        ("four", torch.float32),
        ("four, stage 0", torch.float32),
        ("two, bf16", torch.bfloat16),
        ("four, bf16, stage 0", torch.bfloat16),
        ("four, lamb", torch.float32),
        ("four, lamb, stage 0", torch.float32),
    ],
)
def test_any_data_parallel_size_gives_the_bits_of_one_rank(
    many: list[dict[str, Any]], case: str, dtype: torch.dtype
) -> None:
    alone = train(ALONE, replace(FP32, compute_dtype=dtype), config_of(case))
    for rank in CASES[case][0]:
        assert_same_bits(many[rank][case], alone)


def test_the_shards_of_all_ranks_are_the_state_of_one(many: list[dict[str, Any]]) -> None:
    alone = train(ALONE, FP32)
    for case in ("four", "four, stage 0"):
        for bucket, expected in enumerate(alone["shards"]):
            for kind, value in expected.items():
                whole = np.concatenate([many[rank][case]["shards"][bucket][kind] for rank in range(4)])
                np.testing.assert_array_equal(whole[: value.size], value)


@pytest.mark.parametrize("case", ["two, serial", "four, stage 2", "two, lamb, serial"])
def test_serial_sums_on_several_ranks_are_close_to_one_rank(many: list[dict[str, Any]], case: str) -> None:
    alone = train(ALONE, replace(FP32, any_data_parallel=False), config_of(case))
    np.testing.assert_allclose(many[0][case]["norms"], alone["norms"], rtol=1e-6)
    for name, value in alone["parameters"].items():
        np.testing.assert_allclose(many[0][case]["parameters"][name], value, atol=2e-6)


@pytest.mark.parametrize(
    ("leaves", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 0, 2]), (5, [0, 1, 0, 0, 3]), (3, [0, 0, 2])]
)
def test_merges_follow_recursive_halving(leaves: int, expected: list[int]) -> None:
    assert merges_after(leaves) == expected
