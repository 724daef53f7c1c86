"""SmolLM2-135M-Instruct on a GPU: bfloat16 within its bound of transformers, and one deterministic answer.

In deterministic mode, packed and paged passes agree bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.model.attend import PackedAttend
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import PagedAttend, PagedSize
from stoker.model.tokenizer import Tokenizer
from stoker.model.weights.source import open_weights
from stoker.pod.capabilities import KernelsName

pytestmark = [pytest.mark.gpu, pytest.mark.real_model]

OF_99_PERCENT, MEAN = 0.3, 0.06
"""Bounds of the difference between log-probabilities.

transformers in bfloat16 is as far from itself in float32 (0.17 and 0.04); an unlikely token may differ by more than 1.
"""
TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 600
SIZE = PagedSize(max_tokens=NUM_TOKENS, max_sequences=4, max_blocks=40)


@pytest.fixture(scope="module")
def folder() -> Path:
    path = Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache/stoker") / "models/smollm2-135m-instruct"
    if not torch.cuda.is_available() or not path.exists():
        pytest.skip("needs a GPU, and the model that `make model` brings")
    return path


def tokens_of(folder: Path) -> Tensor:
    return torch.tensor(Tokenizer.open(folder).encode(TEXT.read_text())[:NUM_TOKENS])


def open_decoder(folder: Path, kernels: KernelsName, device: str, *, deterministic: bool = False) -> Decoder:
    source = open_weights(folder)
    decoder = Decoder(source.config, Ops(kernels, deterministic=deterministic), dtype=torch.bfloat16, device=device)
    source.load_into(decoder)
    return decoder.requires_grad_(False)


def hidden_of(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """Return hidden_TD of one packed sequence, as the trainer computes it."""
    device = next(decoder.parameters()).device
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, len(tokens_T)]), device=device)
    hidden_TD: Tensor = decoder(tokens_T.to(device), torch.arange(len(tokens_T), device=device), attend)
    return hidden_TD


def following(logprobs_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Return the log-probability of each token but the first."""
    return logprobs_TV[:-1].gather(1, tokens_T[1:, None].to(logprobs_TV.device)).squeeze(1)


@torch.inference_mode()
def check_bound(folder: Path, kernels: KernelsName, device: str) -> None:
    tokens_T = tokens_of(folder)
    decoder = open_decoder(folder, kernels, device)
    ours = following(decoder.ops.log_softmax(decoder.logits(hidden_of(decoder, tokens_T))), tokens_T).cpu()
    twin: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    twin.to(device)
    gap = (ours - following(twin(tokens_T[None].to(device)).logits[0].log_softmax(-1), tokens_T).cpu()).abs()
    most = gap.quantile(0.99)
    print(f"bf16 logprobs of real weights: largest {gap.max():.4f}, 99 % below {most:.4f}, mean {gap.mean():.4f}")
    assert most < OF_99_PERCENT
    assert gap.mean() < MEAN


def test_bf16_logprobs_are_within_their_bound_of_transformers(folder: Path) -> None:
    check_bound(folder, "fused", "cuda")


@torch.inference_mode()
@pytest.mark.parametrize("block_size", [16, 64])
def test_engine_and_trainer_agree_bit_for_bit(folder: Path, block_size: int, make_server: Callable[..., Any]) -> None:
    """The engine runs chunks of any length, single tokens, and another sequence beside them."""
    tokens_T = tokens_of(folder)
    decoder = open_decoder(folder, "fused", "cuda", deterministic=True)
    hidden_TD = hidden_of(decoder, tokens_T)
    expected_TV = decoder.ops.log_softmax(decoder.logits(hidden_TD))
    loss = decoder.cross_entropy(hidden_TD, tokens_T.roll(-1).cuda(), torch.ones(len(tokens_T), device="cuda"))
    assert torch.equal(loss.logprobs[:-1], following(expected_TV, tokens_T))
    server = make_server(decoder, num_blocks=60, block_size=block_size)
    server.attend = PagedAttend(decoder.ops, "auto", server.cache, SIZE)
    table, other = server.table(len(tokens_T)), server.table(20)
    results, begin = [], 0
    for end in (7, 8, 9, 137, 138, 400, len(tokens_T)):
        results.append(server.step([(tokens_T, begin, end, table), (tokens_T.flip(0), 0, 5, other)])[0])
        begin = end
    assert torch.equal(torch.cat(results), expected_TV)
