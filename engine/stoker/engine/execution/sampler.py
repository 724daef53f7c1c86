"""Sample the next token of each row of logits, batched in tensors: no loop over tokens, no wait for the device.

Random numbers come from (seed, choice, position) alone, so a row draws the same in any batch, in any seat, after any
preemption. Shape legend: B rows to sample, V vocabulary, P rows with penalties, L longest sequence among them, C
candidates.

Called by the runner; the state of a seat belongs to `seats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stoker.engine.execution.step import Opening
from stoker.engine.execution.token_mask import mask_logits
from stoker.engine.sampling import SamplingParams
from stoker.model.kernels.ops import Ops

_NARROW = 256
"""Candidates of top-p at first on the CPU, where sorting the whole vocabulary is slow."""


class Logprobs(NamedTuple):
    """Raw log-probabilities of some rows."""

    chosen: Tensor
    """[rows] log-probability of the chosen token."""
    ranks: Tensor
    """[rows] tokens that are at least as probable as the chosen one, itself included."""
    top_tokens: Tensor
    """[rows, k] best first."""
    top: Tensor


class Sampled(NamedTuple):
    """Sampled tokens on the device."""

    tokens: Tensor
    """[B]"""
    valid: Tensor
    """[B] whether the row's logits were finite."""
    logprobs: Logprobs | None
    """For the rows whose seats request them, in order."""


class SeatValues:
    """Sampling values of every seat, on the host. One gather and one copy bring a step's rows to the device."""

    def __init__(self, num_seats: int) -> None:
        self.params = [SamplingParams()] * num_seats
        self.stop_tokens: list[tuple[int, ...]] = [()] * num_seats
        self.num_prompt = np.zeros(num_seats, dtype=np.int64)
        self.plain_greedy = np.ones(num_seats, dtype=bool)
        self.top_logprobs = np.full(num_seats, -1, dtype=np.int64)
        self.numbers = np.zeros((num_seats, len(_NUMBERS)), dtype=np.float64)
        self.keys = np.zeros((num_seats, 2), dtype=np.int64)
        """Seed and choice."""
        self.filtered = np.zeros(num_seats, dtype=bool)
        """Whether top-k, top-p or min-p exclude tokens."""
        self.adjusted_until = np.zeros(num_seats, dtype=np.int64)
        """Position before which penalties, biases or bans change the logits."""

    def open(self, opening: Opening) -> None:
        seat, params = opening.seat, opening.params
        self.params[seat] = params
        self.stop_tokens[seat] = opening.stop_tokens
        self.num_prompt[seat] = opening.num_prompt
        self.plain_greedy[seat] = params.plain_greedy
        self.top_logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        self.numbers[seat] = [getattr(params, name) for name in _NUMBERS]
        if params.greedy:
            self.numbers[seat, _NUMBERS.index("temperature")] = 0.0
        self.keys[seat] = (params.seed or 0, opening.choice)
        self.filtered[seat] = not params.greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
        always = params.penalised or params.logit_bias or params.bad_token_ids
        self.adjusted_until[seat] = _ALWAYS if always else opening.num_prompt + params.min_tokens


_ALWAYS = 2**62
NO_MASKS: Mapping[int, bytes] = MappingProxyType({})
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class Rows:
    """Rows of one step, with their seats and values on host and device."""

    def __init__(
        self,
        values: SeatValues,
        seats: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        device: torch.device,
        masks: Mapping[int, bytes] = NO_MASKS,
    ) -> None:
        self.seats = np.asarray(seats, dtype=np.int64)
        self.positions = np.asarray(positions, dtype=np.int64)
        """Position of the new token, which is the number of tokens before it."""
        self.values = values
        self.device = device
        self.masks = masks
        """Seat -> bits of the tokens that it may choose."""
        self.plain_greedy = bool(values.plain_greedy[self.seats].all())
        self.numbers = values.numbers[self.seats]

    def any(self, name: str, neutral: float) -> bool:
        return bool((self.numbers[:, _NUMBERS.index(name)] != neutral).any())

    def column(self, name: str) -> Tensor:
        """[B, 1] float32 on the device."""
        return self.to_device(self.numbers[:, _NUMBERS.index(name)].astype(np.float32)).unsqueeze(1)

    def keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Seed, choice and position of each row, int64."""
        seeds, choices = self.values.keys[self.seats].T
        return self.to_device(seeds), self.to_device(choices), self.to_device(self.positions)

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def sample(logits_BV: Tensor, rows: Rows, tokens_SL: Tensor, ops: Ops) -> Sampled:
    """Choose one token per row. `tokens_SL` holds every seat's tokens; only penalties read it."""
    if rows.plain_greedy:
        return _greedy(logits_BV)
    logprobs_of = raw_logprobs(logits_BV, rows, ops)
    logits_BV = _adjust(mask_logits(logits_BV, rows.seats, rows.masks).float(), rows, tokens_SL)
    chosen = _greedy(logits_BV)
    if rows.any("temperature", 0.0):
        chosen = chosen._replace(tokens=_draw(logits_BV, chosen.tokens, rows))
    return chosen._replace(logprobs=logprobs_of(chosen.tokens) if logprobs_of else None)


def score(logprobs_TV: Tensor, tokens_T: Tensor, num_top: int) -> Logprobs:
    """Log-probability and rank of each given token, and the best `num_top`, or all of a smaller vocabulary."""
    num_top = min(num_top, logprobs_TV.shape[1])
    chosen_T = logprobs_TV.gather(1, tokens_T.long().unsqueeze(1)).squeeze(1)
    top, top_tokens = (
        logprobs_TV.topk(num_top, dim=1) if num_top else (logprobs_TV[:, :0], tokens_T.new_empty(len(tokens_T), 0))
    )
    return Logprobs(chosen_T, (logprobs_TV >= chosen_T.unsqueeze(1)).sum(1), top_tokens, top)


def _greedy(logits_BV: Tensor) -> Sampled:
    best_B, tokens_B = logits_BV.max(-1)  # the first of equal ones; six times faster than argmax for bfloat16 on a CPU
    return Sampled(tokens_B, best_B.isfinite(), None)  # a nan is greater than any number


class _RawLogprobs:
    """Log-probabilities of the rows that request them, from the logits before any change."""

    def __init__(self, logits_BV: Tensor, wanted: np.ndarray, num_top: int, ops: Ops) -> None:
        self.index = torch.from_numpy(wanted).to(logits_BV.device, non_blocking=True)
        self.logprobs = ops.log_softmax(logits_BV.index_select(0, self.index))
        self.num_top = num_top

    def __call__(self, tokens_B: Tensor) -> Logprobs:
        return score(self.logprobs, tokens_B.index_select(0, self.index), self.num_top)


def raw_logprobs(logits_BV: Tensor, rows: Rows, ops: Ops) -> _RawLogprobs | None:
    asked = rows.values.top_logprobs[rows.seats]
    wanted = np.flatnonzero(asked >= 0)
    return _RawLogprobs(logits_BV, wanted, int(asked.max()), ops) if len(wanted) else None


# What changes the logits.


def _adjust(logits_BV: Tensor, rows: Rows, tokens_SL: Tensor) -> Tensor:
    bans, biases = banned(rows), biased(rows)
    if bans or biases:
        logits_BV = logits_BV.clone()
    if bans:
        row, token = (rows.to_device(np.asarray(column, dtype=np.int64)) for column in zip(*bans, strict=True))
        logits_BV.index_put_(
            (row, token), logits_BV.new_full((), -math.inf)
        )  # a Python number would be copied with a wait
    if biases:
        places, added = [entry[:2] for entry in biases], [entry[2] for entry in biases]
        index = tuple(rows.to_device(np.asarray(column, dtype=np.int64)) for column in zip(*places, strict=True))
        logits_BV.index_put_(index, rows.to_device(np.asarray(added, dtype=np.float32)), accumulate=True)
    penalised = np.flatnonzero((rows.numbers[:, 4:] != (0.0, 0.0, 1.0)).any(1))
    return _penalise(logits_BV, rows, penalised, tokens_SL) if len(penalised) else logits_BV


def banned(rows: Rows) -> list[tuple[int, int]]:
    """(row, token) pairs that cannot be chosen: bad tokens, and stop tokens before `min_tokens`."""
    pairs: list[tuple[int, int]] = []
    for row, (seat, position) in enumerate(zip(rows.seats, rows.positions, strict=True)):
        params = rows.values.params[seat]
        pairs.extend((row, token) for token in params.bad_token_ids)
        if position - rows.values.num_prompt[seat] < params.min_tokens:
            pairs.extend((row, token) for token in rows.values.stop_tokens[seat])
    return pairs


def biased(rows: Rows) -> list[tuple[int, int, float]]:
    return [
        (row, token, bias)
        for row, seat in enumerate(rows.seats)
        for token, bias in rows.values.params[seat].logit_bias.items()
    ]  # fmt: skip


def _penalise(logits_BV: Tensor, rows: Rows, penalised: np.ndarray, tokens_SL: Tensor) -> Tensor:
    """Apply the repetition penalty over prompt and output, frequency and presence penalties over the output."""
    index_P = rows.to_device(penalised)
    longest = int(rows.positions[penalised].max())
    tokens_PL = tokens_SL.index_select(0, rows.to_device(rows.seats[penalised]))[:, :longest].long()
    place_L = torch.arange(longest, device=rows.device)
    length_P1 = rows.to_device(rows.positions[penalised]).unsqueeze(1)
    prompt_P1 = rows.to_device(rows.values.num_prompt[rows.seats[penalised]]).unsqueeze(1)
    logits_PV = logits_BV.index_select(0, index_P)
    everything_PV = _count(tokens_PL, place_L < length_P1, logits_PV)
    output_PV = _count(tokens_PL, (place_L >= prompt_P1) & (place_L < length_P1), logits_PV)
    presence, frequency, repetition = (rows.column(name).index_select(0, index_P) for name in _NUMBERS[4:])
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition, logits_PV * repetition)
    logits_PV = torch.where(everything_PV > 0, repeated_PV, logits_PV)
    logits_PV = logits_PV - frequency * output_PV - presence * (output_PV > 0)
    return logits_BV.index_copy(0, index_P, logits_PV)


def _count(tokens_PL: Tensor, seen_PL: Tensor, like_PV: Tensor) -> Tensor:
    """[P, V] occurrences of each token at the positions that are seen."""
    return torch.zeros_like(like_PV).scatter_add_(1, tokens_PL, seen_PL.to(like_PV.dtype))


# Drawing.


def _draw(logits_BV: Tensor, greedy_B: Tensor, rows: Rows) -> Tensor:
    """Inverse of the cumulative distribution, in the order of the vocabulary; rows of temperature 0 keep their greedy
    token."""
    temperature_B1 = rows.column("temperature")
    is_greedy_B1 = temperature_B1 == 0
    logits_BV = logits_BV / torch.where(is_greedy_B1, 1.0, temperature_B1)
    best_B1 = logits_BV.gather(1, greedy_B.unsqueeze(1))
    weights_BV = torch.exp(logits_BV - best_B1)
    if rows.any("top_p", 1.0) or rows.any("min_p", 0.0) or (rows.numbers[:, 2] > 0).any():
        weights_BV = weights_BV.masked_fill(logits_BV < _threshold(logits_BV, weights_BV, best_B1, rows), 0.0)
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = uniform(*rows.keys()).unsqueeze(1) * cumulative_BV[:, -1:]
    drawn_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    return torch.where(is_greedy_B1, greedy_B.unsqueeze(1), drawn_B1).squeeze(1)


def _threshold(logits_BV: Tensor, weights_BV: Tensor, best_B1: Tensor, rows: Rows) -> Tensor:
    """[B, 1] smallest logit that min-p, top-k and top-p keep in each row. Equal logits are kept, too."""
    lowest_B1 = best_B1 + torch.log(rows.column("min_p"))
    if not rows.any("top_p", 1.0) and not (rows.numbers[:, 2] > 0).any():
        return lowest_B1
    vocab_size = logits_BV.shape[1]
    top_k = rows.numbers[:, 2]
    limits = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size).astype(np.int64)
    limit_B1 = rows.to_device(limits).unsqueeze(1)
    top_p_B1 = rows.column("top_p").double()
    total_B1 = weights_BV.sum(-1, keepdim=True, dtype=torch.float64)
    num_candidates = _first_width(limits, rows, vocab_size)
    while True:
        sorted_BC = logits_BV.topk(num_candidates, dim=1).values
        kept_B1, enough = _nucleus(sorted_BC, best_B1, limit_B1, top_p_B1, total_B1)
        if num_candidates == vocab_size or bool(enough):
            break
        num_candidates = min(vocab_size, num_candidates * 8)
    found_B1 = sorted_BC.gather(1, kept_B1 - 1)
    unlimited_B1 = (limit_B1 == vocab_size) & (top_p_B1 == 1)
    return torch.maximum(lowest_B1, torch.where(unlimited_B1, -math.inf, found_B1))


def _first_width(limits: np.ndarray, rows: Rows, vocab_size: int) -> int:
    """Number of candidates to sort. All of them on an accelerator, where a test for fewer would wait for the device."""
    if rows.device.type != "cpu":
        return vocab_size
    bounded = limits[limits < vocab_size]
    widest = int(bounded.max()) if len(bounded) else 1
    only_top_k = bool(((limits < vocab_size) | (rows.numbers[:, 1] == 1)).all())
    return min(vocab_size, widest if only_top_k else max(widest, _NARROW))


def _nucleus(
    sorted_BC: Tensor, best_B1: Tensor, limit_B1: Tensor, top_p_B1: Tensor, total_B1: Tensor
) -> tuple[Tensor, Tensor]:
    """Number of sorted candidates that each row keeps, at least one; and whether the candidates were enough for all
    rows."""
    width = sorted_BC.shape[1]
    vocab_limited = limit_B1 <= width
    rank_C = torch.arange(width, device=sorted_BC.device)
    weights_BC = torch.exp(sorted_BC - best_B1).double().masked_fill(rank_C >= limit_B1, 0.0)
    cumulative_BC = weights_BC.cumsum(-1)
    total_B1 = torch.where(vocab_limited, cumulative_BC[:, -1:], total_B1)
    wanted_B1 = top_p_B1 * total_B1
    before_BC = cumulative_BC - weights_BC
    kept_BC = (before_BC < wanted_B1) & (rank_C < limit_B1)
    kept_B1 = kept_BC.sum(-1, keepdim=True).clamp_(min=1)
    enough = vocab_limited | (top_p_B1 == 1) | (cumulative_BC[:, -1:] >= wanted_B1)
    return kept_B1, enough.all()


# Random numbers.


def uniform(seed_B: Tensor, choice_B: Tensor, position_B: Tensor) -> Tensor:
    """Numbers in [0, 1) as float64, multiples of 2^-32, from the three keys alone (int64; splitmix64's finaliser,
    chained)."""
    state_B = _mix(seed_B + _GOLDEN)
    state_B = _mix(state_B ^ _mix(choice_B + _signed(2 * _GOLDEN)))
    state_B = _mix(state_B ^ _mix(position_B + _signed(3 * _GOLDEN)))
    return _shifted(state_B, 32).double() * 2.0**-32


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same bits."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
