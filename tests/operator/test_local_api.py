"""The supervisor's API when the state folder fails, when objects are lost, and when it fails itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.service.local.api import make_app
from stoker.operator.service.local.kube_api import kube_routes
from stoker.pod.control_key import new_private_key
from testing.operator.cluster_contract import config_map
from testing.operator.fakes import FakeClock
from tests.operator.test_local_storage import Disk, new_store


class Supervisor:
    """The part of a supervisor that the API may call."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects

    def stop(self, grace_s: float | None = None) -> None: ...

    def detach(self) -> None: ...

    def facts(self) -> Mapping[str, object]:
        return {"problems": self.problems()}

    def problems(self) -> list[str]:
        return self.objects.problems()

    @property
    def writable(self) -> bool:
        return not self.objects.storage_problem


def serve(objects: ObjectStore, folder: Path) -> TestClient:
    app = make_app(objects, Addresses("ports", lambda _: True), StateFolders(folder), Supervisor(objects))
    return TestClient(app, raise_server_exceptions=False)


def apply(client: TestClient, *objects: Any, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.post("/v1/apply", json={"objects": objects, **options}).json()["results"]
    return found


def test_readiness_follows_the_state_folder(tmp_path: Path) -> None:
    disk = Disk()
    objects = new_store(tmp_path / "objects", disk)
    client = serve(objects, tmp_path)
    assert client.get("/livez").status_code == 200
    assert (client.get("/readyz").status_code, client.get("/readyz").json()["problems"]) == (200, [])
    disk.full = True
    (failed,) = apply(client, config_map("one"))
    assert failed["result"] == "failed"
    assert "No space left on device; nothing of it was stored" in failed["error"]
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503
    assert "No space left on device" in client.get("/readyz").json()["problems"][0]
    assert client.get("/v1/objects/configmaps").json()["problems"] == client.get("/v1/status").json()["problems"]
    disk.full = False
    objects.repair()
    assert client.get("/readyz").status_code == 200


def test_a_delete_on_a_full_disk_is_an_error_of_storage(tmp_path: Path) -> None:
    disk = Disk()
    objects = new_store(tmp_path / "objects", disk)
    objects.create(config_map("one"))
    disk.full = True
    answer = serve(objects, tmp_path).delete("/v1/objects/configmaps/default/one")
    assert answer.status_code == 507
    assert "No space left on device" in answer.json()["error"]


def checkpoint() -> dict[str, Any]:
    spec = {"source": {"import": {"storage": {"claimName": "c"}, "folder": "f"}}}
    metadata = {"name": "kept", "namespace": "default"}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": metadata, "spec": spec}


def test_a_lost_object_is_made_anew_on_request_only(tmp_path: Path) -> None:
    new_store(tmp_path / "objects").create(checkpoint())
    (tmp_path / "objects" / "Checkpoint" / "default" / "kept.json").unlink()
    client = serve(new_store(tmp_path / "objects"), tmp_path)
    (refused,) = apply(client, checkpoint())
    assert refused["result"] == "refused"
    assert "Checkpoint default/kept is lost" in refused["error"]
    assert "is lost" in client.get("/v1/objects/ckpt?name=kept").json()["error"]
    (created,) = apply(client, checkpoint(), recreate_lost=True)
    assert created["result"] == "created"
    assert client.get("/v1/status").json()["problems"] == []


def test_a_lost_object_can_be_deleted(tmp_path: Path) -> None:
    new_store(tmp_path / "objects").create(checkpoint())
    (tmp_path / "objects" / "Checkpoint" / "default" / "kept.json").unlink()
    client = serve(new_store(tmp_path / "objects"), tmp_path)
    assert client.delete("/v1/objects/ckpt/default/kept").json() == {"gone": True}
    assert client.get("/v1/status").json()["problems"] == []


def test_a_lost_config_map_is_made_anew_without_a_question(tmp_path: Path) -> None:
    new_store(tmp_path / "objects").create(config_map("one"))
    (tmp_path / "objects" / "ConfigMap" / "default" / "one.json").unlink()
    (created,) = apply(serve(new_store(tmp_path / "objects"), tmp_path), config_map("one"))
    assert created["result"] == "created"


def test_a_fault_of_the_supervisor_is_answered_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = new_store(tmp_path / "objects")

    def fail(*_: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(objects, "of_kind", fail)
    answer = serve(objects, tmp_path).get("/v1/objects/pods")
    assert answer.status_code == 500
    assert answer.json() == {
        "error": "the supervisor failed: RuntimeError('no idea') (supervisor.log has the traceback)"
    }


def test_an_edit_of_labels_alone_is_said_to_configure(tmp_path: Path) -> None:
    """It leaves the generation at 1."""
    client = serve(new_store(tmp_path / "objects"), tmp_path)
    labelled = config_map("one") | {"metadata": {"name": "one", "labels": {"a": "b"}}}
    results = [apply(client, found)[0]["result"] for found in (config_map("one"), labelled, labelled)]
    assert results == ["created", "configured", "unchanged"]


@pytest.mark.parametrize(
    ("method", "path", "form", "body", "says"),
    [
        ("POST", "", "application/json", {"metadata": "x"}, 'metadata: an object is needed, got "x"'),
        ("PATCH", "/one", "application/merge-patch+json", {"metadata": 3}, "metadata: an object is needed, got 3"),
        ("PATCH", "/one", "application/apply-patch+yaml", {"metadata": [1]}, "metadata: an object is needed, got [1]"),
        ("DELETE", "/one", "application/json", {"preconditions": "u"}, 'preconditions: an object is needed, got "u"'),
    ],
)
def test_a_part_of_a_body_that_is_no_object_is_named(
    tmp_path: Path, method: str, path: str, form: str, body: dict[str, Any], says: str
) -> None:
    objects = new_store(tmp_path / "objects")
    objects.create(config_map("one"))
    addresses, folders = Addresses("ports", lambda _: True), StateFolders(tmp_path)
    pods = PodHttp(new_private_key(), FakeClock(), lambda: "id")
    routes = kube_routes(LocalCluster(objects, addresses, pods, FakeClock()), folders, Gpus(()))
    client = TestClient(make_app(objects, addresses, folders, Supervisor(objects), routes))
    address = f"/api/v1/namespaces/default/configmaps{path}"
    answer = client.request(method, address, content=json.dumps(body), headers={"Content-Type": form})
    assert (answer.status_code, answer.json()["message"]) == (422, says)
    assert len(objects.of_kind("ConfigMap")) == 1
