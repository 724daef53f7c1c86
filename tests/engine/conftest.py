"""Tiny random models, in our decoder and in transformers' twin, and engines around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from stoker.engine.core.awaited_blocks import WORTH_TOKENS
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.host_tier import HostTier
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import Executor, InProcess
from stoker.engine.execution.runner import Runner
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from testing.model.transformers_twin import find

VOCAB = 320
MAX_LEN = 160

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    "mistral": {"sliding_window": 13},
    "mixtral": {"sliding_window": 25, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3-moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


def make_twin(architecture: str) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3-moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[architecture]
    twin: transformers.PreTrainedModel = model_class(config_class(**SHAPE | OF_FAMILY.get(architecture, {}))).eval()
    return twin


@pytest.fixture(scope="session")
def twins() -> dict[str, transformers.PreTrainedModel]:
    return {name: make_twin(name) for name in ("llama", "qwen3", *OF_FAMILY)}


@pytest.fixture(scope="session")
def model_folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes: 0 to 2 special, then one for each byte."""
    folder = tmp_path_factory.mktemp("model")
    twins["llama"].save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def decoder_of(
    twin: transformers.PreTrainedModel,
    ops: Ops,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layers: range | None = None,
) -> Decoder:
    config = ModelConfig.from_hugging_face(twin.config.to_dict())
    decoder = Decoder(config, ops, dtype=dtype, device=device, layers=layers)
    for part in decoder.named_parts():
        part.local().copy_(part.cut(find(twin, part.hf_name, grad=False)[1]))
    return decoder.requires_grad_(False)


def runner_of(
    decoder: Decoder,
    *,
    num_blocks: int,
    block_size: int,
    seats: int,
    budget: int,
    graphs: Any = True,
    links: Any = None,
    long_prompts: Any = None,
) -> Runner:
    weight = next(decoder.parameters())
    cache = KVCache(
        decoder.config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=weight.dtype,
        device=weight.device,
        layers=decoder.layers,
    )
    return Runner(
        decoder,
        cache,
        num_seats=seats,
        max_model_len=MAX_LEN,
        max_batch_tokens=budget,
        attention="auto",
        graphs=graphs,
        links=links,
        long_prompts=long_prompts,
    )


MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make_engine(twins: dict[str, transformers.PreTrainedModel]) -> MakeEngine:
    def make(
        architecture: str = "llama",
        *,
        deterministic: bool = False,
        num_blocks: int = 1200,
        block_size: int = 4,
        seats: int = 64,
        budget: int = 256,
        chunk: int | None = None,
        prefix_cache: bool = True,
        wrap: Callable[[Runner], Any] = lambda runner: runner,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kernels: str = "reference",
        graphs: Any = True,
        overlap: bool = False,
        execute: Callable[[Any], Executor] = InProcess,
        make_tier: Callable[[BlockManager, Runner], HostTier] | None = None,
        worth_tokens: float = WORTH_TOKENS,
    ) -> LLMEngine:
        ops = Ops(resolve_kernels(kernels, device), deterministic=deterministic)
        decoder = decoder_of(twins[architecture], ops, dtype, device)
        runner = runner_of(
            decoder, num_blocks=num_blocks, block_size=block_size, seats=seats, budget=budget, graphs=graphs
        )
        blocks = BlockManager(num_blocks, block_size, prefix_cache, None if make_tier is None else b"root")
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=budget,
            max_requests=seats,
            max_queued_requests=1000,
            chunk_tokens=chunk,
            tier=make_tier(blocks, runner) if make_tier is not None else None,
            worth_tokens=worth_tokens,
        )
        return LLMEngine(execute(wrap(runner)), scheduler, ModelLimits(VOCAB, MAX_LEN, (2,)), overlap=overlap)

    return make
