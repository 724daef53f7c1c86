"""Kernels around a decode step on a GPU: its inputs from the seats' rows, and what it sampled packed for the host.

Triton is imported with this module: only a runner with fused kernels does. B rows of the step (padded), S seats, L longest
sequence, C columns of a block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256
"""Table columns that one turn of the copy moves."""
NEVER = 2**31 - 1
"""A sequence that has not ended ends at this position."""


@triton.jit(do_not_specialize=["num_rows", "row_length", "num_columns", "table_length"])
def decode_inputs_kernel(
    inputs_3B,
    tokens_SL,
    tables_SC,
    ended_S,
    tokens_B,
    positions_B,
    next_B,
    slots_B,
    seq_lens_B,
    block_tables_BC,
    num_rows,
    row_length,
    num_columns,
    table_length,
    block_size: tl.constexpr,
    columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seat = tl.load(inputs_3B + row).to(tl.int64)
    position = tl.load(inputs_3B + num_rows + row)
    block = tl.load(inputs_3B + 2 * num_rows + row)
    taken = seat >= 0
    seat = tl.maximum(seat, 0)
    tl.store(tables_SC + seat * num_columns + position // block_size, block, mask=taken)
    lives = taken & (position < tl.load(ended_S + seat))
    token = tl.load(tokens_SL + seat * row_length + position, mask=taken, other=0)
    tl.store(tokens_B + row, token)
    tl.store(positions_B + row, tl.where(taken, position, 0))
    tl.store(next_B + row, tl.where(taken, position + 1, 0))
    tl.store(slots_B + row, tl.where(lives, block * block_size + position % block_size, -1))
    tl.store(seq_lens_B + row, tl.where(lives, position + 1, 0))
    used = tl.where(lives, position // block_size + 1, 0)
    for begin in range(0, used, columns):
        column = begin + tl.arange(0, columns)
        known = tl.load(tables_SC + seat * num_columns + column, mask=column < used - 1, other=0)
        entry = tl.where(column == used - 1, block, known)
        tl.store(block_tables_BC + row.to(tl.int64) * table_length + column, entry, mask=column < used)


def decode_inputs(
    inputs_3B: Tensor,
    tokens_SL: Tensor,
    tables_SC: Tensor,
    ended_S: Tensor,
    *,
    tokens_B: Tensor,
    positions_B: Tensor,
    next_B: Tensor,
    slots_B: Tensor,
    seq_lens_B: Tensor,
    block_tables_BC: Tensor,
    block_size: int,
) -> None:
    """Fill a decode step's buffers. All int32.

    `inputs_3B`: seat (-1: padding), position of the token to compute, and the block that takes it (entered in the seat's
    table here). A sequence that the stop test found ended computes nothing: no slot, no keys.
    """
    decode_inputs_kernel[(inputs_3B.shape[1],)](
        inputs_3B,
        tokens_SL,
        tables_SC,
        ended_S,
        tokens_B,
        positions_B,
        next_B,
        slots_B,
        seq_lens_B,
        block_tables_BC,
        inputs_3B.shape[1],
        tokens_SL.stride(0),
        tables_SC.stride(0),
        block_tables_BC.stride(0),
        block_size=block_size,
        columns=COLUMNS,
    )


@triton.jit(do_not_specialize=["num_rows"])
def finish_rows_kernel(
    seats_B,
    next_B,
    tokens_B,
    valid_B,
    stops_SE,
    ended_S,
    out_2B,
    num_rows,
    num_stops: tl.constexpr,
    never: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seat = tl.load(seats_B + row).to(tl.int64)
    taken = seat >= 0
    seat = tl.maximum(seat, 0)
    token = tl.load(tokens_B + row).to(tl.int32)
    valid = tl.load(valid_B + row).to(tl.int32)
    position = tl.load(next_B + row)
    stops = tl.load(stops_SE + seat * num_stops + tl.arange(0, num_stops))
    stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
    ended = tl.load(ended_S + seat)
    again = tl.where(ended == position, never, ended)
    tl.store(ended_S + seat, tl.where(stopped, tl.minimum(position, ended), again), mask=taken)
    tl.store(out_2B + row, token)
    tl.store(out_2B + num_rows + row, valid)


def finish_rows(
    seats_B: Tensor,
    next_B: Tensor,
    tokens_B: Tensor,
    valid_B: Tensor,
    stops_SE: Tensor,
    ended_S: Tensor,
    out_2B: Tensor,
) -> None:
    """The stop test of sampled tokens, and tokens and validity packed as int32 [2, B].

    `stops_SE`: each seat's stop tokens, filled up with -1 (E a power of two). `ended_S[seat]` becomes the position of the
    first one sampled; computing the same position again changes its answer.
    """
    finish_rows_kernel[(len(seats_B),)](
        seats_B,
        next_B,
        tokens_B,
        valid_B.view(torch.uint8),
        stops_SE,
        ended_S,
        out_2B,
        out_2B.shape[1],
        num_stops=stops_SE.shape[1],
        never=NEVER,
    )
