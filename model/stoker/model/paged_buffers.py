"""A step in fixed buffers on the device, for kernels that read block tables by themselves: taking a step over costs a
few small copies and never waits.

What follows the batch in the buffers is padding (length 0, slot -1), so that a graph captured for the whole size
computes it as nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.fused.attention.splits import DecodeScratch
from stoker.model.kernels.sequences import DeviceSequences, upload
from stoker.model.paged_batch import PagedBatch, PagedSize
from stoker.model.paged_plan import check_shapes

COLUMN_ALIGNMENT = 16
"""Rows of block tables begin at a multiple of so many numbers: Triton compiles a kernel for each kind of distance, and
so there is one kind, whatever the longest sequence."""


class PagedBuffers:
    """int32 on the cache's device.

    A smaller size may be a view of a larger one's buffers, as long as their steps follow one another on one stream.
    """

    query_start: Tensor
    """[S + 1]"""
    rows: Tensor
    """[S + 1]: 0, 1, 2, ..: the query_start of every decode step; never written again."""
    seq_lens: Tensor
    """[S]"""
    slots: Tensor
    """[T]"""
    block_tables: Tensor
    """[S, B]"""
    scratch: DecodeScratch

    def __init__(self, cache: Tensor, num_heads: int, size: PagedSize, larger: PagedBuffers | None = None) -> None:
        """`cache`: [blocks, layers, 2, block_size, K, H]."""
        self.size = size
        if larger is None:
            self.allocate(cache, num_heads)
        else:
            self.share(larger)

    def allocate(self, cache: Tensor, num_heads: int) -> None:
        size, device = self.size, cache.device
        self.query_start = torch.zeros(size.max_sequences + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(size.max_sequences + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(size.max_sequences, dtype=torch.int32, device=device)
        self.slots = torch.full((size.max_tokens,), -1, dtype=torch.int32, device=device)
        columns = -(-size.max_blocks // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
        tables = torch.zeros(size.max_sequences, columns, dtype=torch.int32, device=device)
        self.block_tables = tables[:, : size.max_blocks]
        max_keys = size.max_blocks * cache.shape[3]
        self.scratch = DecodeScratch(size.max_sequences, num_heads, cache.shape[-2], cache.shape[-1], device, max_keys)

    def share(self, larger: PagedBuffers) -> None:
        size = self.size
        self.check_holds(larger.size)
        self.query_start = larger.query_start[: size.max_sequences + 1]
        self.rows = larger.rows[: size.max_sequences + 1]
        self.seq_lens = larger.seq_lens[: size.max_sequences]
        self.slots = larger.slots[: size.max_tokens]
        self.block_tables = larger.block_tables[: size.max_sequences]
        self.scratch = larger.scratch

    def check_holds(self, larger: PagedSize) -> None:
        size = self.size
        if (
            size.max_tokens > larger.max_tokens
            or size.max_sequences > larger.max_sequences
            or size.max_blocks != larger.max_blocks
        ):
            raise ValueError(f"paged buffers: {size} does not fit into the buffers of {larger}")

    def take(self, batch: PagedBatch) -> DeviceSequences:
        """Copy one step in.

        Host tensors may be reused at once; tensors that are these buffers already are left alone.
        """
        check_shapes(batch, self.size)
        num_decodes = count_decodes(batch) if batch.num_decodes is None else batch.num_decodes
        is_decode = num_decodes == batch.num_sequences
        device = self.seq_lens.device
        if not is_decode:  # in a decode step row i is sequence i's
            copy_front(self.query_start, batch.query_start, device, None)
        copy_front(self.seq_lens, batch.seq_lens, device, 0 if is_decode else None)
        copy_front(self.slots, batch.slot_mapping, device, -1 if is_decode else None)
        if batch.block_tables.data_ptr() != self.block_tables.data_ptr():
            tables = upload(batch.block_tables, device)
            self.block_tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        return self.adopt(batch.num_tokens, batch.num_sequences, num_decodes)

    def adopt(self, num_tokens: int, num_sequences: int, num_decodes: int) -> DeviceSequences:
        """Take over a step that is in the buffers already, padding included."""
        return DeviceSequences(
            num_tokens,
            num_sequences,
            num_decodes,
            self.rows if num_decodes == num_sequences else self.query_start,
            self.seq_lens,
            self.slots,
            self.block_tables,
            self.scratch,
        )


def copy_front(buffer: Tensor, numbers: Tensor, device: torch.device, padding: int | None) -> None:
    """Copy the numbers into the front of the buffer, and the padding behind them."""
    if numbers.data_ptr() != buffer.data_ptr():
        is_upload = device.type == "cuda" and numbers.device.type == "cpu"
        buffer[: len(numbers)].copy_(numbers.pin_memory() if is_upload else numbers, non_blocking=True)
    if padding is not None and len(numbers) < len(buffer):
        buffer[len(numbers) :].fill_(padding)


def count_decodes(batch: PagedBatch) -> int:
    """Return the number of leading sequences of one token."""
    if batch.query_start.device.type != "cpu":
        raise ValueError("paged batch: num_decodes must be given where query_start is on the device")
    lengths = batch.query_start.diff().tolist()
    return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
