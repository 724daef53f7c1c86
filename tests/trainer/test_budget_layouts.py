"""A budget of activations beside other layouts: what is kept on each rank is within it, and what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.model.config import ModelConfig
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.layer_choice import layer_cost, planned_activations, stage_choices
from stoker.pod.plan.stage import pipeline_ranks
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.mesh import AxisGroups
from stoker.trainer.rank.plan_check import choose_layers, planned_job
from testing.trainer.kept_bytes import Kept, kept_by_forward, kept_by_late_stage, kept_by_stage
from testing.trainer.layouts import LORA, Layout
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import TINY, alone, context_of, tiny_config

WIDE = replace(
    TINY,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=160,
    num_layers=4,
    head_dim=16,
    max_position_embeddings=256,
    tie_embeddings=False,
)
SPARSE = replace(WIDE, architecture="qwen3-moe", num_experts=8, num_experts_per_token=2, moe_intermediate_size=96)
ONE_CHOICE = replace(SPARSE, initializer_range=0.0)
"""All logits of its router are equal, so that all tokens go to the same experts, on one rank."""
PARTS = (1.0, 0.8, 0.6, 0.45)
"""Budgets as parts of what all layers keep."""
LATE_PARTS = (1.0, 0.96, 0.93, 0.915)
"""What late gradients read is about as much as what forward keeps, and no choice makes it less."""
RANKS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "AllGather": (Layout(context=2), {}),
    "Ring": (Layout(context=2), {"parallelism__context_method": "Ring"}),
    "Ulysses": (Layout(context=2), {"parallelism__context_method": "Ulysses"}),
    "sequence parallel": (Layout(tensor=2), {"parallelism__sequence_parallel": True}),
}


def config_of(budget: float, **changes: Any) -> TrainerConfig:
    """`budget`: bytes."""
    fields: dict[str, Any] = {
        "training__sequence_length": 256,
        "training__deterministic": "Off",
        "memory__activation_checkpointing": "selective",
        "memory__activation_budget_gib": budget / 2**30,
    }
    return tiny_config(**{**fields, **changes})


def budgets(model: ModelConfig, changes: dict[str, Any], parts: tuple[float, ...] = PARTS) -> list[float]:
    plenty = planned_job(config_of(2**30, **changes), model)
    return [part * planned_activations(plenty, pipeline_ranks(plenty)[0]) for part in parts]


def check(found: list[Kept], limits: list[float]) -> None:
    """Each within its budget and near to the plan; the loss and the gradient are those of the largest budget."""
    for kept, limit in zip(found, limits, strict=True):
        assert kept.measured <= limit
        assert 0.85 * kept.planned <= kept.measured <= kept.planned
        assert (kept.loss, kept.gradient) == (found[0].loss, found[0].gradient)
    measured = [kept.measured for kept in found]
    assert measured == sorted(measured, reverse=True)
    assert measured[-1] < 0.5 * measured[0]


@pytest.mark.parametrize(
    ("model", "changes"),
    [(WIDE, LORA), (SPARSE, {}), (SPARSE, LORA)],
    ids=["adapters", "experts", "adapters of experts"],
)
def test_adapters_and_experts_stay_within_a_budget(model: ModelConfig, changes: dict[str, Any]) -> None:
    limits = budgets(model, changes)
    check([kept_by_forward(config_of(limit, **changes), alone(), model) for limit in limits], limits)


def open_groups(_rank: int, _size: int) -> AxisGroups:
    return AxisGroups(torch.device("cpu"))


def measure(
    groups: AxisGroups, layout: Layout, changes: dict[str, Any], limits: list[float], model: ModelConfig = WIDE
) -> list[Kept]:
    context = context_of(layout.dims, groups=groups)
    assert context is not None
    return [kept_by_forward(config_of(limit, **changes), context, model) for limit in limits]


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2, open_groups) as world:
        yield world


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_share_sequences_or_tokens_stay_within_a_budget(world: RankWorld, name: str) -> None:
    layout, changes = RANKS[name]
    sizes = {"parallelism__context": layout.context, "parallelism__tensor": layout.tensor, "gang__ranks_per_node": 2}
    limits = budgets(WIDE, {**changes, **sizes})
    for found in world.call(measure, layout, {**changes, **sizes}, limits, timeout_s=300.0):
        check(found, limits)


@pytest.mark.parametrize("lora", [{}, LORA], ids=["experts", "adapters of experts"])
def test_ranks_of_experts_stay_within_a_budget_whatever_the_router_chooses(
    world: RankWorld, lora: dict[str, Any]
) -> None:
    layout = Layout(shard=2, expert=2)
    changes = {"parallelism__expert": 2, "gang__ranks_per_node": 2, "training__global_batch_size": 2, **lora}
    limits = budgets(SPARSE, changes, (1.0, 0.45))
    even = world.call(measure, layout, changes, limits[:1], SPARSE, timeout_s=300.0)
    one_choice = world.call(measure, layout, changes, limits, ONE_CHOICE, timeout_s=300.0)
    emptiest, fullest = sorted(one_choice, key=lambda found: found[0].measured)
    check(fullest, limits)
    assert all(kept.measured <= kept.planned <= limits[0] for kept in (even[0][0], even[1][0], emptiest[0]))
    assert emptiest[0].measured < even[0][0].measured < fullest[0].measured


@pytest.mark.parametrize("schedule", ["GPipe", "OneFOneB"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_keeps_all_that_its_schedule_has_under_way_within_a_budget(schedule: str, number: int) -> None:
    changes: dict[str, Any] = {
        "parallelism__pipeline": 2,
        "parallelism__pipeline_schedule": schedule,
        "gang__ranks_per_node": 2,
        "training__global_batch_size": 3,
    }
    gradients = []
    for limit in budgets(WIDE, changes):
        config = config_of(limit, **changes)
        job = planned_job(config, WIDE)
        rank = pipeline_ranks(job)[number]
        kept, layers, gradient = kept_by_stage(config, WIDE, number, rank.live_stages)
        again = max(layer_cost(job, choice).again for choice in stage_choices(job, number, layers))
        assert kept + 256 * again <= planned_activations(job, rank) <= limit
        gradients.append(gradient)
    assert gradients == [gradients[0]] * len(gradients)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_keeps_what_late_gradients_read_within_a_budget(number: int) -> None:
    changes: dict[str, Any] = {
        "parallelism__pipeline": 2,
        "parallelism__pipeline_schedule": "ZeroBubble",
        "gang__ranks_per_node": 2,
        "training__global_batch_size": 6,
    }
    kept, gradients = [], []
    for limit in budgets(WIDE, changes, LATE_PARTS):
        config = config_of(limit, **changes)
        job = planned_job(config, WIDE)
        most, gradient = kept_by_late_stage(config, WIDE, number)
        planned = planned_activations(job, pipeline_ranks(job)[number])
        assert 0.6 * planned <= most <= planned <= limit
        kept.append(most)
        gradients.append(gradient)
    assert gradients == [gradients[0]] * len(gradients)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, SPARSE),
        (LORA, WIDE),
        ({"memory__precision": "fp8"}, WIDE),
        ({"parallelism__tensor": 2, "parallelism__sequence_parallel": True, "gang__ranks_per_node": 4}, WIDE),
    ],
)
def test_late_gradients_that_are_not_counted_are_refused(changes: dict[str, Any], model: ModelConfig) -> None:
    split = {"parallelism__pipeline": 2, "parallelism__pipeline_schedule": "ZeroBubble", "gang__ranks_per_node": 2}
    with pytest.raises(
        ConfigError,
        match="not planned with pipelineSchedule ZeroBubble beside ",
    ):
        choose_layers(config_of(2**30, **{**split, **changes}), model)


def test_what_no_bound_is_known_for_is_refused_with_the_reason() -> None:
    mixed = replace(SPARSE, mlp_only_layers=(0,))
    with pytest.raises(ConfigError, match=r"both dense layers \(1 of 4\) and layers with experts"):
        choose_layers(config_of(2**30), mixed)
    in_eight_bits = config_of(2**30, parallelism__sequence_parallel=True, memory__precision="fp8")
    with pytest.raises(ConfigError, match=r"activationBudgetGiB 1.0: .* sequenceParallel beside precision fp8"):
        choose_layers(in_eight_bits, WIDE)
