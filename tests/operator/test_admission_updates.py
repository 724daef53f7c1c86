"""Admission of updates: the training's own fields are fixed, its place and operation may change."""

from pathlib import Path
from typing import Any

import pytest

from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from testing.operator.bad_manifests import GOOD, changed
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
