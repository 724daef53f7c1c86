"""The engine's attention: keys and values live in blocks of a cache, sequences reach them through block tables.

It lies beside the model so that the kernels stay below both programs; it has no requests and no scheduler. T tokens, N
heads, K kv heads, H head_dim.

Made by the engine's runner, called by `block`. It writes keys and values into the engine's cache.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.attend import LayerAttention, RotaryRows
from stoker.model.config import ModelConfig
from stoker.model.kernels.block_weights import PreparedBlocks
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import DeviceSequences, PagedSequences
from stoker.model.paged_batch import PagedBatch, PagedSize
from stoker.model.paged_buffers import PagedBuffers
from stoker.model.paged_plan import HostPlan
from stoker.model.paged_prompts import PromptPlan
from stoker.model.rotary import RotaryTable
from stoker.model.tensor_group import group_size, kv_head_shard, shard_size

__all__ = ["KVCache", "PagedAttend", "PagedBatch", "PagedSize"]


class KVCache:
    """The blocks: `data` is [blocks, layers, 2, block_size, K, H], so that a block is one contiguous piece over all
    layers; 2 = keys, values.
    """

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
        shard = kv_head_shard(config.num_kv_heads, group_size(group))
        if shard is None:
            raise ValueError(
                f"num_kv_heads: {config.num_kv_heads} is neither a multiple nor a divisor of tensor parallel size "
                f"{group_size(group)}"
            )
        self.num_heads = shard_size(config.num_heads, group, "num_heads")
        """Heads of the queries that this rank asks with."""
        shape = (num_blocks, len(self.layers), 2, block_size, shard.heads, config.head_dim)
        self.data = (
            zero_pages(shape, dtype)
            if torch.device(device).type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
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
        """Memory of one block over all layers on one rank. With more ranks than heads each has one."""
        heads = max(config.num_kv_heads // tp_size, 1)
        return config.num_layers * 2 * block_size * heads * config.head_dim * dtype.itemsize

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks; no target may be a source."""
        device = self.data.device
        self.data.index_copy_(
            0, torch.tensor(targets, device=device), self.data.index_select(0, torch.tensor(sources, device=device))
        )


def zero_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose memory the kernel hands out page by page, when a page is first written.

    `torch.zeros` writes them all: seconds for some gigabytes, and memory for blocks that may never be used.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=num_bytes // dtype.itemsize).view(*shape)


class PagedAttend:
    """Built once per captured size on fixed buffers; `prepare` takes one step over, then the model may be called once
    per step.

    With fused kernels (`buffers` is there) nothing waits for the device, and the model's call can be captured in a
    graph: its launches depend on the numbers of rows, sequences and decodes and on the size, so the same graph serves
    every later step with these numbers, padding included.
    """

    def __init__(
        self,
        ops: Ops,
        attention: str,
        cache: KVCache,
        size: PagedSize,
        buffers: PagedBuffers | None = None,
        prompts: PromptPlan | None = None,
    ) -> None:
        """`attention`: auto, or what `ops.attention(name, program="paged")` allows.

        `buffers`: of a larger PagedAttend, to be shared. `prompts`: what attends for long prompts of prepared steps,
        with fused kernels; None: the kernel that attends for all of them.
        """
        self.ops, self.cache, self.size, self.prompts = ops, cache, size, prompts
        self.attention = ops.attention(attention, program="paged")
        self.buffers = PagedBuffers(cache.data, cache.num_heads, size, buffers) if ops.kernels == "fused" else None
        self.plan = self.buffers or HostPlan(cache.data, size, groups_decodes=self.attention != "stoker")
        self.sequences: PagedSequences | DeviceSequences | None = None
        self.rotary = RotaryRows()

    def prepare(self, batch: PagedBatch) -> None:
        """Take over one step. Checks its shapes; the contents are the scheduler's promise."""
        self.sequences = self.plan.take(batch)
        if self.prompts is not None and isinstance(self.sequences, DeviceSequences):
            prompts = self.prompts.plan(batch, self.sequences.num_decodes)
            self.sequences = replace(self.sequences, prompts=prompts)
        self.rotary.forget()

    def adopt(self, *, num_tokens: int, num_sequences: int, num_decodes: int) -> None:
        """Take over buffers that the caller's own kernel has filled, instead of `prepare`.

        Padding is filled too: sequences of length 0, slots of -1.
        """
        assert self.buffers is not None, "only fused kernels read buffers"
        self.sequences = self.buffers.adopt(num_tokens, num_sequences, num_decodes)
        self.rotary.forget()

    @property
    def slots(self) -> Tensor | None:
        """The cache's slots of the rows, below 0 for padding; None where a step is planned on the host, without any."""
        rows = self.sequences
        return rows.slots[: rows.num_tokens] if isinstance(rows, DeviceSequences) else None

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        assert self.sequences is not None, "prepare(batch) comes before the model's call"
        layer = spec.layer - self.cache.layers.start
        if layer == 0:  # the positions' buffer may hold other numbers now, and a captured pass looks them up itself
            self.rotary.forget()
        cos, sin = self.rotary.of(spec.rope, positions_T)
        rotation = Rotation(cos, sin, spec.q_norm, spec.k_norm, spec.norm_eps)
        into = CacheLayer(self.cache.data, layer, self.sequences)
        q_TNH = self.ops.rotate_and_write(q_TNH, k_TKH, v_TKH, rotation, into)
        return self.ops.paged_attention(q_TNH, self.cache.data, layer, self.sequences, spec.scale, spec.window)

    def all_blocks(
        self, blocks: PreparedBlocks, rope: RotaryTable, x_TD: Tensor, update_TD: Tensor | None, positions_T: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Compute all blocks in one call where the step was planned on the host; None where `blocks` refuses it."""
        if not isinstance(self.sequences, PagedSequences):
            return None
        rotation = Rotation(*rope.rows(positions_T))
        return blocks(x_TD, update_TD, rotation, self.cache.data, self.sequences)
