"""A prefill engine that is not needed helps the decode pool under load, and goes back when the load ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from testing.stories.load import Load
from testing.stories.manifests import Manifest, claim, deployment
from testing.stories.object_views import Object
from testing.stories.story_cluster import StoryCluster

NAME, LENT_TO = "teller", "stoker.dev/lent-to"
PATIENT_S = 1200
"""The prefill pool drains none of its two replicas within the story: what it has to spare can only be lent."""
REVIEWS_S = 20.0
"""Four reviews of the autoscaler."""


def pool(role: str, replicas: int, scale_down_after_s: int) -> Manifest:
    scaling = {"min": 1, "max": 2, "mode": "load", "scaleDownAfterSeconds": scale_down_after_s}
    return {"name": role, "role": role, "replicas": replicas, "gracePeriodSeconds": 20, "autoscaling": scaling}


def teller() -> Manifest:
    """A deployment of two alike pools, whose engines take two requests each."""
    pools = [pool("prefill", 2, PATIENT_S), pool("decode", 1, 10)]
    changes: dict[str, Any] = {"engine.scheduler.maxRequests": 2, "router.policy": "leastPending", "pools": pools}
    return deployment(NAME, {"uri": "pvc://models/taught"}, changes)


def test_a_prefill_engine_serves_the_decode_pool_while_that_has_too_much_to_do(
    cluster: StoryCluster, taught: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "taught").symlink_to(sorted(taught.glob("step-*"))[-1])
    applied_s = time.monotonic()
    cluster.apply(claim("models", models), teller())
    cluster.wait("InferenceDeployment", NAME, lambda found: ready(found) == 3, "all engines are ready")
    start_s = time.monotonic() - applied_s
    time.sleep(start_s + REVIEWS_S)  # by then the prefill pool has proven for as long as a start that one is enough
    began = {pod["metadata"]["uid"] for pod in cluster.pods(role="engine")}

    with Load(cluster.ready_url(NAME), NAME, lengths=(160,) * 7) as load:
        cluster.wait_until(lambda: lent(cluster) == ["prefill"], "a prefill engine that is lent")
        cluster.more_answers(load, 10)
        assert {pod["metadata"]["uid"] for pod in cluster.pods(role="engine")} == began, "none was started"
    assert load.failures == []
    cluster.wait_until(lambda: not lent(cluster), "the engine given back")
    cluster.wait_until(
        lambda: [len(flips(cluster, name)) for name in ("decode", "prefill")] == [2, 2], "all flips told"
    )

    took, gave = flips(cluster, "decode"), flips(cluster, "prefill")
    assert [(one["before"], one["after"]) for one in took] == [(1, 2), (2, 1)]
    assert [(one["before"], one["after"]) for one in gave] == [(2, 1), (1, 2)]
    assert "1 replica changes its role to serve this pool" in took[0]["message"]
    assert {pod["metadata"]["uid"] for pod in cluster.pods(role="engine")} == began, "none has gone"


def lent(cluster: StoryCluster) -> list[str]:
    """The pools of the pods that serve another one."""
    labels = [pod["metadata"]["labels"] for pod in cluster.pods(role="engine")]
    return [each["stoker.dev/pool"] for each in labels if each.get(LENT_TO)]


def flips(cluster: StoryCluster, name: str) -> list[Object]:
    pools = cluster.status("InferenceDeployment", NAME)["pools"]
    (found,) = [each for each in pools if each["name"] == name]
    return [decision for decision in found["decisions"] if decision["reason"] == "RoleFlip"]


def ready(found: Object) -> int:
    pools = (found.get("status") or {}).get("pools") or []
    return sum(int(each.get("ready") or 0) for each in pools)
