"""Admission by the API server and by the embedded cluster: the same refusals for the same reasons.

One table of manifests serves both.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.api.api_client import ApiClient, ApiRefused, Object
from e2e.api.plane import Plane
from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from testing.operator.bad_manifests import BAD, GOOD, changed
from testing.operator.edited_manifests import ALLOWED, REFUSED

ROOT = Path(__file__).parents[2]
KINDS = tuple(GOOD)
EXAMPLES = [
    pytest.param(manifest, id=f"{path.parent.name}/{path.name}")
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if manifest["kind"] in KINDS
]
FOLLOW_UPS = (
    "some validation rules were not checked because the object was invalid",
    "type conversion error from 'string' to 'double' evaluating rule",
    "should be a non-negative integer",
    "pools must be one colocated pool, or one prefill and one decode pool, got 0 colocated",
)
"""Messages that the API server adds to a first mistake; the embedded cluster reports the mistake alone."""

Causes = set[tuple[str, str]]
"""(field, message)."""


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission.from_folder(ROOT / "crds")


def ask(plane: Plane, method: str, manifest: Object, namespace: str) -> Object:
    """Send one strict write, as kubectl does; a POST is a dry run."""
    body = changed(manifest, {"metadata.namespace": namespace})

    async def whole() -> Object:
        async with ApiClient(plane.access) as api:
            if method == "POST":
                return await api.create(body, fieldValidation="Strict", dryRun="All")
            return await api.replace(body, fieldValidation="Strict")

    return asyncio.run(whole())


def store(plane: Plane, manifest: Object, namespace: str) -> Object:
    async def whole() -> Object:
        async with ApiClient(plane.access) as api:
            return await api.create(changed(manifest, {"metadata.namespace": namespace}))

    return asyncio.run(whole())


def local_causes(refused: InvalidObject) -> Causes:
    """Return the embedded cluster's causes, without the advice in parentheses at their ends."""
    return {
        (cause.field, re.sub(r" \((did you mean|a text is needed).*\)$", "", cause.message)) for cause in refused.causes
    }


def server_causes(refused: ApiRefused) -> Causes:
    """Return the API server's causes: a list, or one text for all unknown fields."""
    unknown = re.findall(r'unknown field "([^"]+)"', str(refused))
    listed = refused.status.get("details", {}).get("causes", ())
    return {(cause["field"], cause["message"]) for cause in listed} | {
        (field, f'unknown field "{field}"') for field in unknown
    }


def assert_same_refusal(refused: ApiRefused, local: InvalidObject) -> None:
    here, there = local_causes(local), server_causes(refused)
    assert here <= there
    assert {cause for cause in there - here if not any(text in cause[1] for text in FOLLOW_UPS)} == set()


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(*case[1:3], id=case[0]) for case in BAD])
def test_a_bad_manifest_is_refused_as_the_embedded_cluster_refuses_it(
    plane: Plane, admission: Admission, kind: str, changes: dict[str, Any]
) -> None:
    manifest = changed(GOOD[kind], changes)
    with pytest.raises(InvalidObject) as local:
        admission.admit(manifest)
    with pytest.raises(ApiRefused) as refused:
        ask(plane, "POST", manifest, "default")
    assert refused.value.code in (400, 422)
    assert_same_refusal(refused.value, local.value)


def test_the_table_is_long_enough() -> None:
    assert len(BAD) + len(REFUSED) >= 40


@pytest.mark.parametrize(("good", "before", "change"), [pytest.param(*case[1:4], id=case[0]) for case in REFUSED])
def test_what_is_fixed_cannot_change(
    plane: Plane, namespace: str, admission: Admission, good: Object, before: dict[str, Any], change: dict[str, Any]
) -> None:
    stored = store(plane, changed(good, before), namespace)
    with pytest.raises(InvalidObject) as local:
        admission.admit(changed(stored, change), stored)
    with pytest.raises(ApiRefused) as refused:
        ask(plane, "PUT", changed(stored, change), namespace)
    assert_same_refusal(refused.value, local.value)


@pytest.mark.parametrize(("good", "before", "change"), [pytest.param(*case[1:], id=case[0]) for case in ALLOWED])
def test_what_may_change(
    plane: Plane, namespace: str, good: Object, before: dict[str, Any], change: dict[str, Any]
) -> None:
    stored = store(plane, changed(good, before), namespace)
    assert ask(plane, "PUT", changed(stored, change), namespace)["metadata"]["generation"] == 2


@pytest.mark.parametrize("manifest", [*(pytest.param(good, id=kind) for kind, good in GOOD.items()), *EXAMPLES])
def test_the_defaults_are_those_of_the_embedded_cluster(plane: Plane, admission: Admission, manifest: Object) -> None:
    stored = ask(plane, "POST", manifest, "default")
    assert stored["spec"] == admission.admit(manifest)["spec"]


def test_the_definitions_are_accepted_and_small(plane: Plane) -> None:
    async def definitions() -> list[Object]:
        async with ApiClient(plane.access) as api:
            return await api.list("CustomResourceDefinition")

    ours = [found for found in asyncio.run(definitions()) if found["spec"]["group"] == "stoker.dev"]
    assert sorted(found["spec"]["names"]["kind"] for found in ours) == sorted(KINDS)
    for found in ours:
        conditions = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}
        assert conditions == {
            "NamesAccepted": "True",
            "Established": "True",
        }  # a schema that is not structural has one more
        assert (ROOT / "crds" / f"stoker.dev_{found['spec']['names']['plural']}.yaml").stat().st_size < 50_000
