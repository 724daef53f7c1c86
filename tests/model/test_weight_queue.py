"""Weight gradients that are put off: the same numbers as at once, by every set of kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.weight_queue import WeightQueue, set_weight_queue

TOKENS = 24


def gradients(decoder: Decoder) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}


def run(decoder: Decoder, queue: WeightQueue | None, *, recompute: bool) -> list[Tensor]:
    """Run a backward pass through the blocks; return the weights whose gradients were put off."""
    tokens = torch.arange(TOKENS)
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, 9, TOKENS], dtype=torch.int32))
    x, update = decoder.embed(tokens), None
    for block in decoder.blocks:
        x, update = (
            checkpoint(block, x, update, tokens, attend, use_reentrant=False)
            if recompute
            else block(x, update, tokens, attend)
        )
    loss = decoder.cross_entropy(decoder.norm(x, update), tokens, torch.ones(TOKENS)).loss_sum
    if queue is None:
        loss.backward()
        return []
    with queue.collect() as late:
        loss.backward()
    assert all(weight.grad is None for weight, _ in late)
    for weight, product in late:
        weight.backward(product())
    return [weight for weight, _ in late]


@pytest.mark.parametrize("deterministic", [False, True], ids=["reference", "deterministic"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_were_put_off_equal_those_at_once(
    qwen3: ModelConfig,
    make_decoder: Callable[..., Decoder],
    deterministic: bool,
    recompute: bool,
    dtype: torch.dtype,
) -> None:
    whole, split = (make_decoder(qwen3, deterministic=deterministic, dtype=dtype) for _ in range(2))
    queue = WeightQueue()
    for parameter in split.parameters():
        set_weight_queue(parameter, queue)
    run(whole, None, recompute=recompute)
    late = run(split, queue, recompute=recompute)
    assert len(late) == 4 * qwen3.num_layers  # the four products of each block; not norms, embedding and output layer
    for (name, ours), theirs in zip(gradients(split).items(), gradients(whole).values(), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs), name


def test_without_collecting_nothing_is_put_off(qwen3: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(qwen3)
    for parameter in decoder.parameters():
        set_weight_queue(parameter, WeightQueue())
    run(decoder, None, recompute=False)
    assert all(gradient is not None for gradient in gradients(decoder).values())
