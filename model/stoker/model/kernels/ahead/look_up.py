"""The kernels that were shipped with the installation, for this process. Imports Triton only for fused kernels.

Called once by a program that has a GPU, before its first kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stoker.model.kernels.ahead.layered_cache import KernelLookups


def look_up_shipped_kernels(kernels: str, device: torch.device) -> KernelLookups | None:
    """Use shipped kernels where there are some for this GPU; else None. Raises ValueError: the folder is not one."""
    if kernels != "fused" or device.type != "cuda":
        return None
    from stoker.model.kernels.ahead.layered_cache import use_shipped_kernels  # imports triton

    major, minor = torch.cuda.get_device_capability(device)
    return use_shipped_kernels(os.environ, 10 * major + minor)
