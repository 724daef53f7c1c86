"""Utilization and memory of a pod's GPUs, read from the driver's management library (NVML).

Made by `gpu_metrics`. A machine without a driver has no readings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

log = logging.getLogger("stoker.pod.gpus")

Value = TypeVar("Value")


class Nvml(Protocol):
    """The calls of NVML's bindings that are used here, each of which may raise its `NVMLError`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802 - names of the bindings

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...  # noqa: N802

    def nvmlDeviceGetUUID(self, handle: Any, /) -> str: ...  # noqa: N802

    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any: ...  # noqa: N802

    def nvmlDeviceGetUtilizationRates(self, handle: Any, /) -> Any: ...  # noqa: N802

    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...  # noqa: N802


@dataclass(frozen=True)
class GpuReading:
    """One GPU. A figure that the driver does not give (with MIG, of a lost GPU) is None."""

    index: int
    """The driver's number of the GPU in this pod."""
    uuid: str
    bus_id: str
    """Place on the PCI bus, the same in every pod of the node."""
    utilization: float | None
    """Share of the driver's last sampling period with a kernel running, 0 to 1."""
    memory_used: int | None
    """Bytes, of all processes of the node."""
    memory_total: int | None


class GpuReader:
    """Reads the GPUs of this pod. Finds the driver at the first reading and remembers when there is none."""

    def __init__(self, load: Callable[[], Nvml | None], visible: str | None) -> None:
        """`visible` is `CUDA_VISIBLE_DEVICES`: numbers and UUIDs; None for all that the driver shows."""
        self._load = load
        self._visible = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
        self._nvml: Nvml | None = None

    def read(self) -> list[GpuReading] | None:
        """Read every GPU that answers; None where there is no driver, or no GPU for this pod."""
        if self._visible == []:
            return None
        self._nvml = self._nvml or self._load()
        return None if self._nvml is None else list(self._readings(self._nvml))

    def _readings(self, nvml: Nvml) -> Iterator[GpuReading]:
        for index in range(_answer(nvml, nvml.nvmlDeviceGetCount) or 0):
            found = _answer(nvml, lambda index=index: _reading(nvml, index))  # type: ignore[misc]
            if found is not None and self._is_visible(found):
                yield found

    def _is_visible(self, found: GpuReading) -> bool:
        if self._visible is None:
            return True
        return any(name == str(found.index) or found.uuid.startswith(name) for name in self._visible)


def load_nvml() -> Nvml | None:
    """Load the driver's library; None without a driver, or where its bindings are not installed."""
    try:
        import pynvml  # of the extras `engine` and `trainer`; the control image has none
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:
        log.warning("the figures of GPUs cannot be read: %s", error)
        return None
    found: Nvml = pynvml
    return found


def _reading(nvml: Nvml, index: int) -> GpuReading:
    """Read one GPU. Raises NVMLError when it cannot even be named."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    rates = _answer(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    memory = _answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return GpuReading(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bus_id=nvml.nvmlDeviceGetPciInfo(handle).busId,
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
    )


def _answer(nvml: Nvml, ask: Callable[[], Value]) -> Value | None:
    """The driver's answer; None where it has none."""
    try:
        return ask()
    except nvml.NVMLError:
        return None
