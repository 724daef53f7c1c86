"""Changes of logits before anything else: additions, then penalties of the tokens that were seen.

L longest sequence.

Called first by `sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.sampling.seat import FREQUENCY, PRESENCE, REPETITION, row_numbers
from stoker.model.kernels.sampling import Adjustments, SampleRows, SamplingTable

COUNT_TOKENS = 1024
"""Tokens of the history that one program counts."""
PENALTY_LOGITS = 4096
"""Logits that one program penalises."""
IN_PROMPT = tl.constexpr(1 << 30)
"""Flag in a token's count: it stands in the prompt. The count itself is of the output."""


def adjust(logits_BV: Tensor, rows: SampleRows, table: SamplingTable, adjustments: Adjustments) -> Tensor:
    """Return a copy of the logits (float32) with additions and the penalties of tokens that were seen."""
    num_rows, vocab_size = logits_BV.shape
    adjusted = logits_BV.clone()
    add_kernel[(num_rows,)](
        adjusted,
        adjustments.entry_start,
        adjustments.entry_tokens,
        adjustments.entry_biases,
        vocab_size,
        BLOCK=128,
        enable_fp_fusion=True,
        num_warps=4,
    )
    if adjustments.penalised:
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits_BV.device)
        history = adjustments.history
        count_kernel[(num_rows, triton.cdiv(history.shape[1], COUNT_TOKENS))](
            counts,
            rows.seats,
            rows.positions,
            table.numbers,
            history,
            adjustments.num_prompt,
            history.stride(0),
            vocab_size,
            BLOCK=COUNT_TOKENS,
            enable_fp_fusion=True,
            num_warps=4,
        )
        penalise_kernel[(num_rows, triton.cdiv(vocab_size, PENALTY_LOGITS))](
            adjusted,
            counts,
            rows.seats,
            table.numbers,
            vocab_size,
            BLOCK=PENALTY_LOGITS,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return adjusted


@triton.jit
def add_kernel(adjusted, entry_start, entry_tokens, entry_biases, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(entry_start + row + 1)
    for begin in range(tl.load(entry_start + row), end, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(entry_tokens + entry, mask=inside, other=0)
        bias = tl.load(entry_biases + entry, mask=inside, other=0.0)
        tl.atomic_add(adjusted + row.to(tl.int64) * vocab_size + token, bias, mask=inside)


@triton.jit
def is_penalised(own):
    repeats = tl.load(own + REPETITION) != 1.0
    return repeats | (tl.load(own + PRESENCE) != 0.0) | (tl.load(own + FREQUENCY) != 0.0)


@triton.jit
def count_kernel(
    counts, seats, positions, numbers, history, num_prompt, history_stride, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    length = tl.load(positions + row)
    if (seat >= 0) & (tl.program_id(1) * BLOCK < length) & is_penalised(row_numbers(numbers, seat)):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(history + seat.to(tl.int64) * history_stride + place, mask=inside, other=0)
        is_output = place >= tl.load(num_prompt + seat)
        target = counts + row * vocab_size + token
        tl.atomic_add(target, 1, mask=inside & is_output)
        tl.atomic_or(target, IN_PROMPT, mask=inside & ~is_output)


@triton.jit
def penalise_kernel(adjusted, counts, seats, numbers, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    own = row_numbers(numbers, seat)
    if (seat >= 0) & is_penalised(own):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(counts + row * vocab_size + token, mask=token < vocab_size, other=0)
        seen = count != 0
        values = tl.load(adjusted + row * vocab_size + token, mask=seen, other=0.0)
        repetition = tl.load(own + REPETITION)
        values = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        output = (count & (IN_PROMPT - 1)).to(tl.float32)
        values -= tl.load(own + FREQUENCY) * output
        values -= tl.where(output > 0.0, tl.load(own + PRESENCE), 0.0)
        tl.store(adjusted + row * vocab_size + token, values, mask=seen)
