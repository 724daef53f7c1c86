"""Engine pods that serve another pool of their deployment than the one that they belong to. Pure.

The label `LENT_TO` on the pod is the whole state: it survives the operator, and ends with the pod. Written by the
deployment's reconcile; read by it, by the pool's, and by the loop's `LoadWatch`.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.operator.domain.labels import DRAINING, LENT_TO, POOL
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import ended, label


def served_pool(pod: Object) -> str:
    """Name of the pool whose role the pod has."""
    return label(pod, LENT_TO if is_lent(pod) else POOL)


def is_lent(pod: Object) -> bool:
    """Whether the pod serves another pool, and goes on doing so."""
    leaves = ended(pod) or label(pod, DRAINING) or pod["metadata"].get("deletionTimestamp")
    return label(pod, LENT_TO) not in ("", label(pod, POOL)) and not leaves


def count_lent(pods: Iterable[Object], pool: str) -> int:
    """Pods of the pool that serve another one."""
    return sum(is_lent(pod) and label(pod, POOL) == pool for pod in pods)


def count_borrowed(pods: Iterable[Object], pool: str) -> int:
    """Pods of other pools that serve this one."""
    return sum(is_lent(pod) and served_pool(pod) == pool for pod in pods)
