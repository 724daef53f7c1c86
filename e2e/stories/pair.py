"""A run of two pods that one node with four GPUs holds, as changes of a job."""

from __future__ import annotations

from typing import Any

PAIR: dict[str, Any] = {
    "workers.replicas": 2,
    "workers.gpusPerPod": 2,
    "workers.ranksPerPod": 1,
    "runtime.device": "cpu",
}
