"""The story of a pool that grows under load, shrinks when it ends, goes to zero, and is woken by a held request."""

from __future__ import annotations

import httpx

from testing.stories.load import Load
from testing.stories.manifests import Manifest, deployment
from testing.stories.object_views import Object
from testing.stories.stage import Stage

SCALED = {"min": 0, "max": 2, "mode": "load", "scaleDownAfterSeconds": 10}
HELD_S = 170


def teller(checkpoint: str) -> Manifest:
    """A deployment whose engines take two requests each, and whose router holds requests while there is none."""
    manifest = deployment(
        "teller",
        {"checkpointRef": {"name": checkpoint}},
        {"engine.scheduler.maxRequests": 2, "router.holdSeconds": HELD_S, "router.requestTimeoutSeconds": HELD_S},
    )
    manifest["spec"]["pools"][0]["autoscaling"] = SCALED
    return manifest


def grows_goes_to_zero_and_wakes(stage: Stage, checkpoint: str) -> None:
    """Tell the story with a verified checkpoint."""
    stage.apply(teller(checkpoint))
    stage.wait_for_phase("InferenceDeployment", "teller", "Serving")
    url = stage.ready_url("teller")

    with Load(url, "teller", lengths=(160,) * 7) as load:
        stage.wait("InferenceDeployment", "teller", lambda found: ready(found) == 2, "grown")
    assert load.failures == []
    grown = next(found for found in decisions(stage) if found["after"] == 2)
    assert (grown["before"], grown["reason"]) == (1, "Load")
    assert "requests wait" in grown["message"]

    stage.wait_for_phase("InferenceDeployment", "teller", "ScaledToZero")
    assert [found["after"] for found in decisions(stage)][-2:] == [1, 0]
    stage.wait_until(lambda: not stage.pods(role="engine"), "no engine left")

    body = {"model": "teller", "prompt": "Then coal met", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HELD_S + 5)
    assert answer.status_code == 200, answer.text
    assert decisions(stage)[-1]["reason"] == "Wake"
    assert stage.wait_for_event("InferenceDeployment", "teller", "Wake")
    stage.delete("InferenceDeployment", "teller")


def decisions(stage: Stage) -> list[Object]:
    """The changes of the pool so far; what kept it from one is left out."""
    (pool,) = stage.status("InferenceDeployment", "teller")["pools"]
    return [found for found in pool["decisions"] if found["before"] != found["after"]]


def ready(found: Object) -> int:
    pools = (found.get("status") or {}).get("pools") or [{}]
    return int(pools[0].get("ready") or 0)
