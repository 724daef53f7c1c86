"""Prompts whose attention flash-attn-4 computes: which steps it is worth, and which chunks share one call. No device.

flash-attn-4 reads keys that lie one after another, so those of the chunks are first copied out of the cache's blocks
into a scratch buffer of fixed size. Pairs are (query, key) pairs of the causal half: the work of attention, per head.

Made by `paged_prompts` for each step; read by the fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

FEWEST_PAIRS = 2**22
"""Least work of a step for flash-attn-4: a prompt of 2,900 tokens, or eight of 1,024. With 2**21 pairs of 32 heads it
took as long as our kernel, 210 us a layer, with 2**22 248 instead of 305 us."""
UNGRAPHED_PAIRS = 2**24
"""Least work for which a step that fits a graph runs without one, because graphs hold our kernel. With 32 layers of 32
heads flash-attn-4 saves 5.8 ms then (615 instead of 440 TFLOP/s), and the step takes longer than its launches."""
MOST_CHUNKS = 256
"""Chunks of one call: with more, flash-attn-4 compiles another kernel."""


class VarlenAttention(Protocol):
    """flash-attn-4, or what stands in for it."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        query_start: Tensor,
        key_start: Tensor,
        longest: tuple[int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Return out_TNH: causal attention in which a sequence's queries are the last of its keys.

        `query_start`, `key_start`: int32 [C + 1]. `longest`: most queries and most keys of a sequence.
        """
        ...


@dataclass(frozen=True)
class PromptAttention:
    """What computes the attention of long prompts, and from how many pairs on."""

    attend: VarlenAttention
    fewest_pairs: int = FEWEST_PAIRS
    ungraphed_pairs: int = UNGRAPHED_PAIRS


class ChunkGroup(NamedTuple):
    """Chunks of one call: neighbours whose keys fit into the scratch buffer together."""

    first: int
    """Number of the first one among the step's sequences."""
    end: int
    rows: tuple[int, int]
    """First row of the step, and the end."""
    num_keys: int
    longest: tuple[int, int]
    """Most queries and most keys of a chunk."""

    @property
    def num_chunks(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class GroupStarts:
    """A group, and its bounds on the device."""

    group: ChunkGroup
    query_start: Tensor
    """int32 [C + 1], from the group's first row on."""
    key_start: Tensor
    """int32 [C + 1]: places in the scratch buffer."""


@dataclass(frozen=True)
class LongPrompts:
    """The prompts of one step, with the buffers for their keys and values."""

    attend: VarlenAttention
    groups: tuple[GroupStarts, ...]
    keys: Tensor
    """[L, K, H] scratch, as `values`."""
    values: Tensor


def count_pairs(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the pairs of chunks of so many tokens at these positions."""
    return sum(new * old + new * (new + 1) // 2 for old, new in zip(starts, lengths, strict=True))


def group_chunks(
    query_start: Sequence[int], seq_lens: Sequence[int], first: int, max_keys: int
) -> Iterator[ChunkGroup]:
    """Yield the sequences from `first` on in groups of at most `max_keys` keys.

    `query_start`: [S + 1]; `seq_lens`: [S] keys, those of the step included; one sequence has at most `max_keys`.
    """
    begin, num_keys = first, 0
    for sequence in range(first, len(seq_lens)):
        keys = seq_lens[sequence]
        if sequence > begin and (num_keys + keys > max_keys or sequence - begin == MOST_CHUNKS):
            yield chunk_group(query_start, seq_lens, begin, sequence)
            begin, num_keys = sequence, 0
        num_keys += keys
    if begin < len(seq_lens):
        yield chunk_group(query_start, seq_lens, begin, len(seq_lens))


def chunk_group(query_start: Sequence[int], seq_lens: Sequence[int], first: int, end: int) -> ChunkGroup:
    lengths = [query_start[i + 1] - query_start[i] for i in range(first, end)]
    keys = seq_lens[first:end]
    return ChunkGroup(first, end, (query_start[first], query_start[end]), sum(keys), (max(lengths), max(keys)))
