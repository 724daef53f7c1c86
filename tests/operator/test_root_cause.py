"""The cause of an attempt's end, chosen from a gang's failures in the order of `stoker.pod.causes`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.operator.domain.plan import Object
from stoker.operator.domain.recovery import first_failure
from stoker.pod.causes import EXIT_CODES, Cause


def failed_pod(node_rank: int, cause: Cause) -> Object:
    """Return a pod that ended with a termination message."""
    message = json.dumps({"cause": cause.value, "detail": f"pod {node_rank}"})
    terminated: dict[str, Any] = {"exitCode": EXIT_CODES[cause], "message": message}
    return {
        "kind": "Pod",
        "metadata": {"name": f"pod-{node_rank}", "labels": {"stoker.dev/node-rank": str(node_rank)}},
        "spec": {},
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "main", "state": {"terminated": terminated}}],
        },
    }


@pytest.mark.parametrize(
    ("causes", "root"),
    [
        ((Cause.PEER_LOST, Cause.INTERRUPTED), Cause.INTERRUPTED),
        ((Cause.PEER_LOST, Cause.CANCELLED), Cause.CANCELLED),
        ((Cause.INTERRUPTED, Cause.CANCELLED), Cause.CANCELLED),
        ((Cause.PEER_LOST, Cause.RANK_FAILED), Cause.RANK_FAILED),
        ((Cause.RANK_FAILED, Cause.OUT_OF_MEMORY), Cause.OUT_OF_MEMORY),
        ((Cause.RANK_FAILED, Cause.HANG), Cause.HANG),
        ((Cause.HANG, Cause.RANK_KILLED), Cause.RANK_KILLED),
        ((Cause.RANK_FAILED, Cause.STORAGE_ERROR), Cause.STORAGE_ERROR),
    ],
)
def test_the_root_cause_does_not_depend_on_the_pod_that_reports_it(causes: tuple[Cause, Cause], root: Cause) -> None:
    for order in (causes, causes[::-1]):
        ending = first_failure(failed_pod(rank, cause) for rank, cause in enumerate(order))
        assert ending is not None
        assert (ending.cause, ending.node_rank) == (root, order.index(root))


def test_of_equal_causes_the_lowest_node_rank_is_named() -> None:
    ending = first_failure([failed_pod(1, Cause.NON_FINITE), failed_pod(0, Cause.NON_FINITE)])
    assert ending is not None
    assert ending.node_rank == 0
