"""Whole experts dealt out over ranks: the ranks' parts add up to what one rank computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stoker.model.experts import Experts, even_part, expert_share, own_experts
from stoker.model.kernels.expert_rows import sort_own_rows
from stoker.model.kernels.ops import Ops
from tests.model.conftest import CONFIGS

SPARSE = CONFIGS["qwen3-moe"]


def whole_layer() -> Experts:
    torch.manual_seed(3)
    layer = Experts(SPARSE, 0, Ops("reference"), dtype=torch.float32, device=torch.device("cpu"), group=None)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


def part_of(layer: Experts, run: int, runs: int, cut: int, cuts: int) -> Experts:
    """The layer of a rank with one run of the experts, and of these one slice of their width."""
    part = whole_layer()
    part.own, part.is_run = own_experts(layer.num_experts, run, runs), True
    width = even_part(layer.width, cuts, "width")
    columns = slice(cut * width, (cut + 1) * width)
    gate_up = layer.gate_up.view(layer.num_experts, 2, layer.width, layer.hidden)
    down = layer.down.view(layer.num_experts, layer.hidden, layer.width)
    part.gate_up = nn.Parameter(gate_up[part.own.start : part.own.stop, :, columns].reshape(-1, layer.hidden))
    part.down = nn.Parameter(down[part.own.start : part.own.stop, :, columns].reshape(-1, width).contiguous())
    part.local_width = width
    return part


@pytest.mark.parametrize(("runs", "cuts"), [(2, 1), (3, 1), (6, 1), (2, 2), (1, 2)])
def test_parts_add_up_to_the_whole(runs: int, cuts: int) -> None:
    layer = whole_layer()
    x_TD = torch.randn(11, layer.hidden)
    parts = [part_of(layer, run, runs, cut, cuts) for run in range(runs) for cut in range(cuts)]
    with torch.inference_mode():
        total_TD = torch.stack([part.compute(x_TD) for part in parts]).sum(0)
        torch.testing.assert_close(total_TD, layer.compute(x_TD), rtol=1e-5, atol=1e-6)


class Careless(Ops):
    """Leaves numbers that are not finite behind the last expert's rows."""

    def grouped_linear(self, x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
        y_SO = super().grouped_linear(x_SD, weight_RD, ends_E)
        y_SO[int(ends_E[-1]) :] = float("nan")
        return y_SO


def test_what_no_expert_has_computed_does_not_count() -> None:
    layer = whole_layer()
    x_TD = torch.randn(5, layer.hidden)
    with torch.inference_mode():
        for run in range(3):
            part = part_of(layer, run, 3, 0, 1)
            expected_TD = part.compute(x_TD)
            part.ops = Careless("reference")
            assert torch.equal(part.compute(x_TD), expected_TD)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), experts=st.integers(1, 9), tokens=st.integers(1, 8), choices=st.integers(1, 3))
def test_own_rows_come_first_and_in_order(data: st.DataObject, experts: int, tokens: int, choices: int) -> None:
    begin = data.draw(st.integers(0, experts - 1))
    own = range(begin, data.draw(st.integers(begin + 1, experts)))
    numbers = st.lists(st.integers(0, experts - 1), min_size=tokens * choices, max_size=tokens * choices)
    chosen = torch.tensor(data.draw(numbers)).view(tokens, choices)
    rows, ends = sort_own_rows(chosen, own)
    sorted_S = chosen.flatten()[rows.sources].tolist()
    assert len(ends) == len(own)
    first = 0
    for expert, end in zip(own, ends.tolist(), strict=True):
        assert sorted_S[first:end] == [expert] * chosen.flatten().tolist().count(expert)
        first = end
    assert not set(sorted_S[first:]) & set(own)
    assert torch.equal(rows.sources[rows.places], torch.arange(tokens * choices))


def test_one_rank_without_runs_has_all() -> None:
    assert expert_share(None, None, 1) == (0, 1, 0, 1)
    with pytest.raises(ValueError, match=r"tensor parallel size: 1 cannot be cut into 2 parts: 1 % 2 = 1"):
        expert_share(None, None, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_fused_kernels_add_up_also_from_a_graph(dtype: torch.dtype) -> None:
    layer = whole_layer()
    parts = [part_of(layer, run, 2, 0, 1).to("cuda", dtype) for run in range(2)]
    whole = whole_layer().to("cuda", dtype)
    for module in (whole, *parts):
        module.ops = Ops("fused")
    x_TD = torch.randn(24, layer.hidden, device="cuda").to(dtype)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (2e-2, 2e-2)
    with torch.inference_mode():
        expected_TD = whole.compute(x_TD)
        torch.testing.assert_close(parts[0].compute(x_TD) + parts[1].compute(x_TD), expected_TD, rtol=rtol, atol=atol)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            total_TD = parts[0].compute(x_TD) + parts[1].compute(x_TD)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        x_TD.copy_(torch.randn_like(x_TD))
        graph.replay()
        torch.testing.assert_close(total_TD, whole.compute(x_TD), rtol=rtol, atol=atol)
