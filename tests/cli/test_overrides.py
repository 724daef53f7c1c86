"""`--set PATH=VALUE`."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.cli.overrides import WrongOverride, override, parse_override

JOB: dict[str, Any] = {
    "kind": "TrainingJob",
    "metadata": {"name": "teach"},
    "spec": {"training": {"totalSteps": 20}, "data": {"sources": [{"name": "a"}, {"name": "b"}]}},
}
CHAT = {"kind": "InferenceDeployment", "metadata": {"name": "chat"}, "spec": {"pools": [{"replicas": 1}]}}
CLAIM = {"kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": {}}


def changed(objects: list[dict[str, Any]], *texts: str) -> list[dict[str, Any]]:
    return override(objects, [parse_override(text) for text in texts])


def test_the_only_object_of_stokers_is_changed_and_nothing_else() -> None:
    claim, job = changed(
        [CLAIM, JOB],
        "spec.training.totalSteps=200",
        "spec.run.suspend=true",
        "spec.data.sources[1].name=c",
        'metadata.labels.team="7"',
    )
    assert claim == CLAIM
    assert job["spec"] == {
        "training": {"totalSteps": 200},
        "data": {"sources": [{"name": "a"}, {"name": "c"}]},
        "run": {"suspend": True},
    }
    assert job["metadata"]["labels"] == {"team": "7"}
    assert JOB["spec"]["training"] == {"totalSteps": 20}, "the manifest itself stays"


def test_of_several_objects_one_is_named() -> None:
    job, chat = changed([JOB, CHAT], "infd/chat:spec.pools[0].replicas=3", "tj/teach:spec.training.learningRate=3e-4")
    assert chat["spec"]["pools"] == [{"replicas": 3}]
    assert job["spec"]["training"]["learningRate"] == 3e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec.training", r"\[KIND/NAME:\]PATH=VALUE is needed"),
        ("spec.training.totalSteps=2", "2 objects; write KIND/NAME: before the path"),
        ("tj/other:spec.a=1", r"no object of that name \(there are trainingjob/teach, inferencedeployment/chat\)"),
        ("spaceship/x:spec.a=1", "unknown kind 'spaceship'"),
        ("tj/teach:status.phase=Done", "begins with spec, metadata or data, not status"),
        ("tj/teach:spec..a=1", "is no path such as"),
        ("tj/teach:spec.a=[1", "--set tj/teach:spec.a="),
        ("tj/teach:spec.data.sources[2].name=x", "no item 2: the value is a list of 2"),
        ("tj/teach:spec.training.totalSteps.x=1", "x is no field of 20"),
        ("tj/teach:metadata.name=", "--set tj/teach:metadata.name=: metadata.name is needed$"),
        ("tj/teach:metadata=1", "--set tj/teach:metadata=1: metadata.name is needed$"),
        ("tj/teach:metadata.namespace=5", "metadata.namespace is a text, not 5"),
    ],
)
def test_what_does_not_fit_is_named(text: str, message: str) -> None:
    with pytest.raises(WrongOverride, match=message):
        changed([JOB, CHAT], text)
