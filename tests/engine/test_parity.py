"""Parity of engine and trainer in deterministic mode.

The log-probabilities are equal bit for bit, whatever the engine's batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.engine.core.engine import LLMEngine
from stoker.engine.sampling import SamplingParams
from stoker.model.attend import PackedAttend
from stoker.model.kernels.ops import Ops
from tests.engine.conftest import MakeEngine, decoder_of
from tests.engine.test_engine import random_prompts

PROMPTS = [prompt[:45] for prompt in random_prompts(9, seed=21, shared=True)]
Scored = tuple[list[int], list[float]]
"""Prompt and output tokens, and the log-probability of each output token."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def params_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.7 * (index % 3), seed=index, max_tokens=11, ignore_eos=True, logprobs=0)


def answers(engine: LLMEngine) -> dict[str, Scored]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params_of(index))
    found: dict[str, Scored] = {str(index): (list(prompt), []) for index, prompt in enumerate(PROMPTS)}
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.logprobs is not None
            found[delta.request_id][0].extend(delta.tokens)
            found[delta.request_id][1].extend(entry.logprob for entry in delta.logprobs)
    return found


@torch.no_grad()
def trainer_logprobs(twin: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Return the log-probability of every following token, from one packed pass as the trainer computes it."""
    ops = Ops(deterministic=True)
    decoder = decoder_of(twin, ops)
    bounds = torch.tensor([0, *[len(tokens) for tokens in sequences]]).cumsum(0)
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    positions_T = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    hidden_TD = decoder(tokens_T, positions_T, PackedAttend(ops, "auto", bounds))
    targets_T = tokens_T.roll(-1)
    loss = decoder.cross_entropy(hidden_TD, targets_T, torch.ones(len(tokens_T)))
    return [loss.logprobs[begin : end - 1] for begin, end in pairwise(bounds)]


SETTINGS: dict[str, dict[str, Any]] = {
    "all together": {},
    "one after another": {"seats": 1},
    "small chunks": {"chunk": 3, "budget": 12, "seats": 8},
    "one token at a time": {"chunk": 1, "budget": 16, "seats": 16},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"num_blocks": 40, "prefix_cache": False},
    "big blocks": {"block_size": 16, "num_blocks": 100},
    "odd blocks": {"block_size": 5},
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "qwen3-moe"])
def test_logprobs_equal_the_trainer_s_bit_for_bit(
    architecture: str, make_engine: MakeEngine, twins: dict[str, Any]
) -> None:
    first: dict[str, Scored] | None = None
    for name, setting in SETTINGS.items():
        engine = make_engine(architecture, deterministic=True, **setting)
        found = answers(engine)
        assert first is None or found == first, name
        first = found
        assert (engine.stats().preemptions > 0) == (name == "preempted")
    assert answers(engine) == first, "the second time from the prefix cache"
    assert engine.stats().prefix_hits > 0
    assert first is not None
    sequences = [tokens for tokens, _ in first.values()]
    for packed in (sequences, sequences[::-1]):
        truth = dict(zip(map(tuple, packed), trainer_logprobs(twins[architecture], packed), strict=True))
        for tokens, logprobs in first.values():
            assert truth[tuple(tokens)][-len(logprobs) :].tolist() == logprobs


def test_prompt_logprobs_equal_the_trainer_s_bit_for_bit(make_engine: MakeEngine, twins: dict[str, Any]) -> None:
    engine = make_engine(deterministic=True, chunk=7)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
    truth = trainer_logprobs(twins["llama"], PROMPTS)
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.prompt_logprobs is not None
            found = [entry.logprob for entry in delta.prompt_logprobs if entry is not None]
            assert found == truth[int(delta.request_id)].tolist()
