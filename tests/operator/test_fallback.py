"""`router.fallback`: the routers learn of the other deployment; missing ones and loops are named and not used."""

from __future__ import annotations

from typing import Any

import pytest

from testing.operator.serving_world import CHAT, Serving, condition_of


def other(serving: Serving, name: str, **router: Any) -> None:
    serving.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": "pvc://claim/small", "names": ["tiny", "also"]},
                "pools": [{"name": "main", "replicas": 0}],
                "router": {"service": {"port": 8080}, **router},
            },
        }
    )


def falling_back(name: str) -> Serving:
    serving = Serving(router={"fallback": {"deploymentRef": {"name": name}}})
    serving.checkpoint(10)
    serving.rest(10)
    return serving


def test_the_snapshot_names_endpoint_and_model_as_soon_as_the_other_deployment_exists() -> None:
    serving = falling_back("small")
    found = condition_of(serving.status, "FallbackMissing")
    assert (found["status"], found["reason"]) == ("True", "NotFound")
    assert "spec.router.fallback.deploymentRef: InferenceDeployment small does not exist" in found["message"]
    assert "fallback" not in serving.snapshot()
    routers = [pod["metadata"]["uid"] for pod in serving.cluster.pods("router")]
    other(serving, "small")
    serving.rest(10)
    assert serving.snapshot()["fallback"] == {
        "url": "http://small.default.svc:8080", "deployment": "small", "model": "tiny",
    }  # fmt: skip
    assert serving.condition("FallbackMissing") == "absent"
    serving.cluster.change_spec(CHAT, lambda spec: spec["router"].pop("fallback"))
    serving.rest(10)
    assert "fallback" not in serving.snapshot()
    mine = [
        pod for pod in serving.cluster.pods("router") if pod["metadata"]["labels"]["stoker.dev/deployment"] == "chat"
    ]
    assert [pod["metadata"]["uid"] for pod in mine] == routers, "no router restarts for it"


@pytest.mark.parametrize("name", ["chat", "back"])
def test_loops_are_refused(name: str) -> None:
    serving = falling_back(name)
    if name == "back":
        other(serving, "back", fallback={"deploymentRef": {"name": "chat"}})
        serving.rest(10)
    found = condition_of(serving.status, "FallbackMissing")
    assert (found["status"], found["reason"]) == ("True", "Loop")
    assert "fallback" not in serving.snapshot()
