from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.model.attend import PackedAttend
from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.kernels.ops import Ops
from testing.model.transformers_twin import find, twin

LENGTHS = [17, 5, 17, 40]


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens_T, positions_T and cu_seqlens of four sequences."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 96, (sum(LENGTHS),), generator=generator)
    return tokens, torch.cat([torch.arange(length) for length in LENGTHS]), torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_and_gradients_equal_those_of_transformers(
    config: ModelConfig, make_decoder: Callable[..., Decoder], deterministic: bool
) -> None:
    decoder = make_decoder(config, deterministic=deterministic)
    model = twin(decoder)
    tokens, positions, cu_seqlens = packed()
    hidden = decoder(tokens, positions, PackedAttend(decoder.ops, "auto", cu_seqlens))
    logits = decoder.logits(hidden)
    expected = torch.cat([model(part[None]).logits[0] for part in tokens.split(LENGTHS)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    weights = (torch.arange(len(tokens)) % 3 > 0).float()
    targets = tokens.roll(-1)
    decoder.cross_entropy(hidden, targets, weights).loss_sum.div(weights.sum()).backward()
    (F.cross_entropy(expected, targets, reduction="none") * weights).sum().div(weights.sum()).backward()
    for part in decoder.named_parts():
        assert part.parameter.grad is not None
        ours = part.parameter.grad[part.row_start : part.row_end]
        torch.testing.assert_close(
            ours, find(model, part.hf_name, grad=True)[1], rtol=0, atol=1e-5, msg=partial("{}: {}".format, part.hf_name)
        )


def test_bfloat16_stays_close_to_float32(config: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    exact, rounded = make_decoder(config), make_decoder(config, dtype=torch.bfloat16)
    tokens, positions, cu_seqlens = packed()
    results = []
    for decoder in (exact, rounded):
        loss = decoder.cross_entropy(
            decoder(tokens, positions, PackedAttend(decoder.ops, "auto", cu_seqlens)), tokens, torch.ones(len(tokens))
        )
        loss.loss_sum.backward()
        results.append(loss.loss_sum.item() / len(tokens))
    assert all(
        parameter.grad is not None and parameter.grad.dtype is torch.bfloat16 for parameter in rounded.parameters()
    )
    assert results[1] == pytest.approx(results[0], rel=0.03)


def test_slices_of_layers_give_what_the_whole_gives(llama: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    whole = make_decoder(llama)
    tokens, positions, cu_seqlens = packed()
    attend = PackedAttend(whole.ops, "auto", cu_seqlens)
    first, last = (Decoder(llama, Ops(), layers=layers) for layers in (range(1), range(1, 2)))
    source = {part.hf_name: part.local() for part in whole.named_parts()}
    for stage in (first, last):
        for part in stage.named_parts():
            part.local().copy_(source[part.hf_name])
    x, update = first.blocks[0](first.embed(tokens), None, positions, attend)
    x, update = last.blocks[0](x, update, positions, attend)
    assert torch.equal(last.logits(last.norm(x, update)), whole.logits(whole(tokens, positions, attend)))
    names = [part.hf_name for stage in (first, last) for part in stage.named_parts()]
    assert sorted(names) == sorted(source)


def test_slices_of_a_tied_model_share_its_table(qwen3: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    tied = replace(qwen3, tie_embeddings=True)
    whole, first, last = (
        make_decoder(tied),
        Decoder(tied, Ops(), layers=range(1)),
        Decoder(tied, Ops(), layers=range(1, 2)),
    )
    source = {part.hf_name: part.local() for part in whole.named_parts()}
    parts = [part for stage in (first, last) for part in stage.named_parts()]
    for part in parts:
        part.local().copy_(source[part.hf_name])
    tokens, positions, cu_seqlens = packed()
    attend = PackedAttend(whole.ops, "auto", cu_seqlens)
    x, update = first.blocks[0](first.embed(tokens), None, positions, attend)
    x, update = last.blocks[0](x, update, positions, attend)
    assert torch.equal(last.logits(last.norm(x, update)), whole.logits(whole(tokens, positions, attend)))
    assert [part.hf_name for part in parts if part.is_copy] == ["model.embed_tokens.weight"]
    assert sorted(part.hf_name for part in parts if not part.is_copy) == sorted(source)
    assert not any(part.is_copy for part in whole.named_parts())


WINDOWS = {"architecture": "qwen2", "sliding_window": 9, "max_window_layers": 3}
EVERY_THIRD = {"architecture": "qwen3-moe", "num_experts": 2, "num_experts_per_token": 1, "decoder_sparse_step": 3}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        pytest.param({}, [0, 1], id="all alike"),
        pytest.param(
            {"architecture": "qwen2", "sliding_window": 9, "max_window_layers": 3}, [0, 1, 3, 4], id="windows"
        ),
        pytest.param(EVERY_THIRD, [0, 1, 2, 5], id="experts"),
    ],
)
def test_the_first_two_blocks_of_each_kind_stand_for_all(
    llama: ModelConfig, changes: dict[str, Any], chosen: list[int]
) -> None:
    decoder = Decoder(replace(llama, num_layers=6, **changes), Ops())
    computed: list[int] = []
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda block, _: computed.append(block.layer))
    tokens, positions, cu_seqlens = packed()
    attend: Any = PackedAttend(decoder.ops, "auto", cu_seqlens)
    decoder.stage(PartOfPass(tokens, positions, attend), blocks=decoder.blocks_of_each_kind())
    assert computed == chosen


def test_parts_cover_every_parameter_once(config: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(config)
    parts = list(decoder.named_parts())
    assert len({part.hf_name for part in parts}) == len(parts)
    assert (
        sum(part.num_elements for part in parts)
        == config.num_parameters
        == sum(p.numel() for p in decoder.parameters())
    )
    for name, parameter in decoder.named_parameters():
        rows = [(part.row_start, part.row_end) for part in parts if part.parameter_name == name]
        assert [begin for begin, _ in rows] == [0, *(end for _, end in rows[:-1])]
        assert rows[-1][1] == parameter.shape[0]


def test_starting_weights_depend_on_the_seed_and_the_name_only(llama: ModelConfig) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        decoder = Decoder(llama, Ops())
        decoder.init_weights(seed)
        return {part.hf_name: part.local() for part in decoder.named_parts()}

    once, again, other = start(1), start(1), start(2)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["lm_head.weight"], other["lm_head.weight"])
    assert once["lm_head.weight"].std().item() == pytest.approx(llama.initializer_range, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_logits_and_end_the_parts_table(
    config: ModelConfig, make_decoder: Callable[..., Decoder], dtype: torch.dtype
) -> None:
    decoder = make_decoder(config, dtype=dtype)
    tokens, positions, cu_seqlens = packed()
    with torch.inference_mode():
        attend = PackedAttend(decoder.ops, "auto", cu_seqlens)
        plain = decoder.logits(decoder(tokens, positions, attend))
        decoder.pack_weights()
        tolerance = 1e-5 if dtype is torch.float32 else 0.5
        torch.testing.assert_close(decoder.logits(decoder(tokens, positions, attend)), plain, rtol=0, atol=tolerance)
    with pytest.raises(ValueError, match="packed for serving"):
        list(decoder.named_parts())


def test_recomputed_blocks_give_the_same_gradients(llama: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    tokens, positions, cu_seqlens = packed()
    gradients = []
    for recompute in (False, True):
        decoder = make_decoder(llama)
        attend = PackedAttend(decoder.ops, "auto", cu_seqlens)
        x, update = decoder.embed(tokens), None
        for block in decoder.blocks:
            x, update = (
                torch.utils.checkpoint.checkpoint(block, x, update, positions, attend, use_reentrant=False)
                if recompute
                else block(x, update, positions, attend)
            )
        decoder.cross_entropy(decoder.norm(x, update), tokens, torch.ones(len(tokens))).loss_sum.backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_aux_keeps_the_first_value_of_a_name() -> None:
    aux = Aux()
    for layer, number in ((1, 1.0), (0, 2.0), (1, 3.0)):
        aux.put(layer, "loss", torch.tensor(number))
    assert [tensor.item() for tensor in aux.named("loss")] == [2.0, 1.0]
