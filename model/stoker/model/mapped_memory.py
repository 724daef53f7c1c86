"""Memory of the GPUs of one host that every rank of a group has mapped (torch's symmetric memory, without multicast).

Used by the engine's sums over peers' memory and by the trainer's copies between GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # its failure takes all GPUs of the host down
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # a rank that sees its GPU alone calls it number 0, as all do
}


def map_memory(words: int, dtype: torch.dtype, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Allocate memory of this rank, zeroed, and map that of all ranks; return it and the handle of the mapping.

    Called by all ranks together. Raises RuntimeError.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ.update(SETTINGS)
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(words, dtype=dtype, device=device).zero_()
    torch.cuda.synchronize(device)
    return memory, symmetric_memory.rendezvous(memory, group)
