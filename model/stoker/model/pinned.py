"""Page-locked host memory, which a GPU can copy to directly.

Called by the trainer for state and snapshots and by `experts` for weights; the caller owns the memory.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device of the process."""


def pinned_memory(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements in page-locked memory, all zero; unlocked when the tensor's memory is freed.

    torch's own allocator would round the size up to a power of two.
    """
    host = torch.zeros(numel, dtype=dtype)
    if numel:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE))
        weakref.finalize(host.untyped_storage(), runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host
