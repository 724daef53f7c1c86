"""Names of a model reach engines with their revision: others ask by the names that engines know."""

from __future__ import annotations

from typing import Any

from stoker.operator.domain.plan import Key
from testing.operator.serving_world import CHAT, Serving

SMALL = Key("InferenceDeployment", "default", "small")


def beside_small(**router: Any) -> Serving:
    """Two deployments that serve; `router` is that of the first one."""
    serving = Serving(router=router)
    serving.checkpoint(10)
    serving.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": "small"},
            "spec": {
                "model": {"uri": "pvc://claim/small", "names": ["tiny"]},
                "pools": [{"name": "main"}],
                "router": {"service": {"port": 8080}},
            },
        }
    )
    serving.rest(20)
    return serving


def rename(serving: Serving, key: Key, *names: str, paused: bool) -> None:
    def edit(spec: Any) -> None:
        spec["model"]["names"] = list(names)
        spec["rollout"] = {"paused": paused}

    serving.cluster.change_spec(key, edit)
    serving.rest(20)


def test_another_deployment_is_asked_by_a_name_that_its_engines_know() -> None:
    alias = {"name": "quick", "deploymentRef": {"name": "small"}}
    serving = beside_small(fallback={"deploymentRef": {"name": "small"}}, models=[alias])
    rename(serving, SMALL, "little", "tiny", paused=True)
    assert serving.snapshot()["fallback"]["model"] == "tiny"
    assert serving.snapshot()["models"][0]["endpoint"]["model"] == "tiny"
    assert serving.cluster.objects[SMALL]["status"]["models"] == ["tiny"]
    rename(serving, SMALL, "little", "tiny", paused=False)
    assert serving.snapshot()["fallback"]["model"] == "little"
    assert serving.cluster.objects[SMALL]["status"]["models"] == ["little", "tiny"]


def test_a_router_with_other_models_takes_the_names_of_engines_that_it_has() -> None:
    serving = beside_small(models=[{"name": "quick", "deploymentRef": {"name": "small"}}])
    rename(serving, CHAT, "talk", paused=True)
    assert (serving.snapshot()["own_models"], serving.status["models"]) == (["talk", "chat"], ["chat"])
    rename(serving, CHAT, "talk", paused=False)
    assert (serving.snapshot()["own_models"], serving.status["models"]) == (["talk"], ["talk"])


def test_a_refused_edit_of_another_deployment_does_not_move_its_endpoint() -> None:
    serving = beside_small(fallback={"deploymentRef": {"name": "small"}})

    def edit(spec: Any) -> None:
        spec["engine"] = {"attention": "cudnn"}
        spec["router"]["service"]["port"] = 9000

    serving.cluster.change_spec(SMALL, edit)
    serving.rest(20)
    assert serving.snapshot()["fallback"]["url"] == "http://small.default.svc:8080"
