"""The output layer's product, in float32 where the tensor cores keep it anyway: two candidates that differ by less than bfloat16 can say keep their order.

T rows, D input size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.fused.linear import linear


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """cuBLAS sums in float32 and rounds at the end; here it does not round. With gradient: as every other product."""
    differentiable = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    if differentiable or hidden_TD.dtype is torch.float32 or not hidden_TD.is_cuda:
        return linear(hidden_TD, weight_VD, None)
    return torch.mm(hidden_TD, weight_VD.t(), out_dtype=torch.float32)
