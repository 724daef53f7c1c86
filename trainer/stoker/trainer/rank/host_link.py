"""Small tensors between host and device without holding up the host: pinned copies, and an event to read behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array, list or tensor on the device. The caller may change `values` at once."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Readback:
    """Numbers on their way to the host: the copy begins now, in the current stream, and `read` waits for it alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> Tensor:
        """The numbers in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
