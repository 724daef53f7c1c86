"""Models from the hub, buckets and registries, as the operator renders and shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import uri_source
from testing.operator.serving_world import Serving
from testing.operator.training_world import Run

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "access"}, "stringData": {"HF_TOKEN": "hf_secret"}}


def config_of(config_maps: list[Object]) -> dict[str, Any]:
    texts = [found["data"]["config.json"] for found in config_maps if "config.json" in found.get("data", {})]
    return next(config for config in map(json.loads, texts) if "model" in config or "model_from" in config)


def volumes_of(pod: Object) -> dict[str, tuple[str, Any]]:
    """Mount path -> (kind of volume, its source)."""
    sources = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return {
        mount["mountPath"]: next((kind, source) for kind, source in sources[mount["name"]].items() if kind != "name")
        for mount in mounts
    }


def variables_of(pod: Object) -> dict[str, Any]:
    found = pod["spec"]["containers"][0]["env"]
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in found}


@pytest.mark.parametrize("uri", ["hf://org/model@main", "s3://models/tiny", "oci://registry.example/team/model:v1"])
def test_engines_fetch_a_uri_into_the_cache_of_their_node(uri: str) -> None:
    serving = Serving(model={"uri": uri, "uriSecretRef": {"name": "access"}})
    serving.cluster.settings = Settings(model_cache_path="/var/lib/stoker/models")
    serving.cluster.settle()
    assert serving.status["message"] == "Secret access does not exist (spec.model.uriSecretRef)"
    serving.cluster.add(SECRET)
    serving.rest()
    (engine,) = serving.engines()
    volumes, variables = volumes_of(engine), variables_of(engine)
    assert volumes["/var/stoker/models"] == ("hostPath", {"path": "/var/lib/stoker/models", "type": "Directory"})
    assert volumes["/var/stoker/model-access"] == ("secret", {"secretName": "access"})
    assert variables["STOKER_MODEL_ACCESS"] == "/var/stoker/model-access"
    assert variables["HF_HOME"].startswith("/var/stoker/work/")
    model = config_of(serving.cluster.of_kind("ConfigMap"))["model"]
    assert (model["path"], model["cache"]) == (uri, "/var/stoker/models")
    assert "hf_secret" not in json.dumps(engine)


def test_without_a_folder_of_the_node_each_engine_has_a_cache_of_its_own() -> None:
    serving = Serving(model={"uri": "hf://org/model"})
    serving.rest()
    (engine,) = serving.engines()
    assert volumes_of(engine)["/var/stoker/models"] == ("emptyDir", {})
    assert "STOKER_MODEL_ACCESS" not in variables_of(engine)


@pytest.mark.parametrize("claim", [None, "blocks"])
def test_the_disk_tier_is_a_volume_of_limited_size_or_a_claim(claim: str | None) -> None:
    disk = {"bytes": 10**9, **({"claimName": claim} if claim else {})}
    serving = Serving(
        model={"uri": "hf://org/model"}, engine={"cache": {"hostMemoryBytes": 10**8, "disk": disk, "salt": "us"}}
    )
    serving.rest()
    (engine,) = serving.engines()
    limited = ("emptyDir", {"sizeLimit": str(10**9 + 5 * 10**7 + 64 * 2**20)})
    expected = limited if claim is None else ("persistentVolumeClaim", {"claimName": claim})
    assert volumes_of(engine)["/var/stoker/blocks"] == expected
    cache = config_of(serving.cluster.of_kind("ConfigMap"))["cache"]
    assert (cache["disk"], cache["salt"]) == ({"path": "/var/stoker/blocks", "bytes": 10**9}, "us")


def test_the_store_is_the_same_claims_at_the_same_paths_in_every_engine() -> None:
    store = {"claimNames": ["a", "b"], "replicas": 2, "bytes": 10**9}
    serving = Serving(
        model={"uri": "hf://org/model"}, engine={"cache": {"hostMemoryBytes": 10**8, "store": store}},
    )  # fmt: skip
    serving.rest()
    (engine,) = serving.engines()
    for claim in ("a", "b"):
        expected = ("persistentVolumeClaim", {"claimName": claim})
        assert volumes_of(engine)[f"/var/stoker/store/{claim}"] == expected
    assert config_of(serving.cluster.of_kind("ConfigMap"))["cache"]["store"] == {
        "paths": ["/var/stoker/store/a", "/var/stoker/store/b"], "replicas": 2, "bytes": 10**9, "ttl_s": 86400,
    }  # fmt: skip


def test_without_a_disk_tier_an_engine_is_what_it_was_before_there_was_one() -> None:
    serving = Serving(model={"uri": "hf://org/model"})
    serving.rest()
    assert "/var/stoker/blocks" not in volumes_of(serving.engines()[0])
    assert {"disk", "store", "salt"}.isdisjoint(config_of(serving.cluster.of_kind("ConfigMap"))["cache"])


def test_progress_and_digest_of_a_fetch_are_in_status() -> None:
    serving = Serving(model={"uri": "hf://org/model"})
    serving.rest()
    (engine,) = serving.engines()
    serving.cluster.report(engine, {"phase": "Loading", "message": "FetchingModel 43 %"})
    serving.cluster.settle()
    assert serving.pool_status["engines"][0]["message"] == "FetchingModel 43 %"
    assert "modelDigest" not in serving.status
    serving.cluster.report(engine, {"phase": "Serving", "message": "", "model_digest": "commit:0123abcd"})
    serving.cluster.settle()
    assert serving.pool_status["engines"][0]["modelDigest"] == "commit:0123abcd"
    assert serving.status["modelDigest"] == "commit:0123abcd"


@pytest.mark.parametrize(
    ("uri", "path", "claim"),
    [
        ("file:///models/a", "/models/a", None),
        ("pvc://claim/a/b", "/var/stoker/checkpoints/a/b", "claim"),
        ("hf://a/b", "hf://a/b", None),
    ],
)
def test_sources(uri: str, path: str, claim: str | None) -> None:
    found = uri_source(uri)
    assert (found.path, found.claim, found.fetched) == (path, claim, uri == path)
    with pytest.raises(ValueError, match="allowed: file, pvc, hf, s3, oci"):
        uri_source("ftp://a/b")


def test_a_job_starts_from_a_repository_of_the_hub() -> None:
    hub = {"id": "org/model", "revision": "v1", "tokenSecretRef": {"name": "access", "key": "HF_TOKEN"}}
    run = Run(model=None, modelFrom={"hub": hub})
    run.cluster.settle()
    assert run.status["message"] == "Secret access does not exist (spec.modelFrom.hub.tokenSecretRef)"
    run.cluster.add(SECRET)
    run.start()
    variables = variables_of(run.gang[0])
    assert variables["HF_TOKEN"] == {"secretKeyRef": {"name": "access", "key": "HF_TOKEN"}}
    assert volumes_of(run.gang[0])["/var/stoker/models"] == ("emptyDir", {})
    source = config_of(run.cluster.of_kind("ConfigMap"))["model_from"]
    assert source == {"kind": "huggingFace", "path": "hf://org/model@v1", "cache": "/var/stoker/models"}
