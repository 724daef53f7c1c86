"""Admission of updates: the training's own fields are fixed, its place and operation may change."""

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.domain.plan import Ref
from testing.operator.bad_manifests import DELETE, DEPLOYMENT, GOOD, changed
from testing.operator.edited_manifests import ALLOWED, REFUSED


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission.from_folder(Path(__file__).parents[2] / "crds")


@pytest.mark.parametrize(
    ("good", "before", "change", "text"), [pytest.param(*case[1:], id=case[0]) for case in REFUSED]
)
def test_what_is_fixed_cannot_change(
    admission: Admission, good: dict[str, Any], before: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    old = admission.admit(changed(good, before))
    new = changed(old, change)
    with pytest.raises(InvalidObject) as refused:
        admission.admit(new, old)
    assert str(refused.value) == f'{good["kind"]}.stoker.dev "x" is invalid: {text}'
    admission.admit(new)


@pytest.mark.parametrize(("good", "before", "change"), [pytest.param(*case[1:], id=case[0]) for case in ALLOWED])
def test_what_may_change(
    admission: Admission, good: dict[str, Any], before: dict[str, Any], change: dict[str, Any]
) -> None:
    old = admission.admit(changed(good, before))
    admission.admit(changed(old, change), old)


@pytest.mark.parametrize("kind", GOOD)
def test_a_stored_object_is_admitted_again_unchanged(admission: Admission, kind: str) -> None:
    stored = admission.admit(GOOD[kind])
    assert admission.admit(stored, stored) == stored


ITSELF = [
    pytest.param({"fallback": {"deploymentRef": {"name": "x"}}}, id="fallback"),
    pytest.param({"models": [{"name": "b", "deploymentRef": {"name": "x"}}]}, id="models"),
]


@pytest.mark.parametrize("router", ITSELF)
def test_no_edit_makes_a_deployment_name_itself(admission: Admission, router: dict[str, Any]) -> None:
    for status in ({}, {"status": {"phase": "Serving"}}):
        old = admission.admit({**GOOD["InferenceDeployment"], **status})
        with pytest.raises(InvalidObject) as refused:
            admission.admit(changed(old, {"spec.router": router}), old)
        assert str(refused.value).endswith(
            ": spec.router: Invalid value: fallback and models must name other deployments"
        )


@pytest.mark.parametrize("router", ITSELF)
def test_a_deployment_stored_before_the_rule_may_name_itself(admission: Admission, router: dict[str, Any]) -> None:
    good = admission.admit({**GOOD["InferenceDeployment"], "status": {"phase": "Pending"}})
    with_status = changed(good, {"spec.router": {**good["spec"]["router"], **router}})
    old = {name: value for name, value in with_status.items() if name != "status"}
    admission.admit(with_status, old)
    admission.admit(changed(with_status, {"spec.pools[0].replicas": 3}), with_status)
    admission.admit(good, with_status)
    with pytest.raises(InvalidObject, match=r"spec\.router: Invalid value"):
        admission.admit(old)


def test_a_section_that_is_applied_no_more_goes_with_its_defaults_and_what_others_wrote_stays(
    admission: Admission,
) -> None:
    """As on an API server: `canary` has a default (`onFailure`) that its manager never named."""
    uids = map(str, itertools.count())
    store = ObjectStore(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: next(uids), admit=admission.admit)
    canary = {"type": "canary", "paused": True, "canary": {"steps": [{"percent": 5}]}}
    with_canary = changed(DEPLOYMENT, {"spec.rollout": canary, "spec.router": {"service": {"type": "NodePort"}}})
    stored = store.apply(with_canary, "person")
    assert stored["spec"]["rollout"]["canary"]["onFailure"] == "RollBack"
    ref = Ref("InferenceDeployment", "default", "x", stored["metadata"]["uid"])
    store.patch(ref, {"spec": {"router": {"service": {"port": 81}}, "rollout": {"progressDeadlineSeconds": 60}}})
    stored = store.apply(changed(with_canary, {"spec.rollout": {"type": "rolling"}, "spec.router": DELETE}), "person")
    rollout = {"type": "rolling", "paused": False, "progressDeadlineSeconds": 60, "revisionHistoryLimit": 5}
    assert stored["spec"]["rollout"] == rollout
    assert stored["spec"]["router"]["service"] == {"type": "ClusterIP", "port": 81}
    assert store.apply(DEPLOYMENT, "person")["spec"]["rollout"] == rollout


@pytest.mark.parametrize(
    ("kind", "path", "refused"),
    [
        ("TrainingJob", "spec", "spec: Required value"),
        ("TrainingJob", "spec.model", "exactly one of model and modelFrom is needed"),
        ("TrainingJob", "spec.workers", None),
        ("Checkpoint", "spec.source", "spec.source: Required value"),
        ("InferenceDeployment", "spec.model", "spec.model: Required value"),
    ],
)
def test_a_section_that_an_edit_leaves_empty_is_as_absent(
    admission: Admission, kind: str, path: str, refused: str | None
) -> None:
    """`workers:` with nothing behind it is null in YAML."""
    uids = map(str, itertools.count())
    store = ObjectStore(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: next(uids), admit=admission.admit)
    good = changed(GOOD[kind], {"spec.workers.resources": {"limits": {"cpu": 1}}} if kind == "TrainingJob" else {})
    store.apply(good, "user")
    if refused is None:
        assert store.apply(changed(good, {path: None}), "user")["spec"]["workers"]["replicas"] == 1
        return
    with pytest.raises(InvalidObject, match=refused):
        store.apply(changed(good, {path: None}), "user")
