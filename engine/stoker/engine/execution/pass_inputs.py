"""The inputs of a pass of fixed size: one packed buffer of int32, with the same layout on host and device.

T rows, first D for sequences that decode, then those of Q prompts; B = D + Q samples.

Filled by `step_graphs` from the runner's numbers; read by `step_kernels`.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.step_rows import StepRows

Numbers = TypeVar("Numbers", np.ndarray, Tensor)

ALIGNMENT = 4
"""In numbers: each part begins at a multiple of 16 bytes, for which kernels are compiled."""


class PassInputs(NamedTuple, Generic[Numbers]):
    """Views of the packed buffer."""

    seats: Numbers
    """[B] seats that sample: decodes, then any others; -1: padding."""
    following: Numbers
    """[B] position of the sampled token; a decode's own token is the one before it."""
    blocks: Numbers
    """[D] block that a decode's token is written to."""
    rows: Numbers
    """[B] row whose hidden state gives the sample. Empty without prompts, as are the parts below: the row is the
    sample's own."""
    prompt_seats: Numbers
    """[Q] seats of prompts; -1: padding."""
    prompt_starts: Numbers
    """[Q] position of the chunk's first token."""
    begins: Numbers
    """[Q + 1] first row of each prompt, and the end of all; padding begins and ends there, too."""


def split(packed: Numbers, shape: PassShape) -> PassInputs[Numbers]:
    """Split a buffer of at least `packed_length(shape)` numbers into its parts."""
    parts, begin = [], 0
    for length in part_lengths(shape):
        parts.append(packed[begin : begin + length])
        begin += aligned(length)
    return PassInputs(*parts)


def packed_length(shape: PassShape) -> int:
    return sum(map(aligned, part_lengths(shape)))


def part_lengths(shape: PassShape) -> tuple[int, ...]:
    always = (shape.sequences, shape.sequences, shape.decodes)
    return (
        (*always, shape.sequences, shape.prompts, shape.prompts, shape.prompts + 1)
        if shape.prompts
        else (*always, 0, 0, 0, 0)
    )


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def pack_inputs(shape: PassShape, rows: StepRows, blocks_D: np.ndarray) -> np.ndarray:
    """Pack a step that fits the shape. `blocks_D`: block of each decode's token."""
    packed = np.zeros(packed_length(shape), dtype=np.int32)
    inputs = split(packed, shape)
    decodes = rows.num_decodes
    inputs.seats.fill(-1)
    inputs.seats[:decodes] = rows.seats[:decodes]
    inputs.following[:decodes] = rows.ends[:decodes]
    inputs.blocks[:decodes] = blocks_D
    if shape.prompts:
        fill_prompts(inputs, shape, rows)
    return packed


def fill_prompts(inputs: PassInputs[np.ndarray], shape: PassShape, rows: StepRows) -> None:
    """Fill in chunks of prompts, and samples that are not a decode's own."""
    others, behind = ~rows.is_own, slice(shape.decodes, shape.decodes + rows.num_others)
    inputs.seats[behind] = rows.sample_seats[others]
    inputs.following[behind] = rows.sample_positions[others]
    inputs.rows[: shape.decodes] = np.arange(shape.decodes)
    inputs.rows[behind] = rows.sample_rows[others]
    inputs.prompt_seats.fill(-1)
    inputs.prompt_seats[: rows.num_prompts] = rows.seats[rows.num_decodes :]
    inputs.prompt_starts[: rows.num_prompts] = rows.starts[rows.num_decodes :]
    inputs.begins.fill(rows.num_tokens)
    inputs.begins[: rows.num_prompts] = rows.begins[rows.num_decodes : -1]


def sample_places(shape: PassShape, rows: StepRows) -> np.ndarray:
    """[samples of the step] index of each one among the shape's B samples."""
    if not shape.prompts:
        return rows.sample_chunks
    return np.where(rows.is_own, rows.sample_chunks, shape.decodes - 1 + (~rows.is_own).cumsum())
