"""The batched sampler against formulas written out row by row, and against chance."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.engine.execution.sampler import Rows, SeatValues, sample, score, uniform
from stoker.engine.execution.step import Opening
from stoker.engine.sampling import SamplingParams
from stoker.model.kernels.ops import Ops

VOCAB = 700
CPU = torch.device("cpu")
OPS = Ops()


def rows_of(
    params: list[SamplingParams], positions: list[int], num_prompt: int = 3, choices: list[int] | None = None
) -> Rows:
    """Return rows in which row i sits in a seat that is not i."""
    values = SeatValues(len(params) + 3)
    seats = [len(params) + 2 - row for row in range(len(params))]
    for row, (seat, one) in enumerate(zip(seats, params, strict=True)):
        choice = choices[row] if choices else 0
        values.open(Opening(seat, (), num_prompt, choice, (2,), one if one.seed is not None else one.with_seed(row)))
    return Rows(values, seats, positions, CPU)


def logits_of(num_rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def history(num_rows: int, length: int = 12, seed: int = 1) -> Tensor:
    """Return the tokens of all seats; few different ones, so that they repeat."""
    return torch.randint(3, 40, (num_rows + 3, length), generator=torch.Generator().manual_seed(seed))


def naive_distribution(logits: Tensor, params: SamplingParams, tokens: list[int], num_prompt: int) -> Tensor:
    """Return the probabilities of one row, in float64, one formula after the other."""
    x = logits.double().clone()
    for token in params.bad_token_ids:
        x[token] = -math.inf
    if len(tokens) - num_prompt < params.min_tokens:
        x[2] = -math.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(tokens[num_prompt:]):
        x[token] -= params.frequency_penalty * tokens[num_prompt:].count(token) + params.presence_penalty
    if params.greedy:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    x = x / params.temperature
    p = torch.softmax(x, 0)
    keep = p >= params.min_p * p.max()
    order = p.argsort(descending=True)
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        allowed = order[: params.top_k] if params.top_k > 0 else order
        share = p[allowed] / p[allowed].sum()
        before = share.cumsum(0) - share
        keep[allowed[before >= params.top_p]] = False
    p[~keep] = 0
    return p / p.sum()


CASES = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=5.0),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=VOCAB * 2),
    "top_p": SamplingParams(top_p=0.6),
    "top_p of a flat row": SamplingParams(top_p=0.99, temperature=50.0),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.2),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.5),
    "everything": SamplingParams(
        temperature=1.4, top_k=60, top_p=0.9, min_p=0.01,
        presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3,
    ),
    "rewards repetition": SamplingParams(
        presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.7, top_k=5
    ),
    "greedy with penalties": SamplingParams(temperature=0, presence_penalty=2, repetition_penalty=2),
    "bias": SamplingParams(logit_bias={5: 100.0, 9: 99.0}, temperature=2),
    "bans": SamplingParams(logit_bias={5: -100.0}, bad_token_ids=tuple(range(10, 300)), top_p=0.9),
    "min_tokens": SamplingParams(min_tokens=50, logit_bias={2: 90.0}),
}  # fmt: skip


def drawn_token(distribution: Tensor, seed: int, choice: int, position: int) -> int:
    number = uniform(*(torch.tensor([key]) for key in (seed, choice, position))).item()
    return int(torch.searchsorted(distribution.cumsum(0), number, right=True))


@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_a_mixed_batch_follows_its_own_formula(seed: int) -> None:
    params = [one.with_seed(seed * 100 + i) for i, one in enumerate(CASES.values())]
    logits, tokens = logits_of(len(params), seed), history(len(params), seed=seed)
    positions = [4 + row % 8 for row in range(len(params))]
    rows = rows_of(params, positions)
    before = logits.clone()
    result = sample(logits, rows, tokens, OPS)
    assert torch.equal(logits, before)
    assert result.valid.all()
    for row, one in enumerate(params):
        seen = tokens[int(rows.seats[row]), : positions[row]].tolist()
        wanted = naive_distribution(logits[row], one, seen, 3)
        token = int(result.tokens[row])
        assert wanted[token] > 0, list(CASES)[row]
        assert token == drawn_token(wanted, one.seed or 0, 0, positions[row]) or one.greedy, list(CASES)[row]
        assert not one.greedy or token == int(wanted.argmax())


@pytest.mark.parametrize("name", CASES)
def test_a_row_draws_the_same_alone_and_in_a_batch(name: str) -> None:
    logits, tokens = logits_of(len(CASES)), history(len(CASES))
    together = sample(logits, rows_of([one.with_seed(5) for one in CASES.values()], [6] * len(CASES)), tokens, OPS)
    row = list(CASES).index(name)
    rows = rows_of([CASES[name].with_seed(5)], [6])
    alone_tokens = tokens.clone()
    alone_tokens[rows.seats[0]] = tokens[len(CASES) + 2 - row]
    alone = sample(logits[row : row + 1], rows, alone_tokens, OPS)
    assert alone.tokens.tolist() == [together.tokens[row].item()]


@pytest.mark.parametrize("name", ["plain", "cold", "top_k", "top_p", "min_p", "top_k and top_p", "everything"])
def test_frequencies_follow_the_distribution(name: str) -> None:
    draws = 20_000
    logits, tokens = logits_of(1, seed=9), history(1)
    rows = rows_of([CASES[name].with_seed(1)], [8])
    wanted = naive_distribution(logits[0], CASES[name], tokens[rows.seats[0], :8].tolist(), 3)
    values = rows.values
    many = Rows(values, [rows.seats[0]] * draws, [8] * draws, CPU)
    many.keys = lambda: (torch.arange(draws), torch.zeros(draws, dtype=torch.int64), torch.full((draws,), 8))  # type: ignore[method-assign]
    found = torch.cat([sample(logits.expand(500, -1), part, tokens, OPS).tokens for part in split(many, 500)])
    counts = torch.bincount(found, minlength=VOCAB).double()
    assert counts[wanted == 0].sum() == 0
    big = wanted * draws >= 5
    expected = torch.cat([wanted[big], wanted[~big].sum()[None]]) * draws
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    some = expected > 0
    chi_square = float(((observed - expected)[some] ** 2 / expected[some]).sum())
    freedom = int(some.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def split(rows: Rows, size: int) -> list[Rows]:
    seeds, choices, positions = rows.keys()
    parts = []
    for begin in range(0, len(rows.seats), size):
        part = Rows(rows.values, rows.seats[begin : begin + size], rows.positions[begin : begin + size], CPU)
        keys = tuple(key[begin : begin + size] for key in (seeds, choices, positions))
        part.keys = lambda keys=keys: keys  # type: ignore[method-assign,misc]
        parts.append(part)
    return parts


def test_uniform_numbers_depend_on_all_three_keys_and_are_uniform() -> None:
    count = 20_000
    zero, steps = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    series = [uniform(*keys) for keys in ((steps, zero, zero), (zero, steps, zero), (zero, zero, steps))]
    for numbers in series:
        assert 0 <= numbers.min() < 0.001
        assert 0.999 < numbers.max() < 1
        histogram = torch.histc(numbers.float(), 20, 0, 1)
        assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 50
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert len({tuple(numbers[1:10].tolist()) for numbers in series}) == 3


def test_uniform_numbers_never_change() -> None:
    """Other versions of this program continue the streams on other machines."""
    keys = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [-(2**63), 127, 2**31]])
    assert (uniform(*keys.T) * 2**32).long().tolist() == EXPECTED_BITS


EXPECTED_BITS = [2144463295, 2906104245, 3406239949, 3478234415, 1107570669]


def test_choices_of_one_seed_differ() -> None:
    logits = logits_of(1).expand(8, -1)
    rows = rows_of([SamplingParams(seed=4, temperature=3)] * 8, [5] * 8, choices=list(range(8)))
    assert len(set(sample(logits, rows, history(8), OPS).tokens.tolist())) > 4


def test_logprobs_are_raw_and_only_for_rows_that_ask() -> None:
    params = [
        SamplingParams(temperature=0.2, logit_bias={7: 50.0}, logprobs=2, seed=0),
        SamplingParams(),
        SamplingParams(temperature=0, logprobs=0),
    ]
    logits = logits_of(3)
    result = sample(logits, rows_of(params, [5] * 3), history(3), OPS)
    truth = torch.log_softmax(logits, -1)
    assert result.tokens[0] == 7
    assert result.logprobs is not None
    assert torch.allclose(result.logprobs.chosen, truth[[0, 2], result.tokens[[0, 2]]])
    assert torch.equal(result.logprobs.top_tokens[0], truth[0].topk(2).indices)


def test_score_gives_the_logprob_of_given_tokens() -> None:
    truth = torch.log_softmax(logits_of(4), -1)
    tokens = torch.tensor([1, 2, 3, 4])
    found = score(truth, tokens, 3)
    assert torch.equal(found.chosen, truth[range(4), tokens])
    order = truth.argsort(dim=1, descending=True).tolist()
    assert found.ranks.tolist() == [order[row].index(token) + 1 for row, token in enumerate(tokens.tolist())]
    assert max(found.ranks) > 3, "the rank of a token that is not among the best"
    assert found.top.shape == (4, 3)
    assert score(truth, tokens, truth.shape[1] + 1).top.shape == truth.shape
    assert score(truth, tokens, 0).top.shape == (4, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5)], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_is_reported_and_hurts_no_other(bad: float, params: SamplingParams) -> None:
    logits = logits_of(3)
    wanted = sample(logits, rows_of([params] * 3, [5] * 3), history(3), OPS)
    logits[1, 600] = bad
    found = sample(logits, rows_of([params] * 3, [5] * 3), history(3), OPS)
    assert found.valid.tolist() == [True, False, True]
    assert found.tokens[[0, 2]].tolist() == wanted.tokens[[0, 2]].tolist()


def test_greedy_rows_take_the_largest_logit_of_any_dtype() -> None:
    logits = logits_of(5).bfloat16()
    rows = rows_of([SamplingParams(temperature=0)] * 5, [5] * 5)
    assert rows.plain_greedy
    assert torch.equal(sample(logits, rows, history(5), OPS).tokens, logits.argmax(-1))


@settings(deadline=None)
@given(
    temperature=st.floats(0, 0.02) | st.sampled_from([1e-5, 1e-37, 1e-38, 1e-40, 1e-44]),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    top_k=st.integers(-1, 2**31 - 1),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_a_cold_row_draws_its_best_token_whatever_else_is_asked(scale: float, **values: Any) -> None:
    logits = logits_of(2, scale=scale)
    best = logits.argmax(1)
    logits[torch.arange(2), best] += 1  # e^50 times as probable as the next one
    sampled = sample(logits, rows_of([SamplingParams(seed=1, **values)] * 2, [5, 9]), history(2), OPS)
    assert sampled.tokens.tolist() == best.tolist()
    assert sampled.valid.all()


@settings(deadline=None)
@given(repetition=st.floats(0.01, 100), temperature=st.floats(0, 100), bias=st.floats(-100, 100))
def test_no_allowed_value_makes_a_row_invalid(repetition: float, temperature: float, bias: float) -> None:
    params = SamplingParams(repetition_penalty=repetition, temperature=temperature, logit_bias={5: bias}, seed=1)
    assert sample(logits_of(2, scale=1e4), rows_of([params] * 2, [5, 9]), history(2), OPS).valid.all()


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
    ({"n": True}, "n must be an integer from 1 to 128, got True"),
    ({"max_tokens": -1}, "max_tokens must be an integer of at least 0, got -1"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, 4, got 5"),
    ({"temperature": -0.1}, "temperature must be a number from 0 to 100, got -0.1"),
    ({"temperature": 10**400}, "temperature must be a number from 0 to 100, got 1000"),
    ({"temperature": math.nan}, "temperature must be a number from 0 to 100, got nan"),
    ({"top_p": 0}, "top_p must be a number above 0 to 1, got 0"),
    ({"top_p": 1.1}, "top_p must be a number above 0 to 1, got 1.1"),
    ({"top_k": -2}, "top_k must be an integer from -1 to 2147483647, got -2"),
    ({"top_k": 2**31}, "top_k must be an integer from -1 to 2147483647, got 2147483648"),
    ({"min_p": 2}, "min_p must be a number from 0 to 1, got 2"),
    ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2, got 3"),
    ({"frequency_penalty": "1"}, "frequency_penalty must be a number from -2 to 2, got '1'"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty must be a number from 0.01 to 100, got 1e-40"),
    ({"logit_bias": {3: 101}}, "logit_bias must be a number from -100 to 100, got 101"),
    ({"logit_bias": {-3: 1}}, "logit_bias must be an integer from 0 to 2147483647, got -3"),
    ({"seed": 2**63}, "seed must be an integer from -9223372036854775808 to 9223372036854775807"),
    ({"stop": "end"}, "stop must be a tuple of texts, got 'end'"),
    ({"stop": None}, "stop must be a tuple of texts, got None"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a tuple of token ids, got 5"),
    ({"allowed_token_ids": 5}, "allowed_token_ids must be a tuple of token ids, got 5"),
    ({"bad_sequences": (3,)}, "bad_sequences must be a tuple of token ids, got 3"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers, got [1]"),
    ({"grammar": "a"}, "grammar must be an OutputGrammar, got 'a'"),
    ({"cache_salt": ""}, "cache_salt must be a text that is not empty, got ''"),
    ({"cache_salt": 3}, "cache_salt must be a text that is not empty, got 3"),
    ({"stop": ("",)}, "stop must be texts of 1 to 1000 characters, got ''"),
    ({"stop": ("x",) * 17}, "stop must be at most 16 texts, got '17 texts'"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids must be an integer from 0 to 2147483647, got -1"),
    ({"bad_token_ids": (10**30,)}, "bad_token_ids must be an integer from 0 to 2147483647, got 1000"),
    ({"logprobs": 129}, "logprobs must be an integer from 0 to 128, got 129"),
    ({"prompt_logprobs": 21}, "prompt_logprobs must be an integer from 0 to 20, got 21"),
]


@pytest.mark.parametrize(("values", "message"), BAD_PARAMS, ids=[str(values) for values, _ in BAD_PARAMS])
def test_wrong_sampling_values_are_refused_with_field_value_and_what_is_allowed(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        SamplingParams(**values)
    assert refused.value.field == next(iter(values))  # type: ignore[attr-defined]
