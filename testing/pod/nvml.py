"""A driver's management library without a driver: GPUs that a test makes up, with figures that are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class FakeNvmlError(Exception):
    """A call that the library refuses."""


@dataclass
class FakeGpu:
    """One GPU. A figure that is None is refused, as the driver refuses it with MIG."""

    uuid: str
    bus_id: str
    busy: int | None = 0
    """Percent."""
    used: int | None = 0
    """Bytes."""
    total: int = 80 << 30
    lost: bool = False


@dataclass
class FakeNvml:
    """The calls of `stoker.pod.gpu_reading.Nvml`."""

    gpus: list[FakeGpu]
    calls: list[str] = field(default_factory=list)
    NVMLError: type[Exception] = FakeNvmlError

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlDeviceGetCount(self) -> int:
        self.calls.append("count")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> FakeGpu:
        if self.gpus[index].lost:
            raise FakeNvmlError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: FakeGpu, /) -> str:
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu, /) -> Any:
        return SimpleNamespace(busId=handle.bus_id)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu, /) -> Any:
        return SimpleNamespace(gpu=_given(handle.busy))

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, /) -> Any:
        return SimpleNamespace(used=_given(handle.used), total=handle.total)


def _given(figure: int | None) -> int:
    if figure is None:
        raise FakeNvmlError("not supported")
    return figure
