"""A refused edit of a fixed section names the fields that would change, by what is stored and what is given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stoker.cli.fixed_fields import with_changes
from stoker.cli.local_apply import apply_to
from stoker.cli.supervisor_client import SupervisorClient, SupervisorError

TRAINING = "spec.training: Forbidden: training is fixed: make a new TrainingJob"
STORED = {
    "spec": {
        "training": {"totalSteps": 10, "seed": 7, "deterministic": "Off"},
        "data": {"sources": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]},
        "pools": [{"name": "main", "role": "prefill"}],
    }
}


@pytest.mark.parametrize(
    ("error", "given", "added"),
    [
        (TRAINING, {"training": {"totalSteps": 20}}, "spec.training.totalSteps is 10, given is 20"),
        (
            TRAINING,
            {"training": {"totalSteps": 20, "seed": 7, "noise": "x"}},
            'spec.training.totalSteps is 10, given is 20; spec.training.noise is not set, given is "x"',
        ),
        (
            "spec.data: Forbidden: data is fixed",
            {"data": {"sources": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/c"}]}},
            'spec.data.sources[1].path is "/b", given is "/c"',
        ),
        (
            "spec.data: Forbidden: data is fixed",
            {"data": {"sources": [{"name": "a", "path": "/a"}]}},
            'spec.data.sources is [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}], '
            'given is [{"name": "a", "path": "/a"}]',
        ),
        (
            "spec.pools[0].role: Forbidden: role cannot be changed",
            {"pools": [{"name": "main", "role": "decode"}]},
            'spec.pools[0].role is "prefill", given is "decode"',
        ),
        (
            f"[{TRAINING}, spec.pools[0].role: Forbidden: role cannot be changed]",
            {"training": {"seed": 8}, "pools": [{"role": "decode"}]},
            'spec.training.seed is 7, given is 8; spec.pools[0].role is "prefill", given is "decode"',
        ),
        (
            "spec.model: Forbidden: model is fixed",
            {"model": dict.fromkeys("abcdef", 1)},
            'spec.model is not set, given is {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}',
        ),
    ],
)
def test_the_fields_that_differ_are_added(error: str, given: dict[str, Any], added: str) -> None:
    assert with_changes(error, STORED, {"spec": given}) == f"{error} ({added})"


def test_of_many_fields_the_first_are_named_and_the_others_counted() -> None:
    stored = {"spec": {"training": dict.fromkeys("abcdef", 0)}}
    told = with_changes(TRAINING, stored, {"spec": {"training": dict.fromkeys("abcdef", 1)}})
    named = "; ".join(f"spec.training.{name} is 0, given is 1" for name in "abcd")
    assert told == f"{TRAINING} ({named}; and 2 more)"


@pytest.mark.parametrize(
    ("error", "stored", "given"),
    [
        pytest.param(TRAINING, None, {"training": {"totalSteps": 20}}, id="nothing is stored"),
        pytest.param(TRAINING, STORED, {"training": {"totalSteps": 10}}, id="a field was removed"),
        pytest.param(TRAINING, STORED, {}, id="the section was removed"),
        pytest.param(
            "spec: Forbidden: model, modelFrom and lora are fixed",
            STORED,
            {"training": {"seed": 8}},
            id="several sections",
        ),
        pytest.param("spec.training.totalSteps: Invalid value: 0", STORED, {"training": {"totalSteps": 0}}, id="value"),
    ],
)
def test_other_errors_stay_as_they_are(error: str, stored: Any, given: dict[str, Any]) -> None:
    assert with_changes(error, stored, {"spec": given}) == error


class Supervisor:
    """Refuses what is stored to be changed, and all else as unknown."""

    def apply(self, objects: list[dict[str, Any]], *, recreate_lost: bool) -> list[dict[str, Any]]:
        return [{"kind": body["kind"], "result": "refused", "error": TRAINING} for body in objects]

    def objects(self, kind: str, *, namespace: str, name: str) -> list[dict[str, Any]]:
        if (kind, namespace, name) == ("TrainingJob", "default", "run"):
            return [STORED]
        raise SupervisorError(f"{kind} {name} does not exist", 404)


def test_the_embedded_cluster_is_asked_for_what_it_stores() -> None:
    bodies = [
        {"kind": "TrainingJob", "metadata": {"namespace": "default", "name": name}, "spec": {"training": {"seed": 8}}}
        for name in ("run", "new")
    ]
    first, second = apply_to(cast(SupervisorClient, Supervisor()), bodies)
    assert first["error"] == f"{TRAINING} (spec.training.seed is 7, given is 8)"
    assert second["error"] == TRAINING
