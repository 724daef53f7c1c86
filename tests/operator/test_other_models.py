"""`router.models`: routers learn of other deployments' models; each has a line in status, missing ones are named."""

from __future__ import annotations

from typing import Any

from stoker.operator.domain.plan import Key
from testing.operator.serving_world import CHAT, Serving, condition_of

SMALL = {"name": "tiny", "deploymentRef": {"name": "small"}}
ALIAS = {"name": "quick", "deploymentRef": {"name": "small"}}


def other(serving: Serving, name: str, *, replicas: int = 1, **router: Any) -> None:
    serving.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": "pvc://claim/small", "names": ["first", "tiny"]},
                "pools": [{"name": "main", "replicas": replicas}],
                "router": {"service": {"port": 8080}, **router},
            },
        }
    )


def with_models(*models: Any) -> Serving:
    serving = Serving(router={"models": list(models)})
    serving.checkpoint(10)
    serving.rest(10)
    return serving


def test_routers_and_status_follow_the_other_deployment_and_no_router_restarts() -> None:
    serving = with_models(SMALL, ALIAS)
    missing = "InferenceDeployment small does not exist"
    found = condition_of(serving.status, "ModelsMissing")
    assert (found["status"], found["reason"]) == ("True", "NotFound")
    assert found["message"] == f"spec.router.models[0]: {missing}; spec.router.models[1]: {missing}"
    assert serving.status["phase"] == "Serving", "the own model is served"
    assert serving.snapshot()["own_models"] == ["chat"]
    assert serving.snapshot()["models"] == [
        {"name": name, "deployment": "small", "problem": missing} for name in ("tiny", "quick")
    ]
    routers = [pod["metadata"]["uid"] for pod in serving.cluster.pods("router")]

    other(serving, "small", replicas=0, models=[{"name": "chat", "deploymentRef": {"name": "chat"}}])
    serving.rest(10)
    url = "http://small.default.svc:8080"
    assert serving.snapshot()["models"] == [
        {"name": name, "deployment": "small", "endpoint": {"url": url, "deployment": "small", "model": model}}
        for name, model in (("tiny", "tiny"), ("quick", "first"))
    ], "a name that it serves is passed on, another one stands for its first"
    assert serving.condition("ModelsMissing") == "absent"
    tiny, quick = serving.status["otherModels"]
    assert tiny == {**quick, "name": "tiny"}
    assert (tiny["ready"], tiny["message"]) == (False, "InferenceDeployment small is ScaledToZero")

    serving.cluster.change_spec(CHAT, lambda spec: spec["router"].pop("models"))
    serving.rest(10)
    assert "models" not in serving.snapshot()
    assert "otherModels" not in serving.status or serving.status["otherModels"] == []
    mine = [
        pod for pod in serving.cluster.pods("router") if pod["metadata"]["labels"]["stoker.dev/deployment"] == "chat"
    ]
    assert [pod["metadata"]["uid"] for pod in mine] == routers


def test_a_model_is_ready_while_its_deployment_serves() -> None:
    serving = with_models(SMALL)
    other(serving, "small")
    serving.rest(20)
    (tiny,) = serving.status["otherModels"]
    assert (tiny["name"], tiny["deployment"], tiny["ready"]) == ("tiny", "small", True)


def test_the_deployment_itself_and_its_own_name_are_no_other_models() -> None:
    own = {"name": "self", "deploymentRef": {"name": "chat"}}
    taken = {"name": "chat", "deploymentRef": {"name": "small"}}
    serving = with_models(own, taken)
    other(serving, "small")
    serving.rest(10)
    found = condition_of(serving.status, "ModelsMissing")
    assert (found["status"], found["reason"]) == ("True", "Loop")
    assert "spec.router.models[0]: chat is the deployment itself" in found["message"]
    assert "spec.router.models[1]: chat is a name of the deployment's own model" in found["message"]
    assert [one["name"] for one in serving.snapshot()["models"]] == ["self"]
    assert "problem" in serving.snapshot()["models"][0]


def test_a_model_is_ready_while_its_deployment_gets_more_replicas() -> None:
    serving = with_models(SMALL)
    other(serving, "small")
    serving.rest(20)
    small = Key("InferenceDeployment", "default", "small")
    serving.cluster.change_spec(small, lambda spec: spec["pools"][0].update(replicas=2))
    for _ in range(3):
        serving.cluster.settle_once()
    assert serving.cluster.objects[small]["status"]["ready"] == "1/2"
    assert [one["ready"] for one in serving.status["otherModels"]] == [True]
