"""The GPU opened in a thread, while the process still imports PyTorch. No torch.

A driver needs about half a second for the first context of a process, and PyTorch uses the same one. What fails here
fails again where PyTorch opens the device, and is told there.

Called once by `main`.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

from stoker.engine.transfer.cuda_driver import CudaDriver
from stoker.engine.transfer.device_memory import DeviceError


def open_device_beside(device: str) -> Thread | None:
    """Begin to open the first GPU that this process sees; None where it computes on the CPU."""
    if device == "cpu":
        return None
    thread = Thread(target=_open_first, name="open-device", daemon=True)
    thread.start()
    return thread


def _open_first() -> None:
    with suppress(DeviceError):
        CudaDriver().open_device(0)
