"""The output layer's product, in float32 where the tensor cores keep it anyway.

So two candidates that differ by less than bfloat16 can express keep their order.

T rows, D input size, V vocabulary.

Called through `Ops`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from stoker.model.kernels.fused.few_rows import few_rows, suits_rows
from stoker.model.kernels.fused.linear import linear


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Compute logits from products that are summed in float32 and not rounded at the end.

    With gradient, and interpreted on a CPU: as every other product.
    """
    differentiable = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    if differentiable or hidden_TD.dtype is torch.float32 or triton.knobs.runtime.interpret:
        return linear(hidden_TD, weight_VD, None)
    if suits_rows(hidden_TD, weight_VD):
        return few_rows(hidden_TD, weight_VD, out_dtype=torch.float32)
    return torch.mm(hidden_TD, weight_VD.t(), out_dtype=torch.float32)
