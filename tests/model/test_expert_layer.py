"""A layer of experts in a few kernels against the single operations, its order of rows and every tiling."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stoker.model.aux import Aux
from stoker.model.experts import Experts, own_experts
from stoker.model.hosted_experts import HostedExperts
from stoker.model.kernels.expert_rows import sort_rows
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.ops import Ops
from stoker.model.lora import LoraSettings
from stoker.model.parallel import Norm
from testing.model.interpreted import Interpreted
from tests.model.conftest import CONFIGS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}
EPS = 1e-6


class Shape(NamedTuple):
    tokens: int
    hidden: int
    experts: int
    choices: int
    width: int


SMALL = [Shape(1, 40, 5, 3, 10), Shape(2, 24, 8, 2, 6), Shape(5, 72, 6, 2, 40), Shape(40, 32, 3, 2, 32)]
LARGE = [
    *(Shape(tokens, 2048, 128, 8, 768) for tokens in (1, 2, 8, 33, 256, 3000)),
    Shape(1, 4096, 8, 2, 14336),
    Shape(64, 4096, 8, 2, 3584),
    Shape(17, 1000, 9, 3, 250),
]


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    size: float = shape[-1] ** -0.5
    return (torch.randn(shape, device=device) * size).to(dtype)


def layer(shape: Shape, dtype: torch.dtype, device: str, normalise: bool = True) -> ExpertWeights:
    _, hidden, experts, choices, width = shape
    router = fresh(experts, hidden, dtype=F32, device=device) * 4
    router[0] += 0.5 * router[0].sign()  # uneven: some experts have many rows, some none
    return ExpertWeights(
        router.to(dtype),
        fresh(experts * 2 * width, hidden, dtype=dtype, device=device),
        fresh(experts * hidden, width, dtype=dtype, device=device),
        choices,
        normalise,
    )


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


def twin(x_TD: Tensor, weights: ExpertWeights, experts_TK: Tensor) -> Tensor:
    """Each pair alone, in float64, with the experts that were chosen."""
    x, router, gate_up, down = (tensor.double() for tensor in (x_TD, *weights[:3]))
    probabilities_TE = torch.softmax(x @ router.t(), -1)
    weights_TK = probabilities_TE.gather(1, experts_TK)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True) if weights.normalise else weights_TK
    y_TD = torch.zeros_like(x)
    for expert in experts_TK.unique().tolist():
        token, choice = torch.nonzero(experts_TK == expert, as_tuple=True)
        rows = x[token] @ gate_up.view(weights.num_experts, -1, weights.hidden)[expert].t()
        gate, up = rows.chunk(2, -1)
        result = (gate * torch.sigmoid(gate) * up) @ down.view(weights.num_experts, weights.hidden, -1)[expert].t()
        y_TD.index_add_(0, token, result * weights_TK[token, choice, None])
    return y_TD


def check_choice(found_TK: Tensor, x_TD: Tensor, weights: ExpertWeights) -> None:
    """Check that no expert that was left out is more probable, but for rounding, and that the order falls."""
    logits_TE = x_TD.double() @ weights.router.double().t()
    chosen_TK = logits_TE.gather(1, found_TK)
    assert all(len(set(row)) == weights.num_choices for row in found_TK.tolist())
    assert (chosen_TK.diff(dim=1) < 1e-4).all()
    left_TE = logits_TE.scatter(1, found_TK, float("-inf"))
    assert (left_TE.amax(1) - chosen_TK.amin(1) < 1e-4).all()


def check_layer(device: str, shape: Shape, dtype: torch.dtype, normalise: bool) -> None:
    """Check both entries, for as many tokens as there are and pair by pair, and that a second call has equal bits."""
    from stoker.model.kernels.fused.expert_layer import MAX_PAIR_TOKENS
    from stoker.model.kernels.fused.expert_pairs import pair_products
    from stoker.model.kernels.fused.expert_router import route_few, route_rows, route_whole

    torch.manual_seed(3)
    ops, weights = Ops("fused"), layer(shape, dtype, device, normalise)
    x, update = (fresh(shape.tokens, shape.hidden, dtype=dtype, device=device) * 3 for _ in range(2))
    norm = 1 + fresh(shape.hidden, dtype=dtype, device=device)
    choices = route_rows(x, weights)
    check_choice(choices.experts.long(), x, weights)
    whole_choices = route_whole(x, weights)
    check_choice(whole_choices.experts.long(), x, weights)
    close(whole_choices.weights, choices.weights, dtype)
    if shape.tokens <= MAX_PAIR_TOKENS:
        choices = route_few(x, None, weights)[0]
        check_choice(choices.experts.long(), x, weights)
        close(pair_products(x, choices, weights), twin(x, weights, choices.experts.long()), dtype)
    whole = ops.experts(x, weights)
    assert whole is not None
    close(whole, twin(x, weights, route_rows(x, weights).experts.long()), dtype)
    again = ops.experts(x, weights)
    assert again is not None
    assert torch.equal(whole, again)
    for added in (None, update):
        found = ops.norm_experts(x, added, norm, EPS, weights)
        assert found is not None
        normed, total = ops.norm_of_sum(x, added, norm, EPS)
        assert torch.equal(found[1], total)
        expected = ops.experts(normed, weights)
        assert expected is not None
        close(found[0], expected, dtype)


def check_padding(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """Check that rows without a slot have no experts on any rank, and that the results of the others stay."""
    from stoker.model.kernels.fused.expert_order import order_rows
    from stoker.model.kernels.fused.expert_router import route_rows, route_whole

    torch.manual_seed(4)
    weights, x = layer(shape, dtype, device), fresh(shape.tokens, shape.hidden, dtype=dtype, device=device) * 3
    norm = 1 + fresh(shape.hidden, dtype=dtype, device=device)
    slots = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    slots[shape.tokens // 3 :: 2] = -1
    is_real = slots >= 0
    free = route_rows(x, weights).experts
    for choices in (route_rows(x, weights, slots), route_whole(x, weights, slots)):
        assert (choices.experts[~is_real] == weights.num_experts).all()
        assert torch.equal(choices.experts[is_real], free[is_real])
    order = order_rows(choices.experts, weights.num_own)
    assert int(order.ends[-1]) == int(is_real.sum()) * weights.num_choices
    found, whole = (
        Ops("fused").experts(x, weights, slots),
        Ops("fused").norm_experts(x, None, norm, EPS, weights, slots),
    )
    assert found is not None
    assert whole is not None
    close(found[is_real], twin(x, weights, free.long())[is_real], dtype)
    assert not found[~is_real].any()
    expected = Ops("fused").norm_experts(x, None, norm, EPS, weights)
    assert expected is not None
    close(whole[0][is_real], expected[0][is_real], dtype)


def check_runs(device: str, shape: Shape, dtype: torch.dtype, runs: tuple[int, ...]) -> None:
    """Check that the parts of ranks which hold a run of the experts each add up to the whole."""
    ops, weights = Ops("fused"), layer(shape, dtype, device)
    x = fresh(shape.tokens, shape.hidden, dtype=dtype, device=device) * 3
    whole, total = ops.experts(x, weights), torch.zeros(shape.tokens, shape.hidden, dtype=F32, device=device)
    assert whole is not None
    for first, end in itertools.pairwise((0, *runs, shape.experts)):
        gate_up, down = (part.view(shape.experts, -1, part.shape[1])[first:end].flatten(0, 1) for part in weights[1:3])
        part = ops.experts(x, weights._replace(gate_up=gate_up, down=down, first=first))
        assert part is not None
        total += part.float()
    close(total, whole, dtype)


def check_slots(device: str, shape: Shape, dtype: torch.dtype, num_slots: int, own: range) -> None:
    """Check that experts in host memory give the bits of those on the device, when they are loaded and when there."""
    from stoker.model.kernels.fused.expert_layer import suits_pairs

    ops, whole = Ops("fused"), layer(shape, dtype, device)
    gate_up, down = (
        part.view(shape.experts, -1, part.shape[1])[own.start : own.stop].flatten(0, 1) for part in whole[1:3]
    )
    weights = whole._replace(gate_up=gate_up, down=down, first=own.start)
    host_gate_up, host_down = (part.cpu().pin_memory() if device == "cuda" else part for part in (gate_up, down))
    hosted = HostedExperts(host_gate_up, host_down, own, shape.experts, num_slots, torch.device(device))
    in_host = weights._replace(gate_up=host_gate_up, down=host_down, hosted=hosted)
    norm = 1 + fresh(shape.hidden, dtype=dtype, device=device)
    for tokens in (shape.tokens, 1, 1):
        x = fresh(tokens, shape.hidden, dtype=dtype, device=device) * 3
        expected, found = (ops.norm_experts(x, x, norm, EPS, one) for one in (weights, in_host))
        assert expected is not None
        assert found is not None
        assert torch.equal(found[1], expected[1])
        if suits_pairs(x, weights) and num_slots < tokens * shape.choices:  # by rounds, so not pair by pair
            close(found[0], expected[0], dtype)
        else:
            assert torch.equal(found[0], expected[0])
    assert hosted.meter.misses > 0


def check_module(tokens: int, runs: int = 1) -> None:
    """Check that a layer of the model takes this way without gradient, and equals itself with other kernels.

    `runs`: of which a rank that holds the second one computes its part.
    """
    results = []
    for ops in (Ops("fused"), Ops()):
        torch.manual_seed(4)
        made: dict[str, Any] = {"dtype": F32, "device": torch.device("cpu"), "group": None}
        config = CONFIGS["qwen3-moe"]
        experts, norm = Experts(config, 0, ops, **made), Norm("norm", config.hidden_size, EPS, ops, **made)
        for parameter in (*experts.parameters(), norm.weight):
            torch.nn.init.normal_(parameter, std=0.4).requires_grad_(False)
        if runs > 1:
            take_run(experts, 1, runs)
        assert experts.is_alone(None)
        x, attended = torch.randn(2, tokens, config.hidden_size)
        assert (ops.experts(x, experts.weights) is None) is (ops.kernels == "reference")
        results.append((*experts(norm, x, attended), experts.compute(x)))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, F32)


def take_run(experts: Experts, run: int, runs: int) -> None:
    """Make a layer that of a rank with one run of the experts."""
    experts.own, experts.is_run = own_experts(experts.num_experts, run, runs), True
    gate_up, down = (part.view(experts.num_experts, -1, part.shape[1]) for part in (experts.gate_up, experts.down))
    own = slice(experts.own.start, experts.own.stop)
    experts.gate_up, experts.down = (
        torch.nn.Parameter(part[own].flatten(0, 1), requires_grad=False) for part in (gate_up, down)
    )


def check_order(device: str, num_rows: int, num_experts: int) -> None:
    """Check the order against the sort, with experts without rows and a full one."""
    from stoker.model.kernels.fused.expert_order import order_rows

    experts_TK = torch.randint(0, num_experts, (num_rows // 2, 2), device=device) * torch.randint(
        0, 2, (num_rows // 2, 2), device=device
    )
    found, expected = order_rows(experts_TK.int(), num_experts), sort_rows(experts_TK, num_experts)
    some = order_rows(experts_TK.int(), 2, 1)
    begin, middle, end = expected.ends[:3].tolist()
    assert some.ends.tolist() == [middle - begin, end - begin]
    assert torch.equal(some.sources[: end - begin].long(), expected.sources[begin:end])
    assert torch.equal(found.sources.long(), expected.sources)
    assert torch.equal(found.ends, expected.ends)


def check_tiles(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """Check each way through the grouped products: by expert and by tile, described and not."""
    from stoker.model.kernels.fused.expert_order import order_rows
    from stoker.model.kernels.fused.expert_products import grouped_products
    from stoker.model.kernels.fused.expert_router import route_rows
    from stoker.model.kernels.fused.expert_tiles import ExpertTile, LayerTiles

    weights = layer(shape, dtype, device)
    x = fresh(shape.tokens, shape.hidden, dtype=dtype, device=device) * 3
    choices = route_rows(x, weights)
    order = order_rows(choices.experts, weights.num_experts)
    expected = twin(x, weights, choices.experts.long())
    for mapped in (False, True):
        for described in (False, True):
            tile = ExpertTile(16, 64, 32, 4, 2, described, mapped)
            close(grouped_products(x, choices, order, weights, LayerTiles(tile, tile)), expected, dtype)


def check_odd_logits(device: str) -> None:
    """Check that ties go to the lower expert, and that logits which are no numbers choose experts that exist."""
    from stoker.model.kernels.fused.expert_router import route_few, route_rows

    weights = layer(Shape(1, 16, 6, 2, 8), F32, device)
    for value, expected in ((0.0, [[0, 1]] * 2), (float("nan"), None)):
        x = torch.full((2, 16), value, device=device)
        for choices in (route_rows(x, weights), route_few(x, None, weights)[0]):
            found = choices.experts.tolist()
            assert expected in (None, found)
            assert all(0 <= expert < 6 for row in found for expert in row)


def test_interpreted_layers_of_experts_equal_their_twins(interpreted: Interpreted) -> None:
    interpreted.run(
        [
            *((check_layer, ("cpu", shape, F32, number % 2 == 0)) for number, shape in enumerate(SMALL)),
            (check_layer, ("cpu", SMALL[2], F16, True)),
            (check_tiles, ("cpu", SMALL[3], F32)),
            *((check_padding, ("cpu", shape, F32)) for shape in (SMALL[2], SMALL[3])),
            (check_runs, ("cpu", SMALL[0], F32, (2, 4))),
            (check_runs, ("cpu", SMALL[2], F32, (1,))),
            *((check_slots, ("cpu", SMALL[1], F32, slots, own)) for slots, own in ((2, range(8)), (2, range(3, 8)))),
            *((check_module, (tokens, runs)) for tokens, runs in ((1, 1), (5, 1), (1, 2), (5, 3))),
            (check_order, ("cpu", 70, 5)),
            (check_order, ("cpu", 5000, 3)),
            (check_odd_logits, ("cpu",)),
        ]
    )  # fmt: skip


def test_other_kernels_and_gradients_have_no_whole_layer() -> None:
    shape = Shape(3, 16, 4, 2, 8)
    weights, x = layer(shape, F32, "cpu"), torch.randn(3, 16)
    for deterministic in (False, True):
        assert Ops(deterministic=deterministic).experts(x, weights) is None
        assert Ops(deterministic=deterministic).norm_experts(x, None, torch.ones(16), EPS, weights) is None


def test_adapters_and_losses_keep_a_layer_from_the_whole() -> None:
    made: dict[str, Any] = {"dtype": F32, "device": torch.device("cpu"), "group": None}
    experts = Experts(CONFIGS["qwen3-moe"], 0, Ops(), **made)
    assert experts.is_alone(None)
    assert not experts.is_alone(Aux())
    experts.add_adapters(LoraSettings(rank=2, alpha=2.0, targets=("gate_proj",)))
    assert not experts.is_alone(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down": torch.zeros(3, 8)}, "gate and up"),
        ({"num_choices": 5}, "5 experts of a token, of 4"),
        ({"router": torch.zeros(4, 15)}, "do not fit"),
        ({"first": 1}, "4 experts from 1 on, of 4"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    weights = layer(Shape(3, 16, 4, 2, 8), F32, "cpu")._replace(**change)
    with pytest.raises(ValueError, match=message):
        Ops().experts(torch.randn(3, 16), weights)


@pytest.mark.parametrize("slots", [torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)])
def test_slots_that_do_not_fit_are_refused(slots: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="experts: slots"):
        Ops().experts(torch.randn(3, 16), layer(Shape(3, 16, 4, 2, 8), F32, "cpu"), slots)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, BF16) for shape in SMALL + LARGE),
        *((shape, dtype) for shape in SMALL + LARGE[2:3] for dtype in (F32, F16)),
    ],
    ids=str,
)
def test_layers_of_experts_equal_their_twins(shape: Shape, dtype: torch.dtype) -> None:
    check_layer("cuda", shape, dtype, True)
    check_layer("cuda", shape, dtype, False)


@pytest.mark.gpu
def test_tilings_orders_and_odd_logits_on_the_device() -> None:
    for shape in (SMALL[3], LARGE[3], LARGE[-1]):
        check_tiles("cuda", shape, BF16)
    for shape in (*LARGE[:1], *LARGE[3:5]):
        check_runs("cuda", shape, BF16, (32, 70))
    for shape in LARGE[3:6]:
        check_padding("cuda", shape, BF16)
    for shape in (LARGE[0], LARGE[3], LARGE[4]):
        for num_slots, own in ((128, range(128)), (20, range(128)), (5, range(32, 96))):
            check_slots("cuda", shape, BF16, num_slots, own)
    for num_rows in (2, 70, 5000, 131072):
        check_order("cuda", num_rows, 128)
    check_odd_logits("cuda")


@pytest.mark.gpu
def test_a_captured_layer_follows_its_inputs() -> None:
    """One graph, replayed with other tokens, routes them anew: nothing of the routing is fixed at capture."""
    ops, weights = Ops("fused"), layer(LARGE[3], BF16, "cuda")
    for tokens in (1, 33, 256):
        x = fresh(tokens, 2048, dtype=BF16, device="cuda")
        ops.experts(x, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.experts(x, weights)
        for _ in range(3):
            x.copy_(fresh(tokens, 2048, dtype=BF16, device="cuda"))
            graph.replay()
            expected = ops.experts(x, weights)
            assert captured is not None
            assert expected is not None
            assert torch.equal(captured, expected)
