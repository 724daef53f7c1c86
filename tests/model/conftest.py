"""Tiny models and drivers that the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch, PagedSize
from stoker.model.rope_scaling import Llama3Scaling

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_token": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise parity is promised for one intra-op thread; the others save cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CONFIGS = {
    "llama": ModelConfig(architecture="llama", **BASE),
    "llama tied": ModelConfig(architecture="llama", **(BASE | {"tie_embeddings": True})),
    "llama 3 scaling, head size 10, 6 heads on 2": ModelConfig(
        architecture="llama", **(BASE | {"rope_scaling": LLAMA3, "head_dim": 10, "num_heads": 6})
    ),
    "llama with biases, no groups": ModelConfig(
        architecture="llama", **(BASE | {"attention_bias": True, "num_kv_heads": 4})
    ),
    "qwen3": ModelConfig(architecture="qwen3", **(BASE | {"head_dim": 16, "tie_embeddings": True})),
    "qwen3 untied, one kv head": ModelConfig(architecture="qwen3", **(BASE | {"num_kv_heads": 1, "rope_theta": 1e6})),
    "mistral": ModelConfig(architecture="mistral", **(BASE | {"sliding_window": 7})),
    "mistral without a window": ModelConfig(architecture="mistral", **BASE),
    "qwen2": ModelConfig(architecture="qwen2", **(BASE | {"tie_embeddings": True})),
    "qwen2, a window in the upper layer": ModelConfig(
        architecture="qwen2", **(BASE | {"sliding_window": 9, "max_window_layers": 1})
    ),
    "mixtral": ModelConfig(architecture="mixtral", **(BASE | EXPERTS)),
    "mixtral with a window": ModelConfig(architecture="mixtral", **(BASE | EXPERTS | {"sliding_window": 11})),
    "qwen3-moe": ModelConfig(architecture="qwen3-moe", **(BASE | EXPERTS | {"moe_intermediate_size": 24})),
    "qwen3-moe, plain weights, every second layer": ModelConfig(
        architecture="qwen3-moe", **(BASE | EXPERTS | {"norm_topk_prob": False, "decoder_sparse_step": 2})
    ),
    "qwen3-moe, a dense layer, tied": ModelConfig(
        architecture="qwen3-moe", **(BASE | EXPERTS | {"mlp_only_layers": (1,), "tie_embeddings": True})
    ),
}


@pytest.fixture(params=list(CONFIGS.values()), ids=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """A configuration for each shape that the two families allow."""
    value: ModelConfig = request.param
    return value


@pytest.fixture
def llama() -> ModelConfig:
    return CONFIGS["llama"]


@pytest.fixture
def qwen3() -> ModelConfig:
    return CONFIGS["qwen3"]


class Server:
    """A minimal engine: it gives sequences blocks in scattered order, runs chunks and collects all logprobs."""

    def __init__(self, decoder: Decoder, num_blocks: int = 64, block_size: int = 8) -> None:
        self.decoder = decoder
        weights = next(decoder.parameters())
        self.device = weights.device
        self.cache = KVCache(
            decoder.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=weights.dtype,
            device=self.device,
            group=decoder.group,
        )
        size = PagedSize(max_tokens=512, max_sequences=16, max_blocks=24)
        self.attend = PagedAttend(decoder.ops, "auto", self.cache, size)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()

    def table(self, num_tokens: int) -> list[int]:
        """Return the blocks of a sequence with so many tokens."""
        return [self.free.pop() for _ in range(-(-num_tokens // self.cache.block_size))]

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[Tensor, int, int, list[int]]]) -> list[Tensor]:
        """Run chunks (tokens of the whole sequence, begin, end, block table).

        Returns logprobs of the positions begin..end.
        """
        size, columns = self.cache.block_size, max(len(table) for *_, table in chunks)
        tokens = torch.cat([sequence[begin:end] for sequence, begin, end, _ in chunks])
        positions = torch.cat([torch.arange(begin, end) for _, begin, end, _ in chunks])
        slots = [table[p // size] * size + p % size for _, begin, end, table in chunks for p in range(begin, end)]
        lengths = [end - begin for _, begin, end, _ in chunks]
        self.attend.prepare(
            PagedBatch(
                query_start=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                seq_lens=torch.tensor([end for _, _, end, _ in chunks], dtype=torch.int32),
                block_tables=torch.tensor(
                    [table + [0] * (columns - len(table)) for *_, table in chunks], dtype=torch.int32
                ),
                slot_mapping=torch.tensor(slots, dtype=torch.int32),
                num_tokens=len(tokens),
            )
        )
        part = PartOfPass(tokens.to(self.device), positions.to(self.device), self.attend)
        logits = self.decoder.logits(self.decoder.stage(part))
        return list(self.decoder.ops.log_softmax(logits).split(lengths))


@pytest.fixture
def make_server() -> Callable[..., Server]:
    return Server


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    def make(
        config: ModelConfig, *, deterministic: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Decoder:
        decoder = Decoder(config, Ops(deterministic=deterministic), dtype=dtype)
        decoder.init_weights(seed)
        with torch.no_grad():  # norms of ones would hide a missing norm, biases of zero a missing bias
            for part in decoder.named_parts():
                if part.hf_name.endswith(("norm.weight", ".bias")):
                    generator = torch.Generator().manual_seed(len(part.hf_name))
                    part.local().add_(torch.empty(part.size).uniform_(-0.3, 0.3, generator=generator))
        return decoder

    return make
