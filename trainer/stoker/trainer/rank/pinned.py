"""Host memory that the GPU copies into by itself."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device of the process."""


def pinned_memory(numel: int) -> Tensor:
    """fp32 elements in page-locked memory, all zero. Exactly as much as asked for, which torch's own allocator would round up to a power of two; the lock goes with the tensor's memory."""
    host = torch.zeros(numel, dtype=torch.float32)
    if numel:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE))
        weakref.finalize(host.untyped_storage(), runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host
