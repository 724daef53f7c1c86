"""A store that follows a simulated cluster says what a store says that is filled anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stoker.operator.domain.plan import Object
from stoker.operator.loop.observe import observe
from stoker.pod.causes import Cause
from testing.operator.canary_world import CanaryServing
from testing.operator.followed_store import FollowedStore
from testing.operator.serving_world import CHAT, POOL
from testing.operator.simulated_cluster import SimulatedCluster


def assert_told(cluster: SimulatedCluster, followed: FollowedStore) -> None:
    """Follow the cluster, and compare what passes over both resources would see."""
    anew = FollowedStore()
    for store in (followed, anew):
        store.follow(cluster.objects, cluster.reports, cluster.gone, cluster.ending)
    for key in (CHAT, POOL):
        assert observe(followed.store, key, 1.0) == observe(anew.store, key, 1.0)


def engine(serving: CanaryServing) -> Object:
    return serving.engines()[0]


def relabel(serving: CanaryServing) -> None:
    """Change an object as a test may do it, under its old version."""
    engine(serving)["metadata"]["labels"]["stoker.dev/revision"] = "another"


CHANGES: dict[str, tuple[Callable[[CanaryServing], object], bool]] = {
    "nothing": (lambda _: None, True),
    "another spec": (lambda s: s.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=3)), True),
    "a new object": (lambda s: s.checkpoint(90), True),
    "another report": (lambda s: s.cluster.report(engine(s), {"phase": "Stalled"}), True),
    "a report of no pod": (lambda s: s.cluster.reports.update(unknown={"phase": "Serving"}), True),
    "an ended pod": (lambda s: s.cluster.end(engine(s), Cause.COMPLETED), True),
    "a namespace that ends": (lambda s: s.cluster.ending.add("default"), True),
    "an evicted pod": (lambda s: s.cluster.evict(engine(s)), False),
    "a vanished pod": (lambda s: s.cluster.vanish(engine(s)), False),
    "no reports": (lambda s: s.cluster.reports.clear(), False),
    "an old version": (relabel, False),
}


@pytest.fixture(scope="module")
def serving() -> CanaryServing:
    found = CanaryServing(replicas=2)
    found.started()
    for _ in range(6):
        found.round()
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_followed_or_learned_anew(serving: CanaryServing, change: str) -> None:
    make, followable = CHANGES[change]
    cluster, followed = serving.cluster, FollowedStore()
    assert_told(cluster, followed)
    make(serving)
    assert followed.can_follow(cluster.objects, cluster.reports) is followable
    if followable:
        assert_told(cluster, followed)
    serving.round()
