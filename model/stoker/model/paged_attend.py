"""The engine's attention: keys and values live in blocks of a cache, sequences reach them through block tables.

It lies beside the model so that the kernels stay below both programs; it knows no request and no scheduler. T tokens, S sequences, B blocks per table, N heads, K kv heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.attend import LayerAttention, RotaryRows
from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PagedSequences, group_by_length
from stoker.model.parallel import shard_size


class KVCache:
    """The blocks: `data` is [blocks, layers, 2, block_size, K, H], so that a block is one contiguous piece over all layers; 2 = keys, values."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        layers: range | None = None,
    ) -> None:
        self.layers = layers if layers is not None else range(config.num_layers)
        """Global indices of the layers that this rank runs."""
        num_kv_heads = shard_size(config.num_kv_heads, group, "num_kv_heads")
        self.data = torch.zeros(
            num_blocks, len(self.layers), 2, block_size, num_kv_heads, config.head_dim, dtype=dtype, device=device
        )

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self.data.shape[3]

    @staticmethod
    def block_bytes(config: ModelConfig, *, block_size: int, dtype: torch.dtype, tp_size: int = 1) -> int:
        """Memory of one block over all layers on one rank."""
        return config.num_layers * 2 * block_size * (config.num_kv_heads // tp_size) * config.head_dim * dtype.itemsize

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks; no target may be a source."""
        device = self.data.device
        self.data.index_copy_(
            0, torch.tensor(targets, device=device), self.data.index_select(0, torch.tensor(sources, device=device))
        )


@dataclass(frozen=True, kw_only=True)
class PagedSize:
    """The largest step that one PagedAttend can hold."""

    max_tokens: int
    max_sequences: int
    max_blocks: int
    """Blocks in one table."""


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """One step's sequences, as int32 tensors on the host. A sequence's tokens lie together and are the last ones of it."""

    query_start: Tensor
    """[S + 1]: where each sequence's tokens begin, and the end."""
    seq_lens: Tensor
    """[S]: tokens of each sequence, those of this step included."""
    block_tables: Tensor
    """[S, B]: block ids in order; ids beyond a sequence's end are not read."""
    slot_mapping: Tensor
    """[T]: block id * block_size + offset, where each token's key and value go."""
    num_tokens: int


class PagedAttend:
    """Built once per captured size on fixed buffers; `prepare` fills them for one step, then the model may be called once per step."""

    def __init__(self, ops: Ops, attention: str, cache: KVCache, size: PagedSize) -> None:
        """`attention`: auto | stoker | sdpa."""
        self.ops, self.cache, self.size = ops, cache, size
        self.attention = ops.attention(attention)
        device = cache.data.device
        self.block_tables = torch.zeros(size.max_sequences, size.max_blocks, dtype=torch.int64, device=device)
        self.slots = torch.zeros(size.max_tokens, dtype=torch.int64, device=device)
        self.layer_index = torch.arange(len(cache.layers), device=device)[:, None, None]
        self.kind_index = torch.arange(2, device=device)[None, :, None]
        self.sequences: PagedSequences | None = None
        self.rotary = RotaryRows()

    def prepare(self, batch: PagedBatch) -> None:
        """Take over one step. Checks its shapes; the contents are the scheduler's promise."""
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        self.check(batch, starts, lengths)
        self.block_tables[: len(lengths), : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)
        self.slots[: batch.num_tokens].copy_(batch.slot_mapping[: batch.num_tokens], non_blocking=True)
        single = (
            [] if self.attention == "stoker" else [i for i in range(len(lengths)) if starts[i + 1] - starts[i] == 1]
        )
        others = sorted(set(range(len(lengths))) - set(single))
        self.sequences = PagedSequences(
            num_tokens=batch.num_tokens,
            slot_rows=self.slot_rows(batch.num_tokens),
            decode=tuple(self.decode_group(members, starts, lengths) for members in group_by_length(single, lengths)),
            prefill=tuple(self.cached_sequence(i, starts, lengths) for i in others),
        )
        self.rotary.forget()

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        assert self.sequences is not None, "prepare(batch) comes before the model's call"
        cos, sin = self.rotary.of(spec.rope, positions_T)
        layer = spec.layer - self.cache.layers.start
        q_TNH = self.ops.rotate_and_write(
            q_TNH,
            k_TKH,
            v_TKH,
            cos,
            sin,
            spec.q_norm,
            spec.k_norm,
            spec.norm_eps,
            self.cache.data,
            layer,
            self.sequences,
        )
        return self.ops.paged_attention(q_TNH, self.cache.data, layer, self.sequences, spec.scale, spec.window)

    def check(self, batch: PagedBatch, starts: list[int], lengths: list[int]) -> None:
        needs = -(-max(lengths, default=0) // self.cache.block_size)
        if (
            len(starts) != len(lengths) + 1
            or starts[-1] != batch.num_tokens
            or batch.block_tables.shape[0] != len(lengths)
            or batch.block_tables.shape[1] < needs
        ):
            raise ValueError(
                f"paged batch: query_start {tuple(batch.query_start.shape)} ending at {starts[-1]}, seq_lens {tuple(batch.seq_lens.shape)}, block_tables {tuple(batch.block_tables.shape)} "
                f"and num_tokens {batch.num_tokens} do not fit"
            )
        if (
            batch.num_tokens > self.size.max_tokens
            or len(lengths) > self.size.max_sequences
            or batch.block_tables.shape[1] > self.size.max_blocks
        ):
            raise ValueError(
                f"paged batch: {batch.num_tokens} tokens of {len(lengths)} sequences with {batch.block_tables.shape[1]} blocks exceed {self.size}"
            )

    def slot_rows(self, num_tokens: int) -> Tensor:
        """int64 [layers, 2T]: rows of the cache seen as [rows, K, H] for the new keys, then the new values."""
        block_size, num_layers = self.cache.block_size, len(self.cache.layers)
        slots = self.slots[:num_tokens]
        block, offset = slots // block_size, slots % block_size
        return (((block * num_layers + self.layer_index) * 2 + self.kind_index) * block_size + offset).flatten(1)

    def block_rows(self, tables: Tensor) -> Tensor:
        """int64 [layers, 2 * blocks]: rows of the cache seen as [rows, block_size, K, H]."""
        return ((tables.reshape(-1) * len(self.cache.layers) + self.layer_index) * 2 + self.kind_index).flatten(1)

    def decode_group(self, members: list[int], starts: list[int], lengths: list[int]) -> DecodeGroup:
        device = self.block_tables.device
        num_blocks = -(-max(lengths[i] for i in members) // self.cache.block_size)
        is_whole_pass = members == list(range(len(lengths))) and starts[-1] == len(lengths)
        chosen = slice(0, len(members)) if is_whole_pass else torch.tensor(members, device=device)
        seq_lens = torch.tensor([lengths[i] for i in members], device=device)
        padded_len = num_blocks * self.cache.block_size
        return DecodeGroup(
            token_rows=None if is_whole_pass else torch.tensor([starts[i] for i in members], device=device),
            num_sequences=len(members),
            padded_len=padded_len,
            block_rows=self.block_rows(self.clean_tables(self.block_tables[chosen, :num_blocks], seq_lens)),
            key_distances=(seq_lens[:, None] - 1 - torch.arange(padded_len, device=device))[:, None, None, :],
            masks={},
        )

    def clean_tables(self, tables_SB: Tensor, seq_lens_S: Tensor) -> Tensor:
        """Ids beyond a sequence's end become its first block: any finite numbers do there, because the mask hides them."""
        used_S = (seq_lens_S + self.cache.block_size - 1) // self.cache.block_size
        inside = torch.arange(tables_SB.shape[1], device=tables_SB.device)[None, :] < used_S[:, None]
        return torch.where(inside, tables_SB, tables_SB[:, :1])

    def cached_sequence(self, index: int, starts: list[int], lengths: list[int]) -> CachedSequence:
        begin, end, seq_len = starts[index], starts[index + 1], lengths[index]
        tables = self.block_tables[index, : -(-seq_len // self.cache.block_size)]
        return CachedSequence(begin, end, seq_len, self.block_rows(tables), {})
