"""All blocks in one call of C against the single calls, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.kernels.compiled.library import CompileError, load_library
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import Rotation
from stoker.model.lora import LoraSettings
from stoker.model.rotary import RotaryTable


def is_compilable() -> bool:
    try:
        load_library()
    except CompileError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_compilable(), reason="this machine has no C compiler")

SEQUENCES = [torch.arange(length) * step % 96 for length, step in ((60, 5), (20, 7), (18, 11))]


def has_blocks() -> bool:
    from stoker.model.kernels.compiled.kernels import PRODUCT

    return PRODUCT is not None and PRODUCT.has_blocks


def packed_copy(slow: Decoder, kernels: Any = "compiled") -> Decoder:
    copy = Decoder(slow.config, Ops(kernels), dtype=torch.bfloat16)
    copy.load_state_dict(slow.state_dict())
    copy.requires_grad_(False).pack_weights()
    return copy


def passes(server: Any) -> list[Tensor]:
    """Logprobs of prompts, of decodes of unlike lengths (two groups), of a decode alone, and of both kinds together."""
    tables = [server.table(len(sequence)) for sequence in SEQUENCES]
    starts = [56, 16, 14]
    chunks = list(zip(SEQUENCES, starts, tables, strict=True))
    steps = [[(sequence, 0, start, table) for sequence, start, table in chunks]]
    steps += [[(sequence, start + i, start + i + 1, table) for sequence, start, table in chunks] for i in range(2)]
    steps += [
        [(SEQUENCES[1], 18, 19, tables[1])],
        [(SEQUENCES[1], 19, 20, tables[1]), (SEQUENCES[2], 16, 18, tables[2])],
    ]
    return [torch.cat(server.step(step)) for step in steps]


def expected_blocks(config: ModelConfig) -> bool:
    """Whether the C kernels have one call for the blocks: dense ones of sizes that the product takes."""
    sizes = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    is_dense = not any(config.has_experts(layer) for layer in range(config.num_layers))
    return has_blocks() and is_dense and all(size % 16 == 0 for size in sizes)


def test_one_call_gives_the_bits_of_the_single_calls(
    config: ModelConfig, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    slow = make_decoder(config, dtype=torch.bfloat16)
    whole, single = packed_copy(slow), packed_copy(slow)
    assert (whole.prepared is not None) == expected_blocks(config)
    single.prepared = None
    ours, theirs = make_server(whole), make_server(single)
    for one, other in zip(passes(ours), passes(theirs), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(ours.cache.data, theirs.cache.data)


@torch.inference_mode()
def test_a_later_slice_of_the_layers_takes_an_update(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    server = make_server(packed_copy(make_decoder(llama, dtype=torch.bfloat16)))
    decoder = server.decoder
    if decoder.prepared is None:
        pytest.skip("this processor has no call for all blocks")
    server.step([(SEQUENCES[1], 0, 16, (table := server.table(20)))])
    server.step([(SEQUENCES[1], 16, 17, table)])  # leaves its plan behind
    x_TD, update_TD = torch.randn(2, 1, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    part = PartOfPass(SEQUENCES[1][16:17], torch.tensor([16]), server.attend)
    ours, theirs = decoder._in_one_call(x_TD, update_TD, part), decoder._computed(x_TD, update_TD, part, decoder.blocks)
    assert ours is not None
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@torch.inference_mode()
def test_a_pass_that_is_not_the_prepared_one_is_refused(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    server = make_server(packed_copy(make_decoder(llama, dtype=torch.bfloat16)))
    blocks = server.decoder.prepared
    if blocks is None:
        pytest.skip("this processor has no call for all blocks")
    server.step([(SEQUENCES[1], 0, 1, server.table(20))])
    rotation = Rotation(*RotaryTable(llama).rows(torch.tensor([0, 1])))
    two_TD, cache = torch.zeros(2, 48, dtype=torch.bfloat16), server.cache.data
    with pytest.raises(ValueError, match=r"x \(2, 48\) .* do not fit 2 blocks and 1 tokens"):
        blocks(two_TD, None, rotation, cache, server.attend.sequences)
    assert blocks(two_TD[:1].float(), None, rotation, cache, server.attend.sequences) is None


def test_blocks_with_adapters_are_computed_one_by_one(llama: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(llama, dtype=torch.bfloat16)
    block: Any = decoder.blocks[0]
    assert block.weights() is not None
    block.o_proj.add_adapters(LoraSettings(rank=2, alpha=4.0, targets=("o_proj",)))
    assert block.weights() is None
