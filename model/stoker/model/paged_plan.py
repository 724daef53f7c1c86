"""A step planned on the host, for kernels that gather whole sequences: which rows of the cache each of them takes.

B blocks per table, S sequences, T tokens.

Immutable; made for each step by `paged_attend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PagedSequences, group_by_length
from stoker.model.paged_batch import PagedBatch, PagedSize


class HostPlan:
    """Reads the batch's numbers, so it waits for the device where they are there."""

    def __init__(self, cache: Tensor, size: PagedSize, *, groups_decodes: bool) -> None:
        """`cache`: [blocks, layers, 2, block_size, K, H].

        `groups_decodes`: sequences of one token are attended together.
        """
        self.size, self.groups_decodes = size, groups_decodes
        self.num_layers, self.block_size = cache.shape[1], cache.shape[3]
        device = cache.device
        self.block_tables = torch.zeros(size.max_sequences, size.max_blocks, dtype=torch.int64, device=device)
        self.slots = torch.zeros(size.max_tokens, dtype=torch.int64, device=device)
        self.layer_index = torch.arange(self.num_layers, device=device)[:, None, None]
        self.kind_index = torch.arange(2, device=device)[None, :, None]

    def take(self, batch: PagedBatch) -> PagedSequences:
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        self.check(batch, starts, lengths)
        self.block_tables[: len(lengths), : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)
        self.slots[: batch.num_tokens].copy_(batch.slot_mapping[: batch.num_tokens], non_blocking=True)
        single = [i for i in range(len(lengths)) if starts[i + 1] - starts[i] == 1] if self.groups_decodes else []
        others = sorted(set(range(len(lengths))) - set(single))
        return PagedSequences(
            num_tokens=batch.num_tokens,
            slot_rows=self.slot_rows(batch.num_tokens),
            decode=tuple(self.decode_group(members, starts, lengths) for members in group_by_length(single, lengths)),
            prefill=tuple(self.cached_sequence(i, starts, lengths) for i in others),
        )

    def check(self, batch: PagedBatch, starts: list[int], lengths: list[int]) -> None:
        check_shapes(batch, self.size)
        needs = -(-max(lengths, default=0) // self.block_size)
        if starts[-1] != batch.num_tokens or batch.block_tables.shape[1] < needs:
            raise ValueError(f"paged batch: query_start ending at {starts[-1]} and {describe(batch)} do not fit")

    def slot_rows(self, num_tokens: int) -> Tensor:
        """int64 [layers, 2T]: rows of the cache seen as [rows, K, H] for the new keys, then the new values."""
        block_size, num_layers = self.block_size, self.num_layers
        slots = self.slots[:num_tokens]
        block, offset = slots // block_size, slots % block_size
        return (((block * num_layers + self.layer_index) * 2 + self.kind_index) * block_size + offset).flatten(1)

    def block_rows(self, tables: Tensor) -> Tensor:
        """int64 [layers, 2 * blocks]: rows of the cache seen as [rows, block_size, K, H]."""
        return ((tables.reshape(-1) * self.num_layers + self.layer_index) * 2 + self.kind_index).flatten(1)

    def decode_group(self, members: list[int], starts: list[int], lengths: list[int]) -> DecodeGroup:
        device = self.block_tables.device
        num_blocks = -(-max(lengths[i] for i in members) // self.block_size)
        is_whole_pass = members == list(range(len(lengths))) and starts[-1] == len(lengths)
        chosen = slice(0, len(members)) if is_whole_pass else torch.tensor(members, device=device)
        seq_lens = torch.tensor([lengths[i] for i in members], device=device)
        padded_len = num_blocks * self.block_size
        return DecodeGroup(
            token_rows=None if is_whole_pass else torch.tensor([starts[i] for i in members], device=device),
            num_sequences=len(members),
            padded_len=padded_len,
            seq_lens=seq_lens,
            block_rows=self.block_rows(self.clean_tables(self.block_tables[chosen, :num_blocks], seq_lens)),
            masks={},
        )

    def clean_tables(self, tables_SB: Tensor, seq_lens_S: Tensor) -> Tensor:
        """Replace ids beyond a sequence's end by its first block. The mask hides what is read there."""
        used_S = (seq_lens_S + self.block_size - 1) // self.block_size
        inside = torch.arange(tables_SB.shape[1], device=tables_SB.device)[None, :] < used_S[:, None]
        return torch.where(inside, tables_SB, tables_SB[:, :1])

    def cached_sequence(self, index: int, starts: list[int], lengths: list[int]) -> CachedSequence:
        begin, end, seq_len = starts[index], starts[index + 1], lengths[index]
        tables = self.block_tables[index, : -(-seq_len // self.block_size)]
        return CachedSequence(begin, end, seq_len, self.block_rows(tables), {})


def check_shapes(batch: PagedBatch, size: PagedSize) -> None:
    """Check what can be checked without the numbers. Raises ValueError."""
    num_sequences, num_blocks = batch.num_sequences, batch.block_tables.shape[1]
    if (
        len(batch.query_start) != num_sequences + 1
        or batch.block_tables.shape[0] != num_sequences
        or len(batch.slot_mapping) < batch.num_tokens
    ):
        raise ValueError(f"paged batch: {describe(batch)} do not fit")
    if batch.num_tokens > size.max_tokens or num_sequences > size.max_sequences or num_blocks > size.max_blocks:
        raise ValueError(
            f"paged batch: {batch.num_tokens} tokens of {num_sequences} sequences with {num_blocks} blocks exceed "
            f"{size}"
        )


def describe(batch: PagedBatch) -> str:
    return (
        f"query_start {tuple(batch.query_start.shape)}, seq_lens {tuple(batch.seq_lens.shape)}, "
        f"block_tables {tuple(batch.block_tables.shape)}, slot_mapping {tuple(batch.slot_mapping.shape)} and "
        f"num_tokens {batch.num_tokens}"
    )
