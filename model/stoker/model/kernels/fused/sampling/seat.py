"""Sampling parameters of one seat, read inside a Triton kernel: column numbers and loads of `SamplingTable.numbers`.

The layout is `stoker.model.kernels.sampling.NUMBERS`. The engine writes the table; the kernels of this folder only read
it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stoker.model.kernels.sampling import NUMBERS

NUM_NUMBERS = tl.constexpr(len(NUMBERS))
TEMPERATURE = tl.constexpr(NUMBERS.index("temperature"))
TOP_P = tl.constexpr(NUMBERS.index("top_p"))
TOP_K = tl.constexpr(NUMBERS.index("top_k"))
MIN_P = tl.constexpr(NUMBERS.index("min_p"))
PRESENCE = tl.constexpr(NUMBERS.index("presence_penalty"))
FREQUENCY = tl.constexpr(NUMBERS.index("frequency_penalty"))
REPETITION = tl.constexpr(NUMBERS.index("repetition_penalty"))


@triton.jit
def row_numbers(numbers, seat):
    """Return where the numbers of a seat begin; those of seat 0 for padding."""
    return numbers + tl.maximum(seat, 0).to(tl.int64) * NUM_NUMBERS


@triton.jit
def row_sharpness(numbers, seat):
    """Return 1 / temperature; 1 for greedy rows, whose draw is not used."""
    temperature = tl.load(row_numbers(numbers, seat) + TEMPERATURE)
    return tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))
