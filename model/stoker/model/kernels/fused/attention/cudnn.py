"""Attention by cuDNN through torch. It knows neither packing nor windows, and plans anew for every shape that it has not seen, so documents go in groups of few shapes.

T tokens, L tokens of a document, N heads, K kv heads, H head_dim.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stoker.model.kernels.sequences import PackedSequences

LENGTH_STEP = 256
"""Documents of different lengths are padded to multiples of it."""


def attend_cudnn(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    if window is not None:
        raise ValueError("attention: 'cudnn' has no window; choose flash or stoker")
    longest = max(sequences.lengths)
    if min(sequences.lengths) == longest:
        return attend_equal(q_TNH, k_TKH, v_TKH, longest, scale)
    runs = equal_runs(sequences.lengths)
    sizes = [length * count for length, count in runs]
    triples = zip(*(torch.split(x, sizes) for x in (q_TNH, k_TKH, v_TKH)), strict=True)
    return torch.cat(
        [attend_padded(q, k, v, length, scale) for (q, k, v), (length, _) in zip(triples, runs, strict=True)]
    )


def equal_runs(lengths: list[int]) -> list[tuple[int, int]]:
    """(length, count) of neighbours of the same length."""
    return [(length, len(list(run))) for length, run in itertools.groupby(lengths)]


def attend_padded(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, length: int, scale: float) -> Tensor:
    """Documents of `length` tokens, padded at their ends, where causal order hides the padding."""
    missing = -length % LENGTH_STEP
    if missing == 0:
        return attend_equal(q_TNH, k_TKH, v_TKH, length, scale)
    q, k, v = (
        F.pad(x.view(-1, length, *x.shape[1:]), (0, 0, 0, 0, 0, missing)).flatten(0, 1) for x in (q_TNH, k_TKH, v_TKH)
    )
    out_TNH = attend_equal(q, k, v, length + missing, scale)
    return out_TNH.view(-1, length + missing, *out_TNH.shape[1:])[:, :length].flatten(0, 1)


def attend_equal(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, length: int, scale: float) -> Tensor:
    """Documents of `length` tokens each; no other backend of torch may take over."""
    q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
