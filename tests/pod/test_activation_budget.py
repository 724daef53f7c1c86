"""A budget of activations: the solver against all choices, its bytes by hand, and what cannot be met."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.pipeline.actions import Kind
from stoker.pod.pipeline.schedules import compute_order
from stoker.pod.plan.activations import choose_kept
from stoker.pod.plan.budget import Cost, choose_cheapest, fullest_moment, least_room
from stoker.pod.plan.estimate import make_plan
from stoker.pod.plan.gpu import GIB, GPUS
from stoker.pod.plan.job import Job, Layout
from stoker.pod.plan.late_gradients import fullest_moments, held_of_layer, late_bytes, moments_of, turning
from stoker.pod.plan.layer_budget import choose_by_layer, least_room_by_layer
from stoker.pod.plan.layer_choice import (
    KEEP_ALL,
    MODES,
    BudgetTooSmall,
    all_options,
    beside_layers,
    layer_choices,
    layer_cost,
    planned_activations,
    shown_gib,
)
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.memory import fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.pod.plan.stage import pipeline_ranks, pipeline_shape
from testing.pod.model_sizes import LLAMA_8B

TINY = ModelSize(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=2
)


def job(model: ModelSize, tokens: int, budget: float | None, **changes: Any) -> Job:
    return Job(
        model=model,
        layout=Layout(recompute="selective", **changes),
        global_batch_size=changes.get("shard", 1),
        micro_batch_size=1,
        sequence_length=tokens,
        activation_budget_bytes=budget,
    )


WHOLE = st.integers(0, 12)
COSTS = st.lists(st.builds(Cost, kept=WHOLE, again=WHOLE, work=WHOLE), min_size=1, max_size=5)


def least_work(options: list[Cost], layers: int, room: float) -> float | None:
    """The slow twin: every choice, in every order."""
    choices = product(options, repeat=layers)
    return min(
        (sum(cost.work for cost in choice) for choice in choices if fullest_moment(choice) <= room), default=None
    )


@given(COSTS, st.integers(1, 4), st.integers(0, 60))
def test_the_choice_is_the_cheapest_of_all_that_fit(options: list[Cost], layers: int, room: int) -> None:
    chosen, expected = choose_cheapest(options, layers, room), least_work(options, layers, room)
    assert (chosen is None) == (expected is None)
    if chosen is not None:
        costs = [options[number] for number in chosen]
        assert len(costs) == layers
        assert fullest_moment(costs) <= room
        assert sum(cost.work for cost in costs) == expected


@given(COSTS, st.integers(1, 4))
def test_the_least_room_is_the_smallest_that_has_a_choice(options: list[Cost], layers: int) -> None:
    found = least_room(options, layers)
    needed = next(room for room in range(200) if least_work(options, layers, room) is not None)
    assert needed <= found <= needed + 1
    assert choose_cheapest(options, layers, found) is not None


@given(st.lists(COSTS, min_size=1, max_size=4), st.integers(0, 60))
def test_the_choice_of_layers_of_several_kinds_is_near_the_cheapest_that_fits(
    layers: list[list[Cost]], room: int
) -> None:
    """The slow twin: every choice within the bound of what all keep, and one computes again."""
    bound = {choice: sum(c.kept for c in choice) + max(c.again for c in choice) for choice in product(*layers)}
    assert least_room_by_layer(layers) == min(bound.values())
    works = [sum(cost.work for cost in choice) for choice, needed in bound.items() if needed <= room]
    chosen = choose_by_layer(layers, room)
    assert (chosen is None) == (not works)
    if chosen is not None:
        costs = [options[number] for options, number in zip(layers, chosen, strict=True)]
        assert fullest_moment(costs) <= bound[tuple(costs)] <= room
        step = max(max(c.work for c in options) - min(c.work for c in options) for options in layers)
        assert sum(cost.work for cost in costs) <= min(works) + step


SPARSE = replace(TINY, num_experts=8, experts_per_token=2, expert_size=12)


@given(st.sampled_from([(0,), (3,), (0, 2)]), st.floats(0.3, 1.1), st.sampled_from([{}, {"shard": 2, "expert": 2}]))
def test_dense_layers_and_layers_of_experts_are_each_planned_by_their_own_sizes(
    dense_at: tuple[int, ...], part: float, layout: dict[str, Any]
) -> None:
    mixed = job(replace(SPARSE, dense_at=dense_at), 64, GIB, **layout)
    kinds = layer_jobs(mixed)
    for layer, kind in enumerate(kinds):
        alike = TINY if layer in dense_at else SPARSE
        plain = job(alike, 64, None, **({} if layer in dense_at else layout))
        assert layer_cost(kind, KEEP_ALL) == layer_cost(plain, KEEP_ALL)
    everything = planned_activations(mixed)
    assert everything == 64 * (sum(layer_cost(kind, KEEP_ALL).kept for kind in kinds) + beside_layers(mixed))
    limited = replace(mixed, activation_budget_bytes=part * everything)
    try:
        choices = layer_choices(limited)
    except BudgetTooSmall as error:
        needed = error.needed
        limited = replace(mixed, activation_budget_bytes=needed * (1 + 1e-9))
        assert needed > part * everything
    else:
        assert (set(choices) == {KEEP_ALL}) == (part >= 1)
    budget = limited.activation_budget_bytes
    assert budget is not None
    assert planned_activations(limited) <= budget


def test_the_fullest_moment_counts_what_earlier_layers_keep() -> None:
    assert fullest_moment([Cost(1, 9, 0), Cost(2, 5, 0), Cost(3, 0, 0)]) == 10
    assert fullest_moment([Cost(3, 0, 0), Cost(2, 5, 0), Cost(1, 9, 0)]) == 15


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp8"])
def test_the_modes_of_a_layer_keep_what_the_plan_without_a_budget_keeps(precision: Any) -> None:
    found = replace(job(TINY, 16, None), precision=precision)
    for mode in ("none", "selective", "full"):
        if mode == "none" and precision == "fp8":
            continue  # without checkpointing the inputs of products are kept in eight bits
        plain = choose_kept(replace(found, layout=replace(found.layout, recompute=mode)))
        assert layer_cost(found, MODES[mode]).kept == plain.kept_bytes, mode


def test_bytes_and_work_of_a_layer_by_hand() -> None:
    """Of one token in bf16: q k v 16 elements, rotated 12, attention 8 and 4 fp32 numbers, gate and up 32, activated
    16, each norm and part of the stream 8.
    """
    found = job(TINY, 16, None)
    whole = 2 * (4 * 8 + 16 + 12 + 8 + 48) + 16
    by_name = {choice.shown(): layer_cost(found, choice) for choice in all_options(found)}
    assert len(by_name) == 25
    assert by_name["nothing"] == Cost(whole, 0, 0)
    assert (by_name["activated"].kept, by_name["activated"].again) == (whole - 32, 32)
    assert by_name["attention norm, activated"].again == 32
    half = by_name["all of feed-forward"]
    assert (half.kept, half.again) == (whole - 2 * (8 + 48), 2 * (2 * 8 + 48))
    assert (by_name["all of attention"].kept, by_name["the whole layer"].kept) == (2 * (3 * 8 + 8 + 48), 32)
    assert by_name["the whole layer"].again == whole
    assert by_name["the whole layer"].work == max(cost.work for cost in by_name.values())
    # a second pass of feed-forward: two products of 8 x 32 and 16 x 8 numbers, a norm and SwiGLU
    assert half.work == 2 * (8 * 32 + 16 * 8) + 100 * (2 * 16 + 3 * 32)


@given(st.floats(0.05, 1.3), st.sampled_from([{}, {"tensor": 2}, {"shard": 4}]))
def test_a_plan_stays_within_its_budget_or_names_the_smallest(part: float, layout: dict[str, Any]) -> None:
    plain = job(TINY, 16, None, **layout)
    everything = 16 * (4 * layer_cost(plain, KEEP_ALL).kept + beside_layers(plain))
    found = job(TINY, 16, part * everything, **layout)
    try:
        choices = layer_choices(found)
    except BudgetTooSmall as error:
        smallest = float(str(error).rsplit(" ", 1)[1]) * GIB
        assert smallest > part * everything
        assert planned_activations(replace(found, activation_budget_bytes=smallest)) <= smallest
        with pytest.raises(BudgetTooSmall):
            layer_choices(replace(found, activation_budget_bytes=0.99 * smallest))
        return
    assert len(choices) == 4
    assert fullest(found).activations == planned_activations(found) <= part * everything


def test_a_smaller_budget_of_a_real_model_costs_more_and_none_where_all_fits() -> None:
    works = []
    for budget in (60.0, 30.0, 20.0, 10.0, 6.0):
        plan = make_plan(job(LLAMA_8B, 8192, budget * GIB, shard=4), GPUS["H200"])
        assert plan.fullest.activations <= budget * GIB
        assert plan.time is not None
        works.append(plan.time.recompute)
    assert works[0] == 0
    assert works == sorted(works)
    selective = make_plan(job(LLAMA_8B, 8192, None, shard=4), GPUS["H200"])
    full = make_plan(job(LLAMA_8B, 8192, None, shard=4).with_layout(Layout(shard=4, recompute="full")), GPUS["H200"])
    assert selective.time is not None
    assert full.time is not None
    assert selective.time.recompute < works[-1] < 1.4 * full.time.recompute


def test_a_budget_that_cannot_be_met_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(BudgetTooSmall) as raised:
        layer_choices(job(LLAMA_8B, 8192, 3 * GIB))
    assert str(raised.value) == (
        "activations of 8,192 tokens need at least 5.105 GiB on a rank: 32 layers keep 16,384 bytes of a token each "
        "where they are computed again, the one that backward computes again has 149,632, and 17,464 are outside of "
        "the layers; the smallest that works is 5.105"
    )


@given(st.floats(1, 1e15))
def test_a_number_of_bytes_is_shown_as_gib_that_are_not_less(count: float) -> None:
    shown = float(shown_gib(count)) * GIB
    assert count <= shown <= 1.02 * count + 1


@given(st.integers(2, 4), st.integers(1, 2), st.integers(1, 9), st.data())
def test_no_moment_of_a_split_backward_holds_more_than_is_planned(
    ranks: int, stages: int, batches: int, data: Any
) -> None:
    """Layer by layer: a layer's activations go when its late gradients are there."""
    plain = job(TINY, 16, None, pipeline=ranks, stages_per_rank=stages, schedule="ZeroBubble")
    found = replace(plain, model=replace(TINY, num_layers=ranks * stages * 2), global_batch_size=batches)
    late = late_bytes(found)
    layer = st.floats(0.2 * late, 2 * late)
    layers = data.draw(st.lists(layer, min_size=2, max_size=2))
    for rank in pipeline_ranks(found):
        moments = fullest_moments(found, rank)
        bound = sum(held_of_layer(found, moments, kept) for kept in layers)
        bound += max(turning(found, kept) for kept in layers)
        whole = lates = 0
        for action in compute_order("ZeroBubble", pipeline_shape(found))[rank.index]:
            if action.kind is Kind.FORWARD:
                whole += 1
            elif action.kind is Kind.BACKWARD_WEIGHT:
                lates -= 1
            else:
                others = (whole - 1) * sum(layers) + lates * 2 * late
                assert others + sum(layers) + late <= bound * (1 + 1e-9)
                assert others + layers[0] + 2 * late <= bound * (1 + 1e-9)
                whole, lates = whole - 1, lates + 1
            assert whole * sum(layers) + lates * 2 * late <= bound * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 3), (3, 2), (4, 1), (5, 2)])
def test_moments_of_a_split_backward_recur_with_every_round_of_the_ranks(ranks: int, stages: int) -> None:
    plain = job(TINY, 16, None, pipeline=ranks, stages_per_rank=stages, schedule="ZeroBubble")
    model = replace(TINY, num_layers=ranks * stages)
    for batches in range(1, 6 * ranks):
        found = replace(plain, model=model, global_batch_size=batches)
        whole = [moments_of(order) for order in compute_order("ZeroBubble", pipeline_shape(found))]
        assert [fullest_moments(found, rank) for rank in pipeline_ranks(found)] == whole


def test_moments_of_a_large_batch_are_found_as_fast_as_those_of_a_small_one() -> None:
    """The operator plans each job at admission: a batch size with too many zeros must not keep it from all others."""
    found = job(replace(TINY, num_layers=8), 16, GIB, pipeline=4, schedule="ZeroBubble")
    large, small = (replace(found, global_batch_size=size) for size in (2**31 - 4, 400))
    for rank in pipeline_ranks(small):
        assert fullest_moments(large, rank) == fullest_moments(small, rank)
