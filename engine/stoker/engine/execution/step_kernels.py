"""Triton kernels around a pass: fill its inputs from the seats, and pack its sampled tokens for the host.

Imported by `step_graphs` alone, and only with fused kernels, because it imports triton. T rows of the step (padded):
first D for sequences that decode, then those of Q prompts; B = D + Q samples, S seats, L longest sequence, C columns of
a block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.engine.execution.pass_inputs import PassInputs
from stoker.model.paged_buffers import PagedBuffers

COLUMNS = 256
"""Table columns that one iteration copies."""
TILE = 64
"""Rows of prompts per program."""
NEVER = 2**31 - 1
"""End position of a sequence that has not ended."""


@triton.jit(do_not_specialize=["num_rows", "num_decodes", "num_prompts", "row_length", "num_columns", "table_length"])
def pass_inputs_kernel(
    seats_B,
    following_B,
    blocks_D,
    prompt_seats_Q,
    prompt_starts_Q,
    begins,
    tokens_SL,
    tables_SC,
    ended_S,
    tokens_T,
    positions_T,
    slots_T,
    query_start,
    seq_lens,
    block_tables,
    num_rows,
    num_decodes,
    num_prompts,
    row_length,
    num_columns,
    table_length,
    has_prompts: tl.constexpr,
    block_size: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Fill a pass: one program per decode, then (`has_prompts`) one per prompt and one per tile of rows."""
    program = tl.program_id(0)
    if program < num_decodes:
        fill_decode(
            program, seats_B, following_B, blocks_D, begins, tokens_SL, tables_SC, ended_S, tokens_T, positions_T,
            slots_T, query_start, seq_lens, block_tables, row_length, num_columns, table_length,
            has_prompts, block_size, columns,
        )  # fmt: skip
    elif has_prompts:
        if program < num_decodes + num_prompts:
            fill_prompt(
                program, program - num_decodes, num_prompts, prompt_seats_Q, prompt_starts_Q, begins, tables_SC,
                query_start, seq_lens, block_tables, num_columns, table_length, block_size, columns,
            )  # fmt: skip
        else:
            fill_rows(
                (program - num_decodes - num_prompts) * tile, num_rows, num_prompts, prompt_seats_Q, prompt_starts_Q,
                begins, tokens_SL, tables_SC, tokens_T, positions_T, slots_T, row_length, num_columns,
                block_size, tile,
            )  # fmt: skip


@triton.jit
def fill_decode(
    row, seats_B, following_B, blocks_D, begins, tokens_SL, tables_SC, ended_S, tokens_T, positions_T, slots_T,
    query_start, seq_lens, block_tables, row_length, num_columns, table_length,
    has_prompts: tl.constexpr, block_size: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Fill a sequence that decodes, and its row."""
    known_seat = tl.load(seats_B + row).to(tl.int64)
    position = tl.load(following_B + row) - 1
    block = tl.load(blocks_D + row)
    taken = known_seat >= 0
    seat = tl.maximum(known_seat, 0)
    tl.store(tables_SC + seat * num_columns + position // block_size, block, mask=taken)
    lives = taken & (position < tl.load(ended_S + seat))
    token = tl.load(tokens_SL + seat * row_length + position, mask=taken, other=0)
    if has_prompts:  # whose rows begin where the last decode's ends
        writes = taken
        tl.store(query_start + row, tl.minimum(row, tl.load(begins)))
    else:
        writes = row >= 0
    tl.store(tokens_T + row, token, mask=writes)
    tl.store(positions_T + row, tl.where(taken, position, 0), mask=writes)
    tl.store(slots_T + row, tl.where(lives, block * block_size + position % block_size, -1), mask=writes)
    tl.store(seq_lens + row, tl.where(lives, position + 1, 0))
    used = tl.where(lives, position // block_size + 1, 0)
    for begin in range(0, used, columns):
        column = begin + tl.arange(0, columns)
        known = tl.load(tables_SC + seat * num_columns + column, mask=column < used - 1, other=0)
        entry = tl.where(column == used - 1, block, known)
        tl.store(block_tables + row.to(tl.int64) * table_length + column, entry, mask=column < used)


@triton.jit
def fill_prompt(
    sequence, prompt, num_prompts, prompt_seats_Q, prompt_starts_Q, begins, tables_SC, query_start, seq_lens,
    block_tables, num_columns, table_length, block_size: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Fill a chunk of a prompt as a sequence."""
    seat = tl.load(prompt_seats_Q + prompt).to(tl.int64)
    first, end = tl.load(begins + prompt), tl.load(begins + prompt + 1)
    seq_len = tl.where(seat < 0, 0, tl.load(prompt_starts_Q + prompt) + end - first)
    tl.store(query_start + sequence, first)
    tl.store(query_start + sequence + 1, end, mask=prompt == num_prompts - 1)
    tl.store(seq_lens + sequence, seq_len)
    used = (seq_len + block_size - 1) // block_size
    for begin in range(0, used, columns):
        column = begin + tl.arange(0, columns)
        entry = tl.load(tables_SC + seat * num_columns + column, mask=column < used, other=0)
        tl.store(block_tables + sequence.to(tl.int64) * table_length + column, entry, mask=column < used)


@triton.jit
def fill_rows(
    first_row, num_rows, num_prompts, prompt_seats_Q, prompt_starts_Q, begins, tokens_SL, tables_SC, tokens_T,
    positions_T, slots_T, row_length, num_columns, block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Fill a tile's rows that belong to prompts or to the padding behind them."""
    row = first_row + tl.arange(0, tile)
    seat = tl.full((tile,), -1, tl.int64)
    position = tl.zeros((tile,), tl.int32)
    for prompt in range(num_prompts):
        first = tl.load(begins + prompt)
        inside = (row >= first) & (row < tl.load(begins + prompt + 1))
        seat = tl.where(inside, tl.load(prompt_seats_Q + prompt).to(tl.int64), seat)
        position = tl.where(inside, tl.load(prompt_starts_Q + prompt) + row - first, position)
    taken = seat >= 0
    token = tl.load(tokens_SL + seat * row_length + position, mask=taken, other=0)
    block = tl.load(tables_SC + seat * num_columns + position // block_size, mask=taken, other=0)
    writes = (row >= tl.load(begins)) & (row < num_rows)
    tl.store(tokens_T + row, token, mask=writes)
    tl.store(positions_T + row, position, mask=writes)
    tl.store(slots_T + row, tl.where(taken, block * block_size + position % block_size, -1), mask=writes)


def fill_pass(
    inputs: PassInputs[Tensor],
    tokens_SL: Tensor,
    tables_SC: Tensor,
    ended_S: Tensor,
    *,
    tokens_T: Tensor,
    positions_T: Tensor,
    buffers: PagedBuffers,
    block_size: int,
) -> None:
    """Fill a pass's buffers, all int32, from the seats' rows.

    A decode's block is entered in its seat's table here; those of prompts are there already. A sequence that the stop
    test found ended computes nothing: no slot, no keys.
    """
    num_decodes, num_prompts = len(inputs.blocks), len(inputs.prompt_seats)
    tiles = triton.cdiv(len(tokens_T), TILE) if num_prompts else 0
    pass_inputs_kernel[(num_decodes + num_prompts + tiles,)](
        inputs.seats,
        inputs.following,
        inputs.blocks,
        inputs.prompt_seats,
        inputs.prompt_starts,
        inputs.begins,
        tokens_SL,
        tables_SC,
        ended_S,
        tokens_T,
        positions_T,
        buffers.slots,
        buffers.query_start,
        buffers.seq_lens,
        buffers.block_tables,
        len(tokens_T),
        num_decodes,
        num_prompts,
        tokens_SL.stride(0),
        tables_SC.stride(0),
        buffers.block_tables.stride(0),
        has_prompts=num_prompts > 0,
        block_size=block_size,
        columns=COLUMNS,
        tile=TILE,
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
    into_SL,
    into_stride,
    num_rows,
    num_stops: tl.constexpr,
    never: tl.constexpr,
    writes: tl.constexpr,
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
    if writes:
        tl.store(into_SL + seat * into_stride + position, token.to(into_SL.dtype.element_ty), mask=taken)


def finish_rows(
    seats_B: Tensor,
    next_B: Tensor,
    tokens_B: Tensor,
    valid_B: Tensor,
    stops_SE: Tensor,
    ended_S: Tensor,
    out_2B: Tensor,
    into_SL: Tensor | None = None,
) -> None:
    """Test sampled tokens for stop tokens, pack tokens and validity as int32 [2, B], and write tokens to their seats
    where `into_SL` is given.

    `stops_SE`: each seat's stop tokens, filled up with -1 (E a power of two). `ended_S[seat]` becomes the position of
    the first one sampled; computing the same position again changes its answer.
    """
    finish_rows_kernel[(len(seats_B),)](
        seats_B,
        next_B,
        tokens_B,
        valid_B.view(torch.uint8),
        stops_SE,
        ended_S,
        out_2B,
        into_SL,
        0 if into_SL is None else into_SL.stride(0),
        out_2B.shape[1],
        num_stops=stops_SE.shape[1],
        never=NEVER,
        writes=into_SL is not None,
    )
