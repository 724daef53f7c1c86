"""All blocks of a dense decoder as one call into C, with the pointers of all weights collected beforehand.

The structures are those of `blocks.c`. T tokens, D hidden, S sequences, B blocks of a table.

Made by `compiled.kernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.model.kernels.block_weights import BlockWeights
from stoker.model.kernels.rotation import Rotation
from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PagedSequences

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Block(ctypes.Structure):
    POINTERS = (
        *("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm"),
        *("output", "output_bias", "mlp_norm", "gate_up", "down"),
    )  # fmt: skip
    _fields_ = (*((name, _POINTER) for name in POINTERS), ("window", _LONG))


class _Blocks(ctypes.Structure):
    _fields_ = (
        ("each", _POINTER),
        *((name, _LONG) for name in ("count", "D", "N", "K", "H", "F")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    )


class _Group(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("token_rows", "block_rows", "lengths")),
        *((name, _LONG) for name in ("num_sequences", "num_blocks")),
    )


class _Prompt(ctypes.Structure):
    _fields_ = (
        ("block_rows", _POINTER),
        *((name, _LONG) for name in ("first", "num_queries", "num_keys", "num_blocks")),
    )


class _Pass(ctypes.Structure):
    POINTERS = ("x", "update", "out_x", "out_update", "cache", "cos", "sin", "slot_rows", "groups", "prompts")
    _fields_ = (
        *((name, _POINTER) for name in POINTERS),
        *((name, _LONG) for name in ("table_stride", "T", "num_groups", "num_prompts", "block_size")),
    )


class CompiledBlocks:
    """`PreparedBlocks` in C."""

    def __init__(self, library: ctypes.CDLL, weights: Sequence[BlockWeights], *, takes_prompts: bool) -> None:
        """`weights`: bfloat16 on the CPU, of sizes that the processor's product takes, equal in all blocks.

        `takes_prompts`: prompts' attention is C's, too; else passes with prompts are refused.
        """
        self.library, self.weights, self.takes_prompts = library, tuple(weights), takes_prompts
        self.each = (_Block * len(weights))(*map(block_pointers, weights))
        first = weights[0]
        self.blocks = _Blocks(
            each=ctypes.addressof(self.each),
            count=len(weights),
            D=len(first.attention_norm),
            N=first.num_heads,
            K=first.num_kv_heads,
            H=first.head_dim,
            F=first.down.shape[1],
            eps=first.eps,
            scale=first.scale,
        )

    def __call__(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        cache: Tensor,
        sequences: PagedSequences,
    ) -> tuple[Tensor, Tensor] | None:
        """Compute all blocks; None where the pass has prompts and `takes_prompts` is False. Raises MemoryError."""
        if not x_TD.shape[0] or not self.takes(x_TD, update_TD, cache):
            return None
        if sequences.prefill and not self.takes_prompts:
            return None
        if x_TD.shape[0] != sequences.num_tokens or cache.shape[1] != len(self.weights):
            raise ValueError(
                f"blocks: x {tuple(x_TD.shape)} and cache {tuple(cache.shape)} do not fit {len(self.weights)} blocks "
                f"and {sequences.num_tokens} tokens"
            )
        block_size, out_x_TD, out_TD = cache.shape[3], torch.empty_like(x_TD), torch.empty_like(x_TD)
        groups = (_Group * len(sequences.decode))(*(group_pointers(group, block_size) for group in sequences.decode))
        prompts = (_Prompt * len(sequences.prefill))(
            *(prompt_pointers(sequence, block_size) for sequence in sequences.prefill)
        )
        call = _Pass(
            x=x_TD.data_ptr(),
            update=None if update_TD is None else update_TD.data_ptr(),
            out_x=out_x_TD.data_ptr(),
            out_update=out_TD.data_ptr(),
            cache=cache.data_ptr(),
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            slot_rows=sequences.slot_rows.data_ptr(),
            groups=ctypes.addressof(groups),
            prompts=ctypes.addressof(prompts),
            table_stride=rotation.cos.stride(0),
            T=sequences.num_tokens,
            num_groups=len(groups),
            num_prompts=len(prompts),
            block_size=block_size,
        )
        if not self.library.stoker_blocks(ctypes.byref(self.blocks), ctypes.byref(call)):
            raise MemoryError(f"{sequences.num_tokens} rows have no memory for what lies between their products")
        return out_x_TD, out_TD

    def takes(self, *tensors: Tensor | None) -> bool:
        return not torch.is_grad_enabled() and all(
            tensor.dtype is torch.bfloat16 and tensor.is_cpu and tensor.is_contiguous()
            for tensor in tensors
            if tensor is not None
        )


def block_pointers(weights: BlockWeights) -> _Block:
    tensors = {name: getattr(weights, name) for name in _Block.POINTERS}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    return _Block(**pointers, window=weights.window or 0)


def group_pointers(group: DecodeGroup, block_size: int) -> _Group:
    return _Group(
        token_rows=None if group.token_rows is None else group.token_rows.data_ptr(),
        block_rows=group.block_rows.data_ptr(),
        lengths=group.seq_lens.data_ptr(),
        num_sequences=group.num_sequences,
        num_blocks=group.padded_len // block_size,
    )


def prompt_pointers(sequence: CachedSequence, block_size: int) -> _Prompt:
    return _Prompt(
        block_rows=sequence.block_rows.data_ptr(),
        first=sequence.query_start,
        num_queries=sequence.query_end - sequence.query_start,
        num_keys=sequence.seq_len,
        num_blocks=-(-sequence.seq_len // block_size),
    )
