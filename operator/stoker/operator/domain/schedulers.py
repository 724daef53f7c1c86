"""The scheduler that a gang is given to: Stoker's own queue and placement, or one that the cluster has. Pure.

What the cluster has is found by asking its API server (`service/discovery`); what is absent costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["stoker", "kueue", "volcano", "kubernetes"]
"""`kubernetes`: the PodGroup of Kubernetes' own scheduler."""
Wanted = Literal["auto", "stoker", "kueue", "volcano"]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What the API server knows for gangs: their schedulers, and devices by claim."""

    kueue: bool = False
    volcano: bool = False
    pod_groups: str = ""
    """apiVersion of Kubernetes' own PodGroup; empty where the API server has none."""
    devices: str = ""
    """apiVersion of dynamic resource allocation; empty where the API server has none, or an alpha version."""


@dataclass(frozen=True)
class Missing:
    """Why no scheduler can take the gang."""

    message: str


def choose(
    wanted: Wanted,
    queue_name: str | None,
    installed: Installed,
    *,
    kept_together: bool,
    section: str = "spec.scheduling",
) -> Scheduler | Missing:
    """Return the scheduler of the next gang.

    Args:
        wanted: `scheduling.backend`. `auto` takes Kueue where the gang has a queue, then Volcano, then our own.
        queue_name: `scheduling.queueName`.
        kept_together: whether our own placement sees nodes and pods, or the gang is a single pod. Otherwise
            Kubernetes' own PodGroup keeps the gang together, if there is one.
        section: path of the fields, for messages.
    """
    field = f"{section}.backend {wanted}"
    if wanted == "kueue" and not installed.kueue:
        return Missing(f"{field}: the API server knows no kueue.x-k8s.io")
    if wanted == "volcano" and not installed.volcano:
        return Missing(f"{field}: the API server knows no scheduling.volcano.sh")
    if wanted in ("kueue", "volcano"):
        return wanted
    if wanted == "auto" and installed.kueue and queue_name:
        return "kueue"
    if wanted == "auto" and installed.volcano:
        return "volcano"
    if queue_name:
        return Missing(f"{section}.queueName {queue_name} needs Kueue or Volcano, and none is installed")
    return "kubernetes" if installed.pod_groups and not kept_together else "stoker"


def waits_for(scheduler: str, queue_name: str | None) -> str:
    """Return the end of the line about a gang that its scheduler holds back: `waits for kueue, queue team`."""
    return f"waits for {scheduler}" + (f", queue {queue_name}" if queue_name else "")
