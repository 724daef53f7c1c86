"""Field ownership: fields of a POST move to the applier, except those that no apply ever names."""

from __future__ import annotations

from typing import Any

from stoker.operator.cluster.kube.ownership import owned_by_apply

REPLICAS = ("spec", "replicas")
ITEM = 'k:{"name":"one"}'


def entry(operation: str, fields: dict[str, Any], manager: str = "us", **more: str) -> dict[str, Any]:
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
        **more,
    }


def test_what_was_posted_is_owned_by_apply_and_replicas_stay() -> None:
    posted = entry(
        "Update", {"f:spec": {"f:replicas": {}, "f:revisions": {ITEM: {".": {}, "f:name": {}, "f:share": {}}}}}
    )

    found = owned_by_apply([posted], "us", REPLICAS)

    assert found == [
        entry("Update", {"f:spec": {"f:replicas": {}}}),
        entry("Apply", {"f:spec": {"f:revisions": {ITEM: {".": {}, "f:name": {}, "f:share": {}}}}}),
    ]


def test_an_earlier_apply_gets_what_is_still_posted() -> None:
    posted = entry("Update", {"f:spec": {"f:revisions": {ITEM: {".": {}, "f:name": {}}}}})
    applied = entry("Apply", {"f:spec": {"f:maxSurge": {}, "f:revisions": {ITEM: {"f:share": {}}}}})

    found = owned_by_apply([posted, applied], "us", REPLICAS)

    assert found == [
        entry("Apply", {"f:spec": {"f:maxSurge": {}, "f:revisions": {ITEM: {"f:share": {}, ".": {}, "f:name": {}}}}})
    ]


def test_others_their_statuses_and_what_is_moved_already_are_left_alone() -> None:
    entries = [
        entry("Update", {"f:spec": {"f:replicas": {}}}),
        entry("Apply", {"f:spec": {"f:maxSurge": {}}}),
        entry("Update", {"f:metadata": {}}, manager="kubectl"),
        entry("Update", {"f:status": {}}, subresource="status"),
        entry("Update", {"f:spec": {"f:replicas": {}}}, subresource="scale"),
    ]

    assert owned_by_apply(entries, "us", REPLICAS) is None
