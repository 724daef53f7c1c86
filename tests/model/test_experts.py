"""Experts: what leaves through `aux`, no dropped token, recompute, and the grouped product's twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from stoker.model.attend import PackedAttend
from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.experts import BALANCE, TOKENS, Experts, Z, note_routing
from stoker.model.kernels import reference
from stoker.model.kernels.expert_rows import Routes, sort_rows
from stoker.model.kernels.ops import Ops
from tests.model.conftest import CONFIGS

SPARSE = CONFIGS["qwen3-moe"]
TOKENS_T = torch.arange(40) * 13 % 96
POSITIONS_T = torch.cat((torch.arange(25), torch.arange(15)))
BOUNDS = torch.tensor([0, 25, 40])


def test_the_balance_loss_is_that_of_transformers() -> None:
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    aux, routes = Aux({BALANCE: 2.5, Z: 0.5}), reference.route(logits, 2, True)
    weights = note_routing(aux, 3, logits, routes).weights
    (ours,), (z,) = aux.named(BALANCE), aux.named(Z)
    theirs = load_balancing_loss_func((logits,), 6, 2)
    assert isinstance(theirs, Tensor)
    their_z = (logits.exp().sum(-1).log() ** 2).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(z, their_z, rtol=1e-6, atol=0)
    assert torch.equal(weights, routes.weights)
    outer = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((weights * outer).sum(), logits, retain_graph=True)[0]
    wanted = torch.autograd.grad((routes.weights * outer).sum() + 2.5 * theirs + 0.5 * their_z, logits)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_every_choice_of_every_token_is_counted_and_only_layers_with_experts_report() -> None:
    config = CONFIGS["qwen3-moe, plain weights, every second layer"]
    decoder, aux = Decoder(config, Ops()), Aux()
    decoder.init_weights(1)
    decoder(TOKENS_T, POSITIONS_T, PackedAttend(decoder.ops, "auto", BOUNDS), aux)
    assert config.expert_layers == (1,)
    assert {layer for layer, _ in aux.values} == {1}
    assert int(aux.named(TOKENS)[0].sum()) == 40 * 2


def test_an_even_router_has_a_balance_loss_of_the_number_of_choices() -> None:
    aux = Aux()
    experts_TK = torch.stack([torch.arange(12) % 6, (torch.arange(12) + 1) % 6], 1)
    note_routing(aux, 0, torch.zeros(12, 6), Routes(torch.ones(12, 2), experts_TK))
    assert aux.named(BALANCE)[0].item() == pytest.approx(2.0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_losses_of_the_router_have_the_same_gradients_when_blocks_are_computed_again(deterministic: bool) -> None:
    results = []
    for recompute in (False, True):
        decoder, aux = Decoder(SPARSE, Ops(deterministic=deterministic)), Aux({BALANCE: 3.0, Z: 3.0})
        decoder.init_weights(2)
        attend = PackedAttend(decoder.ops, "auto", BOUNDS)
        x, update = decoder.embed(TOKENS_T), None
        for block in decoder.blocks:
            x, update = (
                torch.utils.checkpoint.checkpoint(block, x, update, POSITIONS_T, attend, aux, use_reentrant=False)
                if recompute
                else block(x, update, POSITIONS_T, attend, aux)
            )
        loss = decoder.cross_entropy(decoder.norm(x, update), TOKENS_T, torch.ones(40)).loss_sum
        loss.backward()
        results.append(
            (
                torch.stack(aux.named(BALANCE) + aux.named(Z)).tolist(),
                [parameter.grad for parameter in decoder.parameters()],
            )
        )
    assert results[0][0] == results[1][0]
    assert all(
        torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True) if a is not None and b is not None
    )


def naive(experts: Experts, x_TD: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Compute one token at a time, each expert by its tensors in the files."""
    rows = []
    for x_D in x_TD:
        probabilities = torch.softmax(parts["gate.weight"] @ x_D, -1)
        chosen = sorted(range(experts.num_experts), key=lambda expert: -probabilities[expert].item())[:2]
        total = sum(probabilities[expert] for expert in chosen)
        y_D = torch.zeros_like(x_D)
        for expert in chosen:
            gate, up, down = (parts[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            y_D = y_D + probabilities[expert] / total * (down @ (torch.nn.functional.silu(gate @ x_D) * (up @ x_D)))
        rows.append(y_D)
    return torch.stack(rows)


def test_experts_equal_a_loop_over_tokens_with_gradients(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(SPARSE)
    experts = decoder.get_submodule("blocks.0.feed_forward")
    assert isinstance(experts, Experts)
    x_TD = torch.randn(9, SPARSE.hidden_size, generator=torch.Generator().manual_seed(4), requires_grad=True)
    prefix = "model.layers.0.mlp."
    parts = list(experts.parts("blocks.0.feed_forward"))
    leaves = {part.hf_name.removeprefix(prefix): part.local().clone().requires_grad_() for part in parts}
    ours, theirs = experts.compute(x_TD), naive(experts, x_TD, leaves)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    outer = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5))
    expected = torch.autograd.grad(theirs, [x_TD, *leaves.values()], outer, allow_unused=True)
    found = torch.autograd.grad(ours, x_TD, outer, retain_graph=True)[0]
    torch.testing.assert_close(found, expected[0], rtol=0, atol=2e-5)
    ours.backward(outer)
    for part, wanted in zip(parts, expected[1:], strict=True):
        assert part.parameter.grad is not None
        grad = part.parameter.grad[part.row_start : part.row_end]
        torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted is None else wanted, rtol=0, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), tokens=st.integers(0, 20), experts=st.integers(1, 7))
def test_rows_are_sorted_by_expert_and_found_again(data: st.DataObject, tokens: int, experts: int) -> None:
    choices = data.draw(st.integers(1, experts))
    chosen = [data.draw(st.permutations(range(experts)))[:choices] for _ in range(tokens)]
    experts_TK = torch.tensor(chosen, dtype=torch.int64).view(tokens, choices)
    rows = sort_rows(experts_TK, experts)
    flat = experts_TK.flatten()
    assert flat[rows.sources].tolist() == sorted(flat.tolist())
    assert rows.sources[rows.places].tolist() == list(range(tokens * choices))
    assert rows.ends.tolist() == [int((flat <= expert).sum()) for expert in range(experts)]
    for begin, end in zip([0, *rows.ends.tolist()], rows.ends.tolist(), strict=False):
        assert rows.sources[begin:end].tolist() == sorted(rows.sources[begin:end].tolist())


def test_shapes_that_do_not_fit_are_refused() -> None:
    ops, rows = Ops(), sort_rows(torch.tensor([[0, 1]]), 2)
    with pytest.raises(ValueError, match="route: 3 experts out of logits"):
        ops.route(torch.zeros(1, 2), 3, True)
    with pytest.raises(ValueError, match="the logits must be float32"):
        ops.route(torch.zeros(1, 2, dtype=torch.bfloat16), 1, True)
    with pytest.raises(ValueError, match=r"dispatch: x \(2, 4\) does not fit 2 rows"):
        ops.dispatch(torch.zeros(2, 4), rows)
    with pytest.raises(ValueError, match=r"grouped_linear: weight \(6, 5\) does not fit x \(2, 4\) and 2 experts"):
        ops.grouped_linear(torch.zeros(2, 4), torch.zeros(6, 5), rows.ends)
    with pytest.raises(ValueError, match=r"combine: y \(3, 4\)"):
        ops.combine(torch.zeros(3, 4), torch.zeros(1, 2), rows)


MIXTRAL = CONFIGS["mixtral"]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MIXTRAL, {"num_experts": None}, "num_experts and num_experts_per_token are needed for mixtral"),
        (MIXTRAL, {"num_experts": 5000}, "num_experts must be at most 4096, not 5000"),
        (MIXTRAL, {"num_experts_per_token": 7}, "must lie between 1 and num_experts 6, not 7"),
        (MIXTRAL, {"moe_intermediate_size": 8}, "moe_intermediate_size: mixtral has None there, got 8"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob: mixtral has True there"),
        (MIXTRAL, {"decoder_sparse_step": 2}, "decoder_sparse_step: mixtral has 1 there"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias: leave it out, because mixtral has none"),
        (MIXTRAL, {"max_window_layers": 1}, "max_window_layers: allowed with sliding_window and qwen2 or qwen3"),
        (SPARSE, {"mlp_only_layers": (2,)}, r"mlp_only_layers: \[2\] are not all within 0..2"),
        (SPARSE, {"router_z_loss_coef": -1.0}, "the router's loss coefficients >= 0"),
        (CONFIGS["llama"], {"num_experts": 4}, "num_experts: llama has no experts; allowed with mixtral, qwen3-moe"),
        (CONFIGS["llama"], {"decoder_sparse_step": 2}, "mlp_only_layers or decoder_sparse_step: llama has no experts"),
        (CONFIGS["llama"], {"sliding_window": 4}, "sliding_window: llama has none, got 4; allowed with mistral, qwen2"),
        (CONFIGS["mistral"], {"sliding_window": 0}, "sliding_window must be >= 1, not 0"),
        (CONFIGS["qwen2"], {"attention_bias": True}, "qwen2 always has biases on q, k and v alone"),
    ],
)
def test_a_configuration_that_the_family_does_not_have_is_refused(
    config: ModelConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)  # type: ignore[arg-type]


def test_active_parameters_are_those_that_one_token_meets() -> None:
    expert = 3 * SPARSE.hidden_size * SPARSE.expert_size
    assert SPARSE.num_parameters - SPARSE.num_active_parameters == SPARSE.num_layers * (6 - 2) * expert
    assert CONFIGS["llama"].num_active_parameters == CONFIGS["llama"].num_parameters
