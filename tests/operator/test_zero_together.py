"""Prefill and decode pools go to zero together: one without replicas would see no work of its own ever again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.operator.domain.autoscaling.decision import Decision, Limits, Memory, Others, PoolInput
from stoker.operator.domain.autoscaling.rule import review
from stoker.operator.domain.plan import Report
from testing.operator.serving_world import CHAT
from tests.operator.test_lent_replicas import World

IDLE_S = 90
"""Longer than the proof of both pools."""
TO_ZERO: dict[str, Any] = {"min": 0, "max": 4, "mode": "load", "scaleDownAfterSeconds": 60}


def world(**decode: Any) -> World:
    """Two pools of one replica, of which the prefill pool may go to zero."""
    return World(
        [
            {"name": "pre", "role": "prefill", "replicas": 1, "autoscaling": TO_ZERO},
            {"name": "dec", "role": "decode", "replicas": 1, **decode},
        ]
    )


def hold(found: World, requests: int) -> None:
    """Let routers report requests that they hold, and the pools be reviewed."""
    report: Report = {"held": requests}
    for pod in found.serving.cluster.pods("router"):
        found.watch.note(pod, report)
        found.store.put_report(pod["metadata"]["uid"], report)
    found.watch.review_all()
    found.follow()


def reasons(found: World) -> set[str]:
    return {one.newest.reason for one in found.watch.scaling(CHAT).values()}


@pytest.mark.parametrize("busy", [(4, 0), (0, 4)], ids=["prompts alone", "answers alone"])
def test_neither_pool_goes_to_zero_while_the_other_one_serves(busy: tuple[int, int]) -> None:
    found = world(autoscaling=TO_ZERO)
    found.serve(3 * IDLE_S, *busy)
    assert found.scales == (1, 1)


def test_both_go_to_zero_when_both_are_idle_and_a_held_request_wakes_both() -> None:
    found = world(autoscaling=TO_ZERO)
    found.serve(IDLE_S, 0, 4)
    found.serve(2 * IDLE_S, 0, 0)
    assert found.scales == (0, 0)
    hold(found, 1)
    assert found.scales == (1, 1)
    assert reasons(found) == {"Wake"}


def test_a_pool_that_was_idle_for_longer_is_woken_as_soon_as_the_other_one_serves() -> None:
    found = world(autoscaling={**TO_ZERO, "scaleDownAfterSeconds": 3600})
    found.serve(2 * IDLE_S, 0, 0)
    assert found.scales == (0, 1)
    found.serve(10, 0, 4)
    assert found.scales == (1, 1)
    assert found.decisions("pre")[-1] == (0, 1, "Wake")


def test_beside_a_pool_that_stoker_does_not_scale_the_last_replica_stays() -> None:
    found = world()
    found.serve(2 * IDLE_S, 0, 0)
    assert found.scales == (1, 1)


@pytest.mark.parametrize(
    ("replicas", "others", "after"),
    [(1, "busy", 1), (1, "unknown", 1), (1, "idle", 0), (0, "busy", 1), (0, "unknown", 0), (0, "idle", 0)],
)
def test_what_the_others_do_keeps_the_last_replica_and_wakes_a_pool(replicas: int, others: Others, after: int) -> None:
    """Unknown work of another pool holds what there is: it starts none, and takes none away."""
    limits = Limits(0, 4, mode="load", scale_down_after_s=60)
    memory, seen = Memory(), PoolInput(replicas, ready=replicas, others=others)
    decision: Decision | None = None
    for now_s in range(0, 120, 5):
        decision, memory = review(float(now_s), limits, seen, memory)
        seen = replace(seen, replicas=decision.after, ready=decision.after)
    assert decision is not None
    assert decision.after == after
