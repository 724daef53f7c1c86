"""Attention over a block cache for the engine: split-KV decode and chunked prefill by our own kernels; long prompts by
flash-attn-4 where the step was planned so.

T tokens, S sequences, N heads, H head_dim.

Reads the cache and changes nothing; `rotation` writes it. Called through `Ops` by `paged_attend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.fused.attention.decode import attend_decode
from stoker.model.kernels.fused.attention.forward import attend_forward
from stoker.model.kernels.fused.attention.prompts import attend_long_prompts
from stoker.model.kernels.sequences import DeviceSequences


def paged_attention(
    q_TNH: Tensor, cache: Tensor, layer: int, sequences: DeviceSequences, scale: float, window: int | None
) -> Tensor:
    """A decode step is one launch over all rows of q, padding included; a mixed step is one over the sequences of one
    token, which come first, and one over the others.

    The first gives zeros for padding, whose rows may be prompts': the second must come after it.
    """
    k, v = cache[:, layer, 0], cache[:, layer, 1]
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    num_decodes = q_TNH.shape[0] if sequences.is_decode else sequences.num_decodes
    attend_decode(
        q_TNH,
        k,
        v,
        sequences.seq_lens,
        sequences.block_tables,
        sequences.scratch,
        num_sequences=num_decodes,
        scale=scale,
        window=window,
        out_TNH=out_TNH,
    )
    if sequences.prompts is not None:
        tables = sequences.block_tables
        return attend_long_prompts(q_TNH, k, v, tables, sequences.prompts, scale, window, out_TNH)
    if not sequences.is_decode:
        attend_prefill(q_TNH, k, v, sequences, num_decodes, scale, window, out_TNH)
    return out_TNH


def paged_attention_deterministic(
    q_TNH: Tensor, cache: Tensor, layer: int, sequences: DeviceSequences, scale: float, window: int | None
) -> Tensor:
    """Compute every token by the kernel of the trainer's forward, so a row's bits depend on its sequence alone.

    Rows of padded sequences are zero.
    """
    k, v = cache[:, layer, 0], cache[:, layer, 1]
    out_TNH = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    attend_prefill(q_TNH, k, v, sequences, 0, scale, window, out_TNH)
    return out_TNH


def attend_prefill(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: DeviceSequences,
    first: int,
    scale: float,
    window: int | None,
    out_TNH: Tensor,
) -> None:
    """Attend for the sequences from `first` on, by the prefill kernel."""
    last = q_TNH.shape[0] if sequences.is_decode else sequences.num_sequences
    attend_forward(
        q_TNH,
        k,
        v,
        sequences.query_start[first:],
        num_sequences=last - first,
        scale=scale,
        window=window,
        seq_lens=sequences.seq_lens[first:],
        block_tables=sequences.block_tables[first:],
        out_TNH=out_TNH,
    )
