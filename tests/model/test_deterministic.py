"""Deterministic mode: the engine's logprobs are the trainer's, bit for bit, whatever batch, chunks and cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels import deterministic
from stoker.model.kernels.ops import Ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTHS = [37, 90, 5, 130]
SEQUENCES = [torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def trainer_logprobs(decoder: Decoder, sequences: list[Tensor]) -> list[Tensor]:
    """Return the logprobs of one packed pass, as the trainer runs it."""
    lengths = [len(sequence) for sequence in sequences]
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, *lengths]).cumsum(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = decoder(torch.cat(sequences), positions, attend)
    return list(decoder.ops.log_softmax(decoder.logits(hidden)).detach().split(lengths))


def serve(server: Any, sequences: list[Tensor], rng: random.Random, chunks: list[int]) -> list[Tensor]:
    """Run steps of random members with random chunks until all positions were run."""
    tables = [server.table(len(sequence)) for sequence in sequences]
    done, results = [0] * len(sequences), [[] for _ in sequences]  # type: list[int], list[list[Tensor]]
    while any(done[i] < len(sequences[i]) for i in range(len(sequences))):
        members = [i for i in range(len(sequences)) if done[i] < len(sequences[i]) and rng.random() < 0.7]
        rng.shuffle(members)
        if members:
            ends = {i: min(done[i] + rng.choice(chunks), len(sequences[i])) for i in members}
            for i, logprobs in zip(
                members, server.step([(sequences[i], done[i], ends[i], tables[i]) for i in members]), strict=True
            ):
                results[i].append(logprobs)
                done[i] = ends[i]
    return [torch.cat(result) for result in results]


@DTYPES
def test_any_chunks_in_any_company_give_the_trainers_bits(
    config: ModelConfig, dtype: torch.dtype, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    decoder = make_decoder(config, deterministic=True, dtype=dtype)
    expected = trainer_logprobs(decoder, SEQUENCES)
    results = serve(make_server(decoder), SEQUENCES, random.Random(1), [1, 1, 1, 7, 16, 33])
    assert [torch.equal(result, other) for result, other in zip(results, expected, strict=True)] == [True] * 4


@DTYPES
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    seed=st.integers(0, 2**20),
    chunks=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16, 64]),
)
def test_random_schedules_give_the_trainers_bits(
    dtype: torch.dtype,
    seed: int,
    chunks: list[int],
    block_size: int,
    qwen3: ModelConfig,
    make_decoder: Callable[..., Decoder],
    make_server: Callable[..., Any],
) -> None:
    decoder = make_decoder(qwen3, deterministic=True, dtype=dtype)
    sequences = [sequence[:24] for sequence in SEQUENCES[:3]]
    rng = random.Random(seed)
    expected = trainer_logprobs(decoder, sequences)
    results = serve(make_server(decoder, num_blocks=128, block_size=block_size), sequences, rng, chunks)
    assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))


@DTYPES
def test_reused_and_stale_blocks_change_no_bit(
    llama: ModelConfig, dtype: torch.dtype, make_decoder: Callable[..., Decoder], make_server: Callable[..., Any]
) -> None:
    """Blocks hold the prefix of another sequence, or numbers of an ended sequence beyond the end."""
    decoder = make_decoder(llama, deterministic=True, dtype=dtype)
    server = make_server(decoder)
    first = SEQUENCES[3]
    second = torch.cat((first[:32], SEQUENCES[1][:40]))
    expected = trainer_logprobs(decoder, [first, second])
    stale = server.table(72)
    server.step([(SEQUENCES[1], 0, 72, stale)])
    table = server.table(len(first))
    assert torch.equal(server.step([(first, 0, len(first), table)])[0], expected[0])
    shared = table[:4] + stale[:5]  # 4 blocks of 8 tokens are the prefix, the others hold old numbers
    answers = [
        server.step([(second, 32, 35, shared), (first, 100, 101, table)])[0],
        server.step([(second, 35, 72, shared)])[0],
    ]
    assert torch.equal(torch.cat(answers), expected[1][32:])


@DTYPES
def test_a_sequence_alone_has_the_bits_it_has_in_any_packing(
    llama: ModelConfig, dtype: torch.dtype, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(llama, deterministic=True, dtype=dtype)
    together = trainer_logprobs(decoder, SEQUENCES)
    turned = trainer_logprobs(decoder, SEQUENCES[::-1])[::-1]
    alone = [trainer_logprobs(decoder, [sequence])[0] for sequence in SEQUENCES]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(together, turned, alone, strict=True))


@DTYPES
def test_the_losss_logprobs_are_those_of_log_softmax(
    llama: ModelConfig, dtype: torch.dtype, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(llama, deterministic=True, dtype=dtype)
    tokens = SEQUENCES[1]
    hidden = decoder(
        tokens, torch.arange(len(tokens)), PackedAttend(decoder.ops, "auto", torch.tensor([0, len(tokens)]))
    )
    targets, weights = tokens.roll(-1), (torch.arange(len(tokens)) % 5 > 1).float()
    result = decoder.cross_entropy(hidden, targets, weights)
    expected = decoder.ops.log_softmax(decoder.logits(hidden)).gather(1, targets[:, None]).squeeze(1)
    assert torch.equal(result.logprobs, expected.detach() * weights)


@DTYPES
@pytest.mark.parametrize("columns", [1, 7, 12, 16, 33, 200], ids=str)
@pytest.mark.parametrize("size", [10, 48, 77], ids=str)
def test_a_rows_product_does_not_depend_on_its_place(dtype: torch.dtype, columns: int, size: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, size, generator=generator).to(dtype)
    rows = torch.randn(40, size, generator=generator).to(dtype)
    whole = deterministic.tiled_product(rows, weight)
    for begin, end in ((0, 1), (3, 20), (17, 18), (5, 40)):
        assert torch.equal(deterministic.tiled_product(rows[begin:end], weight), whole[begin:end])


def test_elementwise_parts_do_not_depend_on_an_elements_place() -> None:
    ops = Ops(deterministic=True)
    rows = torch.randn(70, 62, generator=torch.Generator().manual_seed(0)) * 5
    weight = torch.linspace(0.5, 2, 62)
    for function in (ops.swiglu, ops.log_softmax, lambda x: ops.rms_norm(x, weight, 1e-5)):
        whole = function(rows)
        for begin, end in ((0, 1), (1, 2), (3, 20), (69, 70), (5, 70)):
            assert torch.equal(function(rows[begin:end].clone()), whole[begin:end])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 77, 96])
def test_the_ordered_sum_is_a_sum(size: int) -> None:
    rows = torch.randn(3, size)
    torch.testing.assert_close(deterministic.ordered_sum(rows), rows.sum(-1, keepdim=True), rtol=0, atol=1e-5)


def test_weights_are_not_packed_in_deterministic_mode(llama: ModelConfig, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(llama, deterministic=True)
    expected = trainer_logprobs(decoder, SEQUENCES)
    decoder.pack_weights()
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(trainer_logprobs(decoder, SEQUENCES), expected, strict=True))
