"""The cut of layers into stages: even by cost, with embedding and output layer counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.pipeline.stage_cut import LayerCosts, cut_layers
from stoker.pod.plan.stage import layer_costs
from testing.pod.model_sizes import LLAMA_8B


def lengths(costs: LayerCosts, stages: int) -> list[int]:
    return [len(stage) for stage in cut_layers(costs, stages)]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        pytest.param(LayerCosts(layers=(1.0,) * 8), 4, [2, 2, 2, 2], id="even"),
        pytest.param(LayerCosts(layers=(1.0,) * 8, head=2.0), 2, [5, 3], id="a dear output layer"),
        pytest.param(LayerCosts(layers=(1.0,) * 7, head=1.0, embedding=1.0), 3, [2, 3, 2], id="both ends"),
        pytest.param(LayerCosts(layers=(4.0, 1.0, 1.0, 1.0, 1.0)), 2, [1, 4], id="measured layers"),
        pytest.param(LayerCosts(layers=(1.0,) * 3, head=50.0), 3, [1, 1, 1], id="never an empty stage"),
    ],
)
def test_cut(costs: LayerCosts, stages: int, expected: list[int]) -> None:
    assert lengths(costs, stages) == expected


def test_the_output_layer_of_an_8b_llama_is_worth_two_layers() -> None:
    costs = layer_costs(LLAMA_8B, 8192)
    assert lengths(costs, 4) == [8, 9, 9, 6]
    by_stage = costs.of_stages(cut_layers(costs, 4))
    assert max(by_stage) / (sum(by_stage) / 4) < 1.06


@given(
    layers=st.lists(st.floats(0.1, 9), min_size=1, max_size=7),
    head=st.floats(0, 9),
    embedding=st.floats(0, 9),
    data=st.data(),
)
def test_no_other_cut_has_a_cheaper_dearest_stage(
    layers: list[float], head: float, embedding: float, data: st.DataObject
) -> None:
    costs = LayerCosts(layers=tuple(layers), head=head, embedding=embedding)
    stages = data.draw(st.integers(1, len(layers)))
    cut = cut_layers(costs, stages)
    assert [layer for stage in cut for layer in stage] == list(range(len(layers)))
    others = [
        [range(start, stop) for start, stop in zip((0, *inner), (*inner, len(layers)), strict=True)]
        for inner in combinations(range(1, len(layers)), stages - 1)
    ]
    assert max(costs.of_stages(cut)) <= min(max(costs.of_stages(other)) for other in others) + 1e-9


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut into 3 pipeline stages"):
        cut_layers(LayerCosts(layers=(1.0, 1.0)), 3)


def test_layers_of_experts_cost_what_a_token_computes() -> None:
    """Two of eight experts: the output layer is worth half as many layers as beside one dense layer of that width."""
    sparse = replace(LLAMA_8B, num_experts=8, experts_per_token=2, expert_size=LLAMA_8B.intermediate_size)
    dense = layer_costs(LLAMA_8B, 8192)
    found = layer_costs(sparse, 8192)
    assert found.head == dense.head
    router = 6.0 * LLAMA_8B.hidden_size * 8
    assert found.layers[0] - dense.layers[0] == pytest.approx(6.0 * LLAMA_8B.feed_forward + router)
