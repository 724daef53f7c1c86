"""A budget of activations beside other layouts: what is kept on each rank is within it, and what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.model.config import ModelConfig
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.late_gradients import turning
from stoker.pod.plan.layer_choice import layer_cost, planned_activations, stage_choices
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.stage import pipeline_ranks, stage_layers
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.build import RankContext
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
MIXED = replace(SPARSE, mlp_only_layers=(0, 3))
"""Dense layers at both ends, and experts between them."""
ONE_CHOICE = replace(SPARSE, initializer_range=0.0)
"""All logits of its router are equal, so that all tokens go to the same experts, on one rank."""
PARTS = (1.0, 0.8, 0.6, 0.45)
"""Budgets as parts of what all layers keep."""
LONG = replace(WIDE, max_position_embeddings=2048)
FP8: dict[str, Any] = {
    "memory__precision": "fp8",
    "training__sequence_length": 1040,  # attention in two bytes keeps the scores of shorter sequences
}
CUT: dict[str, Any] = {"parallelism__sequence_parallel": True}
RANKS: dict[str, tuple[Layout, ModelConfig, dict[str, Any]]] = {
    "AllGather": (Layout(context=2), WIDE, {}),
    "Ring": (Layout(context=2), WIDE, {"parallelism__context_method": "Ring"}),
    "Ulysses": (Layout(context=2), WIDE, {"parallelism__context_method": "Ulysses"}),
    "sequence parallel": (Layout(tensor=2), WIDE, CUT),
    "sequence parallel, adapters": (Layout(tensor=2), WIDE, {**CUT, **LORA}),
    "sequence parallel, experts": (Layout(tensor=2), SPARSE, CUT),
    "sequence parallel, both kinds of layers": (Layout(tensor=2), MIXED, CUT),
    "sequence parallel, fp8": (Layout(tensor=2), LONG, {**CUT, **FP8}),
    "sequence parallel, fp8 by rows": (Layout(tensor=2), LONG, {**CUT, **FP8, "memory__fp8_recipe": "Rowwise"}),
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
    """Each within its plan, near to it, and within its budget; loss and gradient are those of the largest budget."""
    for kept, limit in zip(found, limits, strict=True):
        assert kept.measured <= limit
        assert 0.85 * kept.planned <= kept.measured <= kept.planned
        assert (kept.loss, kept.gradient) == (found[0].loss, found[0].gradient)
    measured = [kept.measured for kept in found]
    assert measured == sorted(measured, reverse=True)
    assert measured[-1] < 0.5 * measured[0]


@pytest.mark.parametrize(
    ("model", "changes"),
    [(WIDE, LORA), (SPARSE, {}), (SPARSE, LORA), (MIXED, {}), (MIXED, LORA)],
    ids=["adapters", "experts", "adapters of experts", "both kinds of layers", "adapters of both kinds"],
)
def test_adapters_and_experts_stay_within_a_budget(model: ModelConfig, changes: dict[str, Any]) -> None:
    limits = budgets(model, changes)
    check([kept_by_forward(config_of(limit, **changes), alone(), model) for limit in limits], limits)


def open_groups(_rank: int, _size: int) -> AxisGroups:
    return AxisGroups(torch.device("cpu"))


def measure(
    groups: AxisGroups, layout: Layout, changes: dict[str, Any], limits: list[float], model: ModelConfig
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
    layout, model, changes = RANKS[name]
    sizes = {"parallelism__context": layout.context, "parallelism__tensor": layout.tensor, "gang__ranks_per_node": 2}
    limits = budgets(model, {**changes, **sizes})
    for found in world.call(measure, layout, {**changes, **sizes}, limits, model, timeout_s=300.0):
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


LATE: dict[str, tuple[ModelConfig, dict[str, Any], int]] = {
    "dense, first rank": (WIDE, {}, 0),
    "dense, last rank": (WIDE, {}, 1),
    "experts": (SPARSE, {}, 1),
    "both kinds of layers": (MIXED, {}, 1),
    "adapters": (WIDE, LORA, 1),
    "adapters of attention": (WIDE, {**LORA, "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}}, 0),
    "adapters of experts": (SPARSE, LORA, 1),
    "fp8": (LONG, FP8, 1),
}
"""Model, changes of the configuration, and the rank of the pipeline."""
LATE_CUT: dict[str, tuple[Layout, ModelConfig, dict[str, Any]]] = {
    "tokens, adapters": (Layout(tensor=2), WIDE, {**CUT, **LORA}),
    "tokens, fp8 by rows": (Layout(tensor=2), LONG, {**CUT, **FP8, "memory__fp8_recipe": "Rowwise"}),
    "tokens, experts": (Layout(tensor=2, expert=2), SPARSE, CUT),
}


def late_config(budget: float | None, layout: Layout, changes: dict[str, Any]) -> TrainerConfig:
    """A rank of a zero-bubble pipeline of two; without a budget everything is kept."""
    fields: dict[str, Any] = {
        "parallelism__pipeline": 2,
        "parallelism__pipeline_schedule": "ZeroBubble",
        "parallelism__tensor": layout.tensor,
        "parallelism__expert": layout.expert,
        "gang__ranks_per_node": 2 * layout.tensor,
        "training__global_batch_size": 3,
        **changes,
    }
    if budget is not None:
        return config_of(budget, **fields)
    everything = {"memory__activation_checkpointing": "none", "memory__activation_budget_gib": None}
    return config_of(2**30, **{**fields, **everything})


def smallest_budget(model: ModelConfig, layout: Layout, changes: dict[str, Any]) -> float:
    """Bytes that the refusal of one byte names."""
    with pytest.raises(ConfigError) as refused:
        choose_layers(late_config(1.0, layout, changes), model, (0, 2))
    return float(str(refused.value).rsplit(" ", 1)[-1]) * 2**30


def check_late(
    layout: Layout, model: ModelConfig, changes: dict[str, Any], number: int, context: RankContext | None = None
) -> None:
    """With the smallest budget that works: what is kept is within it, and the gradient is that without a budget."""
    limit = smallest_budget(model, layout, changes)
    config = late_config(limit, layout, changes)
    most, gradient = kept_by_late_stage(config, model, number, context)
    everything, expected = kept_by_late_stage(late_config(None, layout, changes), model, number, context)
    job = planned_job(config, model)
    planned = planned_activations(job, pipeline_ranks(job)[number])
    layers = stage_layers(job)[number]
    kinds = layer_jobs(job)[layers.start : layers.stop]
    costs = [(kind, layer_cost(kind, one)) for kind, one in zip(kinds, stage_choices(job, number, 2), strict=True)]
    of_moment = job.tokens * max(cost.again + turning(kind, cost.kept) for kind, cost in costs)
    worst = job.fullest_load  # the plan counts the rows of the worst choice of the routers
    assert 0.85 / worst * (planned - of_moment) <= most <= planned <= limit
    assert most < everything
    assert gradient == expected


@pytest.mark.parametrize("name", LATE)
def test_a_stage_keeps_what_late_gradients_read_within_a_budget(name: str) -> None:
    model, changes, number = LATE[name]
    check_late(Layout(), model, changes, number)


def measure_late(groups: AxisGroups, layout: Layout, model: ModelConfig, changes: dict[str, Any]) -> None:
    check_late(layout, model, changes, 1, context_of(layout.dims, groups=groups))


@pytest.mark.parametrize("name", LATE_CUT)
def test_a_stage_of_several_ranks_keeps_late_gradients_within_a_budget(world: RankWorld, name: str) -> None:
    world.call(measure_late, *LATE_CUT[name], timeout_s=300.0)


def test_the_named_budget_is_that_of_the_rank_that_needs_most() -> None:
    """And one byte less is refused: the smallest that works is the same whichever rank asks."""
    for number in (0, 1):
        found = choose_layers(late_config(smallest_budget(WIDE, Layout(), {}), Layout(), {}), WIDE, (number, 2))
        assert len(found) == 2
    below = late_config(0.99 * smallest_budget(WIDE, Layout(), {}), Layout(), {})
    with pytest.raises(ConfigError, match="the smallest that works is "):
        choose_layers(below, WIDE, (0, 2))
