"""The use of GPUs from a Prometheus that scrapes DCGM's exporter. Without one, and where it has no answer, the reason.

Called by the routes of the cluster. Keeps nothing.
"""

from __future__ import annotations

import math
from typing import Any

import httpx

from stoker.gateway.domain.gpu_use import GpuUse
from stoker.gateway.observations import GpuFigures
from stoker.pod.error_text import text_of

USED = "DCGM_FI_DEV_FB_USED"
"""MiB of GPU memory in use."""
FREE = "DCGM_FI_DEV_FB_FREE"
BUSY = "DCGM_FI_DEV_GPU_UTIL"
"""Percent of time with a kernel running."""
NODE_LABELS = ("Hostname", "node", "kubernetes_node", "instance")
MIB = 1 << 20

Samples = list[tuple[dict[str, str], float]]


class Prometheus:
    """A client of one Prometheus; without a URL it explains that there is none."""

    def __init__(self, url: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url
        self.transport = transport

    async def gpu_use(self) -> GpuUse:
        """Ask once. Never raises: a figure that is missing has its reason."""
        if self.url is None:
            return GpuUse(why_not="not measured: no Prometheus is configured (prometheus_url)")
        try:
            async with httpx.AsyncClient(base_url=self.url, transport=self.transport, timeout=5.0) as client:
                busy, used, free = [await _query(client, name) for name in (BUSY, USED, FREE)]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return GpuUse(why_not=f"not measured: {self.url}: {text_of(error)}")
        if not used and not busy:
            return GpuUse(why_not=f"not measured: {self.url} has no metrics of DCGM ({BUSY}, {USED})")
        return _use(busy, used, free)


async def _query(client: httpx.AsyncClient, metric: str) -> Samples:
    """The newest samples of a metric."""
    answer = await client.get("/api/v1/query", params={"query": metric})
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    samples = [(dict(one["metric"]), float(one["value"][1])) for one in found]
    return [(labels, value) for labels, value in samples if math.isfinite(value)]


def _use(busy: Samples, used: Samples, free: Samples) -> GpuUse:
    by_gpu = [{_gpu(labels): value for labels, value in samples} for samples in (busy, used, free)]
    names = {_gpu(labels): labels.get("UUID") or labels.get("gpu", "") for labels, _ in (*busy, *used)}
    by_node: dict[str, list[GpuFigures]] = {}
    for place in sorted(names):
        percent, taken, left = (found.get(place) for found in by_gpu)
        figures = GpuFigures(
            gpu=names[place],
            utilization=None if percent is None else percent / 100,
            memory_used=None if taken is None else taken * MIB,
            memory_total=None if taken is None or left is None else (taken + left) * MIB,
        )
        by_node.setdefault(place[0], []).append(figures)
    return GpuUse(by_node, "" if busy and used and free else "not measured: DCGM's exporter does not report it")


def _gpu(labels: dict[str, str]) -> tuple[str, str, str]:
    """The node of a sample, the number of its GPU there, and that of its MIG instance; numbers sort as text."""
    node = next((labels[name] for name in NODE_LABELS if labels.get(name)), "")
    return node, labels.get("gpu", "").zfill(4), labels.get("GPU_I_ID", "").zfill(4)
