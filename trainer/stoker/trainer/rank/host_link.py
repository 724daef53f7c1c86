"""Copies of small tensors between host and device that do not block the host.

Called by the training step: batches go to the device, losses and norms come back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy an array, list or tensor to the device. The caller may change `values` at once."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Readback:
    """A copy of numbers to the host. It starts now, in the current stream; `read` waits for this copy alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> Tensor:
        """Wait for the copy and return the numbers in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
