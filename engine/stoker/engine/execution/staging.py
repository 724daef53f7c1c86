"""Copies of numbers between host and device: one copy per batch of arrays, without waiting.

No buffer is shared between steps. Pinned memory comes from torch's pool for every copy, and the pool takes it back only
when the device has read it. So the next step may be written while the last copy is still under way.

One `Staging` per rank, made and called by `runner`; `seats` and `step_graphs` send through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""In bytes; kernels are compiled for pointers of this alignment."""

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Copies to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """Send arrays (int32, int64 or float32) to the device. On a CPU the tensors share memory with the arrays."""
        if self.is_host:
            return [torch.from_numpy(array) for array in arrays]
        places = _places(arrays)
        host = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
        memory = host.numpy()
        for array, begin in zip(arrays, places, strict=False):
            memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        staged = host.to(self.device, non_blocking=True)
        return [
            staged[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, begin in zip(arrays, places, strict=False)
        ]

    def fill(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor on the device, which graphs may read."""
        if self.is_host:
            target.copy_(torch.from_numpy(array))
            return
        host = torch.empty(array.shape, dtype=target.dtype, pin_memory=True)
        host.numpy()[...] = array
        target.copy_(host, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Begin to copy tensors to the host."""
        if self.is_host:
            return Fetched([tensor.clone() for tensor in tensors], None)  # the next step may overwrite them
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        return Fetched(copies, self.record())

    def record(self) -> torch.cuda.Event:
        """Record an event, which keeps its time, behind everything that was launched."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class Fetched:
    """Copies on the host, complete once `wait` has returned."""

    def __init__(self, copies: list[Tensor], event: torch.cuda.Event | None) -> None:
        self.copies, self.event = copies, event

    def wait(self) -> list[np.ndarray]:
        """Wait for the copies. Releases the interpreter's lock meanwhile."""
        if self.event is not None:
            self.event.synchronize()
        return [copy.numpy() for copy in self.copies]


def _places(arrays: Sequence[np.ndarray]) -> list[int]:
    """Offset of each array, and the end of all, in bytes."""
    places = [0]
    for array in arrays:
        places.append(-(-(places[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    return places
