"""The committed CRDs: generated from the types, valid in Kubernetes, complete for autoscalers and `kubectl get`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.operator.api import lint
from stoker.operator.api.crd import KIND_INFOS, KindInfo, definition, drift, main, room, text
from stoker.operator.api.reference import main as reference_main
from stoker.operator.cluster.kinds import KINDS

ROOT = Path(__file__).parents[2]
BY_KIND = {info.kind: info for info in KIND_INFOS}
each_kind = pytest.mark.parametrize("info", KIND_INFOS, ids=lambda info: info.kind)


def schema_of(info: KindInfo) -> dict[str, Any]:
    schema: dict[str, Any] = definition(info)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.strip(".").split("."):
        schema = schema["properties"][name]
    return schema


def nodes(schema: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [
        *schema.get("properties", {}).values(),
        *(schema[key] for key in ("items", "additionalProperties") if key in schema),
    ]
    return [schema, *(node for child in inner for node in nodes(child))]


def test_the_committed_files_are_what_the_types_say() -> None:
    assert drift(ROOT / "crds") == []
    assert main(["--check", str(ROOT / "crds")]) == 0


@each_kind
def test_every_number_is_one_that_helm_keeps(info: KindInfo) -> None:
    """Helm reads numbers as floats of 64 bits: a larger whole number would come out as another one."""
    limits = [
        node[name] for node in nodes(schema_of(info)) for name in ("minimum", "maximum", "default") if name in node
    ]
    assert [limit for limit in limits if isinstance(limit, int) and abs(limit) > 2**53] == []


def test_the_reference_page_is_what_the_types_say() -> None:
    assert reference_main(["--check", str(ROOT / "docs" / "api-reference.md")]) == 0


def test_drift_is_found_in_changed_missing_and_left_over_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--write", str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    (tmp_path / "stoker.dev_checkpoints.yaml").unlink()
    (tmp_path / "stoker.dev_enginepools.yaml").write_text("old")
    (tmp_path / "stoker.dev_workflows.yaml").write_text("of another day")
    assert drift(tmp_path) == [
        "stoker.dev_checkpoints.yaml",
        "stoker.dev_enginepools.yaml",
        "stoker.dev_workflows.yaml",
    ]
    assert main(["--check", str(tmp_path)]) == 1
    assert "stoker.dev_checkpoints.yaml is out of date" in capsys.readouterr().err


@each_kind
def test_a_schema_is_structural_and_limited_everywhere(info: KindInfo) -> None:
    assert list(lint.problems(schema_of(info))) == []


@each_kind
def test_a_crd_is_small_enough_for_client_side_apply(info: KindInfo) -> None:
    size = max(len(json.dumps(definition(info), separators=(",", ":"))), len(text(info)))
    limit = {"TrainingJob": 49_000, "InferenceDeployment": 49_000}.get(info.kind, 40_000)
    assert lint.max_bytes(info.kind) == limit
    assert room(info) == limit - size
    assert room(info) > 0, f"{info.kind} is {-room(info)} bytes too large: shorten descriptions, tell fields once"


def test_writing_the_crds_says_how_much_room_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    limits = {"TrainingJob": "49,000", "InferenceDeployment": "49,000"}
    assert lines == [
        f"{tmp_path / info.file_name}: {room(info):,} of {limits.get(info.kind, '40,000')} bytes are left"
        for info in KIND_INFOS
    ]


@each_kind
def test_text_that_looks_like_a_number_is_quoted_for_every_yaml_reader(info: KindInfo) -> None:
    assert yaml.safe_load(text(info)) == definition(info)
    assert not re.search(r"default: [0-9.]+e", text(info))


@each_kind
def test_columns_selectable_fields_and_scale_name_real_fields(info: KindInfo) -> None:
    version = definition(info)["spec"]["versions"][0]
    for column in version["additionalPrinterColumns"]:
        if not column["jsonPath"].startswith(".metadata"):
            at(schema_of(info), column["jsonPath"].split("[")[0])
    for field in version.get("selectableFields", []):
        assert at(schema_of(info), field["jsonPath"])["type"] in ("string", "boolean", "integer")
    assert len(version.get("selectableFields", [])) <= 8


def test_engine_pool_has_a_scale_subresource_with_a_text_selector() -> None:
    version = definition(BY_KIND["EnginePool"])["spec"]["versions"][0]
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    schema = schema_of(BY_KIND["EnginePool"])
    assert at(schema, ".spec.replicas")["type"] == "integer"
    assert at(schema, ".status.replicas")["type"] == "integer"
    assert at(schema, ".status.selector")["type"] == "string"


@each_kind
def test_every_kind_has_conditions_as_a_map_by_type_and_the_line_that_says_why(info: KindInfo) -> None:
    status = at(schema_of(info), ".status")["properties"]
    assert status["conditions"]["x-kubernetes-list-type"] == "map"
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert {"observedGeneration", "phase", "message"} <= status.keys()


@each_kind
def test_a_status_has_no_defaults(info: KindInfo) -> None:
    assert [node for node in nodes(at(schema_of(info), ".status")) if "default" in node] == []


@each_kind
def test_the_cluster_seam_knows_the_kind_by_the_same_names(info: KindInfo) -> None:
    known = KINDS[info.kind]
    assert (known.plural, known.short, known.scale) == (info.plural, info.short_name, info.scale)


BAD_SCHEMAS = [
    ({"$ref": "#/x", "type": "string", "maxLength": 1}, ": $ref has no place in a structural schema"),
    ({"anyOf": [], "type": "string", "maxLength": 1}, ": anyOf has no place in a structural schema"),
    ({"type": "string"}, ": maxLength is missing"),
    ({"x-kubernetes-int-or-string": True}, ": maxLength is missing"),
    ({"maxLength": 3}, ": type is missing"),
    ({"type": "number"}, ": no floats: use a decimal string"),
    ({"type": "array", "items": {"type": "integer"}, "x-kubernetes-list-type": "atomic"}, ": maxItems is missing"),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, ": x-kubernetes-list-type is missing"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ": maxProperties is missing"),
    ({"type": "object", "additionalProperties": False, "maxProperties": 1}, ": additionalProperties must be a schema"),
    ({"type": "integer", "exclusiveMinimum": 0}, ": exclusive limits are written differently in OpenAPI 3.0"),
    ({"type": "object", "x-kubernetes-validations": [{"rule": "true"}]}, ": a rule needs a message of one line"),
    (
        {"type": "object", "x-kubernetes-validations": [{"rule": "true", "message": "m", "fieldPath": ".x"}]},
        ": fieldPath .x names no field",
    ),
    (
        {
            "type": "array",
            "maxItems": 1,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 1}}},
        },
        ": list key name must be required or have a default",
    ),
]


@pytest.mark.parametrize(("schema", "problem"), BAD_SCHEMAS, ids=[problem for _, problem in BAD_SCHEMAS])
def test_the_lint_finds(schema: dict[str, Any], problem: str) -> None:
    assert list(lint.problems(schema)) == [problem]


def test_rules_of_a_kind_itself_stand_at_the_top_of_its_schema() -> None:
    info = next(info for info in KIND_INFOS if info.kind == "InferenceDeployment")
    top = definition(info)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    assert all("o.metadata.name" in rule["rule"] for rule in top)
    assert [rule["fieldPath"] for rule in top] == [".spec.router"] * 2
