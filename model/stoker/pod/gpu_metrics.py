"""The GPUs of a pod as metrics of Prometheus, read when `/metrics` is scraped. None without a driver.

Registered by the agent of a trainer's pod and by the engine; read by the gateway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import Thread

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.pod.gpu_reading import GpuReader, GpuReading, load_nvml

log = logging.getLogger("stoker.pod.gpus")

UTILIZATION = "stoker_gpu_utilization_ratio"
MEMORY_USED = "stoker_gpu_memory_used_bytes"
MEMORY_TOTAL = "stoker_gpu_memory_total_bytes"
LABELS = ("gpu", "uuid", "pci_bus_id")
WAIT_S = 0.2
"""Longest wait of a scrape for the driver."""

Read = Callable[[], Sequence[GpuReading] | None]
Figure = Callable[[GpuReading], float | None]

GAUGES: tuple[tuple[str, str, Figure], ...] = (
    (UTILIZATION, "Share of time with a kernel running, 0 to 1.", lambda gpu: gpu.utilization),
    (MEMORY_USED, "GPU memory in use, by all processes of the node.", lambda gpu: gpu.memory_used),
    (MEMORY_TOTAL, "GPU memory of the device.", lambda gpu: gpu.memory_total),
)


class GpuMetrics(Collector):
    """Reads the GPUs at each scrape.

    The driver is asked on a thread of its own: a call to a GPU that fell off its bus may never return, and the program
    has to answer its probes meanwhile. While a call is late, scrapes have no GPU metrics and start no second call.
    """

    def __init__(self, read: Read, wait_s: float = WAIT_S) -> None:
        self._read, self._wait_s = read, wait_s
        self._reading: Future[Sequence[GpuReading] | None] | None = None

    def collect(self) -> Iterator[Metric]:
        readings = self._newest()
        for name, text, figure in GAUGES:
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for gpu in readings:
                if (value := figure(gpu)) is not None:
                    family.add_metric((str(gpu.index), gpu.uuid, gpu.bus_id), value)
            if family.samples:
                yield family

    def _newest(self) -> Sequence[GpuReading]:
        """Return a reading of now; empty where there is no GPU, or the driver is late."""
        before = self._reading
        if before is not None and (not before.done() or before.result() is None):
            return ()
        self._reading = _begin(self._read)
        wait([self._reading], self._wait_s)
        return (self._reading.result() or ()) if self._reading.done() else ()


def gpu_metrics(environment: Mapping[str, str] = os.environ) -> GpuMetrics:
    """Build the metrics of the GPUs that this pod sees."""
    return GpuMetrics(GpuReader(load_nvml, environment.get("CUDA_VISIBLE_DEVICES")).read)


def _begin(read: Read) -> Future[Sequence[GpuReading] | None]:
    """Run `read` on a thread that does not hold up the program's end."""
    future: Future[Sequence[GpuReading] | None] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except Exception:
            log.exception("the figures of GPUs cannot be read, and are not tried again")
            future.set_result(None)

    Thread(target=run, name="gpu-reading", daemon=True).start()
    return future
