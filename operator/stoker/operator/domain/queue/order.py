"""The order of a queue: priority, then runs that come back, then fair share by namespace, then age. Pure.

The share of a namespace is its dominant one (Ghodsi et al., Dominant Resource Fairness, NSDI 2011): the largest part
that its runs take of any resource of the cluster. A gang that is put into the order counts for its namespace from then
on, so namespaces take turns also where nothing runs yet.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.queue.applicant import Applicant, Holding


def order(
    applicants: Iterable[Applicant], holdings: Iterable[Holding], total: Mapping[str, int]
) -> tuple[Applicant, ...]:
    """Return the applicants, the one that starts first first. Costs O(n log n).

    Args:
        holdings: what runs take now.
        total: resources of the cluster; a resource that is not in it counts for no share.
    """
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for holding in holdings:
        for use in holding.uses:
            used[holding.namespace].update(use.requests)
    ranked = sorted(applicants, key=lambda found: (*_rank(found), found.since, found.name))
    ordered: list[Applicant] = []
    for _, equals in groupby(ranked, key=_rank):
        ordered += _by_share(list(equals), used, total)
    return tuple(ordered)


def share(used: Mapping[str, int], total: Mapping[str, int]) -> float:
    """The dominant share, 0 to 1: the largest part of any resource."""
    return max((used.get(resource, 0) / amount for resource, amount in total.items() if amount), default=0.0)


def total_of(nodes: Sequence[NodeCapacity], holdings: Iterable[Holding]) -> dict[str, int]:
    """What runs and applicants can share: what is free and what runs take."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update({resource: max(0, amount) for resource, amount in node.free.items()})
    for holding in holdings:
        for use in holding.uses:
            total.update(use.requests)
    total.pop("pods", None)
    return dict(total)


def _rank(found: Applicant) -> tuple[int, bool]:
    return -found.priority, not found.returning


def _by_share(
    equals: Sequence[Applicant], used: defaultdict[str, Counter[str]], total: Mapping[str, int]
) -> Iterator[Applicant]:
    """Yield the oldest of the namespace with the smallest share, again and again; `used` grows with each."""
    waiting: defaultdict[str, deque[Applicant]] = defaultdict(deque)
    for found in equals:
        waiting[found.namespace].append(found)
    heap = [_entry(namespace, line, used, total) for namespace, line in waiting.items()]
    heapq.heapify(heap)
    while heap:
        namespace = heapq.heappop(heap)[-1]
        line = waiting[namespace]
        found = line.popleft()
        used[namespace].update(found.demand)
        yield found
        if line:
            heapq.heappush(heap, _entry(namespace, line, used, total))


def _entry(
    namespace: str, line: Sequence[Applicant], used: Mapping[str, Mapping[str, int]], total: Mapping[str, int]
) -> tuple[float, str, str]:
    return share(used[namespace], total), line[0].since, namespace
