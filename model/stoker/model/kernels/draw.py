"""Choice of the next tokens in plain torch, by sorting: the twin of the fused sampler, for any device.

B rows to sample, S seats, V vocabulary, L longest sequence, E entries.

Pure; called by the reference kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.model.kernels.sampling import Adjustments, SampledTokens, SampleRows, SamplingTable


def sample(
    logits_BV: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    adjustments: Adjustments | None,
    into_SL: Tensor | None,
) -> SampledTokens:
    seats_B, is_real_B = rows.seats.long().clamp(min=0), rows.seats >= 0
    numbers_B7 = table.numbers.index_select(0, seats_B)
    logits_BV = logits_BV.float()
    if adjustments is not None:
        logits_BV = adjust(logits_BV, rows, numbers_B7, adjustments)
    best_B, greedy_B = logits_BV.max(-1)
    seed_B, choice_B = table.keys.index_select(0, seats_B).unbind(1)
    draws_B = uniform(seed_B, choice_B, rows.positions.long())
    tokens_B = draw(logits_BV, greedy_B, numbers_B7, draws_B, rows.filtered)
    tokens_B = torch.where(numbers_B7[:, 0] == 0, greedy_B, tokens_B) * is_real_B
    if into_SL is not None:
        into_SL[seats_B[is_real_B], rows.positions[is_real_B].long()] = tokens_B[is_real_B].to(into_SL.dtype)
    return SampledTokens(tokens_B, best_B.isfinite())


# What changes the logits.


def adjust(logits_BV: Tensor, rows: SampleRows, numbers_B7: Tensor, adjustments: Adjustments) -> Tensor:
    counts_B = adjustments.entry_start.diff().long()
    row_E = torch.repeat_interleave(torch.arange(len(counts_B), device=logits_BV.device), counts_B)
    used = slice(0, row_E.shape[0])
    places = (row_E, adjustments.entry_tokens[used].long())
    logits_BV = logits_BV.clone().index_put_(places, adjustments.entry_biases[used], accumulate=True)
    return penalise(logits_BV, rows, numbers_B7, adjustments) if adjustments.penalised else logits_BV


def penalise(logits_BV: Tensor, rows: SampleRows, numbers_B7: Tensor, adjustments: Adjustments) -> Tensor:
    """Apply penalties: repetition over prompt and output, frequency and presence over the output."""
    seats_B = rows.seats.long().clamp(min=0)
    tokens_BL = adjustments.history.index_select(0, seats_B).long().clamp(0, logits_BV.shape[1] - 1)
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    written_BL = place_L < rows.positions.unsqueeze(1)
    output_BL = written_BL & (place_L >= adjustments.num_prompt.index_select(0, seats_B).unsqueeze(1))
    seen_BV, output_BV = (
        torch.zeros_like(logits_BV).scatter_add_(1, tokens_BL, counted.float()) for counted in (written_BL, output_BL)
    )
    presence, frequency, repetition = numbers_B7[:, 4:].unsqueeze(2).unbind(1)
    repeated_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = torch.where(seen_BV > 0, repeated_BV, logits_BV)
    return logits_BV - frequency * output_BV - presence * (output_BV > 0)


# Drawing.


def draw(logits_BV: Tensor, greedy_B: Tensor, numbers_B7: Tensor, draws_B: Tensor, filtered: bool) -> Tensor:
    """Draw by the inverse of the cumulative distribution, in the order of the vocabulary."""
    temperature_B1 = numbers_B7[:, :1]
    sharpness_B1 = 1 / torch.where(temperature_B1 == 0, 1.0, temperature_B1)
    logits_BV = (logits_BV - logits_BV.gather(1, greedy_B.unsqueeze(1))) * sharpness_B1
    weights_BV = torch.exp(logits_BV)
    if filtered:
        weights_BV = weights_BV.masked_fill(logits_BV < threshold(logits_BV, numbers_B7), 0.0)
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = draws_B.unsqueeze(1) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1).clamp_(max=logits_BV.shape[1] - 1)


def threshold(logits_BV: Tensor, numbers_B7: Tensor) -> Tensor:
    """Return the smallest logit that min-p, top-k and top-p leave in each row, [B, 1]; a row's largest is 0.

    Ties with it stay.
    """
    vocab_size = logits_BV.shape[1]
    top_p_B1, top_k_B1, min_p_B1 = (numbers_B7[:, column : column + 1] for column in (1, 2, 3))
    limit_B1 = torch.where(top_k_B1 > 0, top_k_B1, vocab_size).clamp(max=vocab_size).long()
    sorted_BV = logits_BV.sort(dim=1, descending=True).values
    rank_V = torch.arange(vocab_size, device=logits_BV.device)
    weights_BV = torch.exp(sorted_BV).double().masked_fill(rank_V >= limit_B1, 0.0)
    cumulative_BV = weights_BV.cumsum(-1)
    wanted_B1 = top_p_B1.double() * cumulative_BV[:, -1:]
    kept_B1 = ((cumulative_BV - weights_BV < wanted_B1) & (rank_V < limit_B1)).sum(-1, keepdim=True).clamp_(min=1)
    found_B1 = sorted_BV.gather(1, kept_B1 - 1)
    is_free_B1 = (limit_B1 == vocab_size) & (top_p_B1 == 1)
    return torch.maximum(torch.log(min_p_B1), torch.where(is_free_B1, -math.inf, found_B1))


# Random numbers.


def uniform(seed_B: Tensor, choice_B: Tensor, position_B: Tensor) -> Tensor:
    """Numbers in [0, 1) as float64, multiples of 2^-32, from the three keys alone (int64; splitmix64's finaliser,
    chained).
    """
    state_B = mix(seed_B + GOLDEN)
    state_B = mix(state_B ^ mix(choice_B + signed(2 * GOLDEN)))
    state_B = mix(state_B ^ mix(position_B + signed(3 * GOLDEN)))
    return shifted(state_B, 32).double() * 2.0**-32


def mix(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift logically to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    """Return the int64 with the same bits."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


GOLDEN = signed(0x9E3779B97F4A7C15)
