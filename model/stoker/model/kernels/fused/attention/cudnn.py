"""Attention by cuDNN through torch, which takes neither packing nor windows: documents of one length.

T tokens, L tokens of a document, N heads, K kv heads, H head_dim.

Called by `packed`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend_cudnn(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, length: int, scale: float) -> Tensor:
    """Attend over documents of `length` tokens each. What cuDNN refuses is an error; no other backend takes over."""
    q, k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
