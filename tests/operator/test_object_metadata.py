"""Metadata and Kubernetes' own kinds in the embedded cluster: what is malformed is refused by name, and not stored."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.local.object_metadata import MAX_ANNOTATION_BYTES
from stoker.operator.cluster.local.object_storage import LoadedObjects, MemoryOnly, StoredObject
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.domain.plan import Key, Object, Ref
from testing.operator.bad_manifests import DELETE, changed
from tests.operator.test_local_storage import new_store

CONFIG: Object = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "one", "labels": {"app": "x"}},
    "data": {"a": "b"},
}
SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "one"},
    "spec": {"ports": [{"port": 80}]},
}
POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one"},
    "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "command": ["true"]}]},
}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "b"}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return new_store(tmp_path / "objects")


BAD = [
    ("metadata", [], "metadata: a map is needed, got []"),
    ("metadata.name", "One", "metadata.name: a lower-case DNS name of at most 253 characters is needed, got 'One'"),
    ("metadata.name", "x" * 254, "(256 characters)"),
    ("metadata.namespace", "a.b", "metadata.namespace: at most 63 lower-case letters, digits and '-' are needed"),
    ("metadata.nonsense", 1, "metadata.nonsense: unknown field, known are annotations, "),
    ("metadata.uid", 5, "metadata.uid: a string is needed, got 5"),
    ("metadata.labels", 5, "metadata.labels: a map of strings is needed, got 5"),
    ("metadata.labels", {"a b": "c"}, "metadata.labels: a key is an optional lower-case DNS name and /, then at most"),
    ("metadata.labels", {"a": "ä"}, "metadata.labels.a: at most 63 letters, digits, '-', '_' and '.', the first"),
    ("metadata.labels", {"a": 1}, "metadata.labels.a: a string is needed, got 1"),
    ("metadata.annotations", ["a"], "metadata.annotations: a map of strings is needed, got ['a']"),
    ("metadata.annotations", {"a": "x" * MAX_ANNOTATION_BYTES}, "at most 262144 bytes are allowed, got 262145"),
    ("metadata.finalizers", "a", "metadata.finalizers: a list of names is needed, got 'a'"),
    ("metadata.finalizers", [5], "metadata.finalizers[0]: a name as example.com/name is needed, got 5"),
    ("metadata.finalizers", ["plain"], "metadata.finalizers[0]: a name as example.com/name is needed, got 'plain'"),
    ("metadata.ownerReferences", 5, "metadata.ownerReferences: a list is needed, got 5"),
    ("metadata.ownerReferences", [5], "metadata.ownerReferences[0].apiVersion: a string is needed, got None"),
    ("metadata.ownerReferences", [{**OWNER, "uid": 5}], "metadata.ownerReferences[0].uid: a string is needed, got 5"),
]


@pytest.mark.parametrize(
    ("path", "value", "text"), BAD, ids=[f"{path}-{index}" for index, (path, *_) in enumerate(BAD)]
)
@pytest.mark.parametrize("stored", [False, True], ids=["new", "stored"])
def test_malformed_metadata_is_refused_and_leaves_what_is_stored(
    store: ObjectStore, path: str, value: Any, text: str, *, stored: bool
) -> None:
    """A finalizer that is no text was stored, and no pass of the operator could read the object any more."""
    before = store.apply(copy.deepcopy(CONFIG), "user") if stored else None
    with pytest.raises(Invalid) as refused:
        store.apply(changed(CONFIG, {path: value}), "user")
    assert text in str(refused.value)
    assert len(str(refused.value)) < 500
    assert store.find(Key("ConfigMap", "default", "one")) == before


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"stoker.dev/a_b.c": "", "x": "A-1_b.c"}, "annotations": {"a": "any text, ä"}},
        {"finalizers": ["stoker.dev/checkpoint", "foregroundDeletion"], "ownerReferences": [OWNER], "uid": None},
        {"labels": None, "annotations": None, "managedFields": [{}], "generation": 3, "selfLink": "/x"},
    ],
    ids=["texts", "references", "as exported"],
)
def test_metadata_that_an_api_server_takes_is_taken(store: ObjectStore, metadata: dict[str, Any]) -> None:
    owner = store.create(changed(CONFIG, {"metadata.name": "owner"}))
    references = [{**one, "uid": owner["metadata"]["uid"]} for one in metadata.get("ownerReferences", ())]
    given = {**metadata, "name": "one", **({"ownerReferences": references} if references else {})}
    applied = store.apply({**CONFIG, "metadata": given}, "user")
    assert {name: applied["metadata"][name] for name in ("labels", "finalizers") if given.get(name)} == {
        name: given[name] for name in ("labels", "finalizers") if given.get(name)
    }


@pytest.mark.parametrize(
    ("body", "path", "value", "text"),
    [
        (CONFIG, "data", 5, "ConfigMap one: data: a map is needed, got 5"),
        (SERVICE, "spec", DELETE, "Service one: spec: a map is needed, got None"),
        (SERVICE, "spec.ports", [80], "Service one: spec.ports: a list of maps is needed, got [80]"),
        (SERVICE, "spec.ports[0].port", "http", "spec.ports[0].port: a number from 1 to 65535 is needed, got 'http'"),
        (SERVICE, "spec.ports[0].port", 70000, "spec.ports[0].port: a number from 1 to 65535 is needed, got 70000"),
        (SERVICE, "spec.selector", [], "Service one: spec.selector: a map is needed, got []"),
        (POD, "spec", "x", "Pod one: spec: a map is needed, got 'x'"),
        (POD, "spec.containers", {"a": 1}, "Pod one: spec.containers: a list of maps is needed, got {'a': 1}"),
        (POD, "spec.containers[0]", None, "Pod one: spec.containers: a list of maps is needed, got [None]"),
        (POD, "spec.volumes", ["x"], "Pod one: spec.volumes: a list of maps is needed, got ['x']"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(
    store: ObjectStore, body: Object, path: str, value: Any, text: str
) -> None:
    with pytest.raises(Invalid) as refused:
        store.apply(changed(body, {path: value}), "user")
    assert text in str(refused.value)


class EarlierVersion(MemoryOnly):
    """A state folder with a label that was stored before labels were checked."""

    def load(self) -> LoadedObjects:
        metadata = {"namespace": "default", "uid": "u", "resourceVersion": "7", "labels": {"a b": "c"}}
        held = changed(CONFIG, {"metadata": {"name": "one", "finalizers": ["stoker.dev/hold"], **metadata}})
        return LoadedObjects([StoredObject(held, {})])


def test_a_label_of_an_earlier_version_keeps_no_finalizer_from_being_removed() -> None:
    store = ObjectStore(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: "v", storage=EarlierVersion())
    ref = Ref("ConfigMap", "default", "one", "u")
    store.delete(ref)
    store.patch(ref, {"metadata": {"finalizers": []}})
    assert store.find(Key("ConfigMap", "default", "one")) is None
