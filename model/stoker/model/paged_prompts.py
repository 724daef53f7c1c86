"""The engine's long prompts: plans the calls of flash-attn-4 for a step, and keeps the buffer for their keys.

K kv heads, H head_dim, L keys.

Made once by the engine's runner, used by each `PagedAttend` whose steps are launched one by one; these follow one
another on a stream, so they share the buffer.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from stoker.model.kernels.kernel_set import MissingKernel
from stoker.model.kernels.long_prompts import (
    ChunkGroup,
    GroupStarts,
    LongPrompts,
    PromptAttention,
    count_pairs,
    group_chunks,
)
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sequences import upload
from stoker.model.paged_batch import PagedBatch

HEAD_SIZES = range(8, 257, 8)
"""Head sizes that flash-attn-4 takes on Hopper."""


class PromptPlan:
    """Decides per step whether flash-attn-4 computes the prompts' attention."""

    def __init__(self, cache: Tensor, max_keys: int, attention: PromptAttention) -> None:
        """`cache`: [blocks, layers, 2, block_size, K, H]. `max_keys`: at least those of the longest sequence.

        Raises MissingKernel where flash-attn-4 does not take the size of the heads.
        """
        if cache.shape[-1] not in HEAD_SIZES:
            raise MissingKernel(
                f"attention: 'flash' takes head sizes of 8 to 256 in steps of 8, not {cache.shape[-1]}; allowed: auto, "
                "stoker"
            )
        self.attention = attention
        self.scratch = torch.empty(2, max_keys, *cache.shape[-2:], dtype=cache.dtype, device=cache.device)

    def pays_ungraphed(self, num_pairs: int) -> bool:
        """Whether a step with so many pairs of prompts is faster without its graph."""
        return num_pairs >= self.attention.ungraphed_pairs

    def plan(self, batch: PagedBatch, num_decodes: int) -> LongPrompts | None:
        """Plan a step; None: our kernel is faster. Reads the batch's numbers, which should be on the host."""
        bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        old = [total - new for total, new in zip(seq_lens, lengths, strict=True)]
        if count_pairs(old[num_decodes:], lengths[num_decodes:]) < max(self.attention.fewest_pairs, 1):
            return None
        groups = tuple(group_chunks(bounds, seq_lens, num_decodes, self.scratch.shape[1]))
        starts = self.send(groups, bounds, seq_lens)
        return LongPrompts(self.attention.attend, starts, *self.scratch)

    def send(self, groups: tuple[ChunkGroup, ...], bounds: list[int], seq_lens: list[int]) -> tuple[GroupStarts, ...]:
        """Copy the groups' bounds to the device, all at once."""
        numbers: list[int] = []
        for group in groups:
            numbers += [bound - group.rows[0] for bound in bounds[group.first : group.end + 1]]
            numbers += accumulate(seq_lens[group.first : group.end], initial=0)
        sent = upload(torch.tensor(numbers, dtype=torch.int32), self.scratch.device)
        pieces = torch.split(sent, [group.num_chunks + 1 for group in groups for _ in range(2)])
        return tuple(
            GroupStarts(group, pieces[2 * number], pieces[2 * number + 1]) for number, group in enumerate(groups)
        )


def choose_prompts(ops: Ops, name: str, dtype: torch.dtype, given: PromptAttention | None) -> PromptAttention | None:
    """Return what attends for long prompts where attention `name` is flash: `given`, or flash-attn-4; else None.

    Raises MissingKernel where it is not installed or cannot be used with these kernels or this dtype.
    """
    if given is not None:
        return given
    if ops.attention(name, dtype, "paged") != "flash":
        return None
    from stoker.model.kernels.fused.attention.flash import attend_varlen  # needs Triton

    return PromptAttention(attend_varlen)


def prompt_keys(max_model_len: int, max_batch_tokens: int) -> int:
    """Return the keys that the buffer holds: the longest sequence, and whole prompts that fill a step."""
    return max(max_model_len, max_batch_tokens)


def scratch_bytes(num_kv_heads: int, head_dim: int, max_keys: int, dtype: torch.dtype) -> int:
    """Return the memory of the buffer on one rank, which has so many kv heads."""
    return 2 * max_keys * num_kv_heads * head_dim * dtype.itemsize
