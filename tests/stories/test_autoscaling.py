"""A pool grows under load, shrinks when it ends, goes to zero, and a request that a router holds wakes it."""

from __future__ import annotations

from pathlib import Path

import httpx

from testing.stories.load import Load
from testing.stories.manifests import adopted, claim, deployment
from testing.stories.story_cluster import Object, StoryCluster

SCALED = {"min": 0, "max": 2, "mode": "load", "scaleDownAfterSeconds": 10}


def test_a_pool_grows_under_load_goes_to_zero_and_wakes_for_a_held_request(cluster: StoryCluster, taught: Path) -> None:
    newest = max(path.name for path in taught.glob("step-*"))
    manifest = deployment(
        "teller",
        {"checkpointRef": {"name": "newer"}},
        {"engine.scheduler.maxRequests": 2, "router.holdSeconds": 170, "router.requestTimeoutSeconds": 170},
    )
    manifest["spec"]["pools"][0]["autoscaling"] = SCALED
    cluster.apply(claim("archive", taught.parent), adopted("newer", "archive", "taught", newest), manifest)
    cluster.wait_for_phase("InferenceDeployment", "teller", "Serving")
    url = cluster.url("teller")

    with Load(url, "teller", lengths=(160,) * 7) as load:
        cluster.wait("InferenceDeployment", "teller", lambda found: ready(found) == 2, "grown")
    assert load.failures == []
    grown = next(found for found in decisions(cluster) if found["after"] == 2)
    assert (grown["before"], grown["reason"]) == (1, "Load")
    assert "requests wait" in grown["message"]

    cluster.wait_for_phase("InferenceDeployment", "teller", "ScaledToZero")
    assert [found["after"] for found in decisions(cluster)][-2:] == [1, 0]
    cluster.wait_until(lambda: not cluster.pods(role="engine"), "no engine left")

    body = {"model": "teller", "prompt": "Then coal met", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=175)
    assert answer.status_code == 200, answer.text
    assert decisions(cluster)[-1]["reason"] == "Wake"
    assert "Wake" in cluster.events("InferenceDeployment", "teller")
    cluster.delete("InferenceDeployment", "teller")


def decisions(cluster: StoryCluster) -> list[Object]:
    """The changes of the pool so far; what kept it from one is left out."""
    (pool,) = cluster.status("InferenceDeployment", "teller")["pools"]
    return [found for found in pool["decisions"] if found["before"] != found["after"]]


def ready(found: Object) -> int:
    pools = (found.get("status") or {}).get("pools") or [{}]
    return int(pools[0].get("ready") or 0)
