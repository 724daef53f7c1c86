"""The use of GPUs from a Prometheus that scrapes DCGM's exporter. Without one, and where it has no answer, the reason.

Called by the routes of the cluster. Keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

USED = "DCGM_FI_DEV_FB_USED"
"""MiB of GPU memory in use."""
FREE = "DCGM_FI_DEV_FB_FREE"
BUSY = "DCGM_FI_DEV_GPU_UTIL"
"""Percent of time with a kernel running."""
NODE_LABELS = ("Hostname", "node", "kubernetes_node", "instance")
MIB = 1 << 20


@dataclass(frozen=True)
class GpuUse:
    """Measured use of the GPUs; None with a reason where it is not measured."""

    utilization: float | None = None
    memory_utilization: float | None = None
    memory_used: dict[str, list[float]] = field(default_factory=dict)
    """Node -> bytes by GPU."""
    why_not: str = ""


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
            return GpuUse(why_not=f"not measured: {self.url}: {error or type(error).__name__}")
        if not used and not busy:
            return GpuUse(why_not=f"not measured: {self.url} has no metrics of DCGM ({BUSY}, {USED})")
        return _use(busy, used, free)


async def _query(client: httpx.AsyncClient, metric: str) -> list[tuple[dict[str, str], float]]:
    """The newest samples of a metric."""
    answer = await client.get("/api/v1/query", params={"query": metric})
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return [(dict(one["metric"]), float(one["value"][1])) for one in found]


def _use(busy: list[tuple[dict[str, str], float]], used: list[Any], free: list[Any]) -> GpuUse:
    total = sum(value for _, value in (*used, *free))
    by_node: dict[str, list[float]] = {}
    for labels, value in sorted(used, key=lambda one: (_node(one[0]), one[0].get("gpu", ""))):
        by_node.setdefault(_node(labels), []).append(value * MIB)
    return GpuUse(
        utilization=sum(value for _, value in busy) / len(busy) / 100 if busy else None,
        memory_utilization=sum(value for _, value in used) / total if total and free else None,
        memory_used=by_node,
        why_not="" if busy and used and free else "not measured: DCGM's exporter does not report it",
    )


def _node(labels: dict[str, str]) -> str:
    return next((labels[name] for name in NODE_LABELS if labels.get(name)), "")
