"""Edits of a deployment's pools that cannot begin yet: the status says why, and that the former pools serve."""

from __future__ import annotations

from typing import Any

import pytest

from testing.operator.serving_world import CHAT, Serving

GONE = "PersistentVolumeClaim gone does not exist (spec.model.uri)"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param({"rollout": {"paused": True}}, "spec.rollout.paused holds the rollout", id="paused"),
        pytest.param({"model": {"uri": "pvc://gone/base"}}, GONE, id="no model"),
    ],
)
def test_the_status_names_what_keeps_new_pools_from_starting(edit: dict[str, Any], message: str) -> None:
    serving = Serving(model={"uri": "pvc://claim/base"})
    serving.rest(10)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[{"name": "wide", "replicas": 2}], **edit))
    serving.rest(10)
    assert (serving.status["phase"], serving.status["message"]) == ("Updating", message)
    assert [(pool["name"], pool["ready"]) for pool in serving.status["pools"]] == [("wide", 0), ("main", 1)]
    good = {"rollout": {}, "model": {"uri": "pvc://claim/base"}}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(good))
    serving.rest(20)
    assert (serving.status["phase"], serving.status["ready"]) == ("Serving", "2/2")
