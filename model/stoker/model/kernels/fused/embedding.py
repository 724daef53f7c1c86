"""Lookup of rows in the embedding table.

One gather, which torch does at the memory's speed; its gradient is added in token order, so it repeats bitwise.

Called through `Ops`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embedding(tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
    return F.embedding(tokens_T, weight_VD)
