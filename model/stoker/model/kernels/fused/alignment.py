"""Which tensors the tensor memory accelerator can copy tiles from.

Called by the kernels that read through descriptors.
"""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16
"""Bytes: rows begin at such places."""


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
