"""Admission of manifests: impossible values are refused in the API server's words, all others are completed."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.remote.model_uri import parse_model_uri
from stoker.operator.admission.admission import Admission
from stoker.operator.admission.cel_rules import RuleError, Rules
from stoker.operator.admission.status_cause import InvalidObject, StatusCause
from stoker.operator.api.checkpoint import Checkpoint
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import Resource, read
from stoker.operator.api.trainingjob import TrainingJob
from testing.operator.bad_manifests import BAD, GOOD, JOB, POOL, TOO_LARGE, changed

ROOT = Path(__file__).parents[2]
KINDS: dict[str, type[Resource]] = {
    kind.__name__: kind for kind in (TrainingJob, Checkpoint, InferenceDeployment, EnginePool)
}
EXAMPLES = [
    pytest.param(manifest, id=f"{path.parent.name}/{path.name}")
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if manifest["kind"] in KINDS
]


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission.from_folder(ROOT / "crds")


@pytest.mark.parametrize(
    ("kind", "changes", "text"), [pytest.param(*case[1:], id=case[0]) for case in (*BAD, *TOO_LARGE)]
)
def test_a_bad_manifest_is_refused_with_its_message(
    admission: Admission, kind: str, changes: dict[str, Any], text: str
) -> None:
    manifest = changed(GOOD[kind], changes)
    with pytest.raises(InvalidObject) as refused:
        admission.admit(manifest)
    assert str(refused.value) == f'{kind}.stoker.dev "{manifest["metadata"]["name"]}" is invalid: {text}'


def test_a_rule_that_came_later_refuses_no_status_of_a_stored_object(admission: Admission) -> None:
    """`mode: load` with a goal was admitted once. What changes beside it is judged all the same."""
    old = copy.deepcopy(admission.admit(GOOD["InferenceDeployment"]))
    old["spec"]["pools"][0]["autoscaling"] = {"min": 1, "max": 4, "mode": "load", "ttftMs": 500}
    admission.admit({**old, "status": {"phase": "Serving"}}, old)
    admission.admit(changed(old, {"spec.router.holdSeconds": 5}), old)
    with pytest.raises(InvalidObject, match="ttftMs has no effect with mode load"):
        admission.admit(changed(old, {"spec.pools[0].autoscaling.max": 5}), old)


def test_the_table_is_long_and_its_names_are_unique() -> None:
    assert len(BAD) >= 40
    assert len({name for name, *_ in BAD}) == len(BAD)


@pytest.mark.parametrize("kind", GOOD)
def test_the_good_manifests_of_the_table_are_admitted(admission: Admission, kind: str) -> None:
    admission.admit(GOOD[kind])


@pytest.mark.parametrize("manifest", EXAMPLES)
def test_an_example_is_admitted_and_read_as_its_type(admission: Admission, manifest: dict[str, Any]) -> None:
    stored = admission.admit(manifest)
    typed = read(KINDS[manifest["kind"]], stored)
    assert admission.admit(stored, stored) == stored
    assert typed == read(KINDS[manifest["kind"]], manifest)


@pytest.mark.parametrize("manifest", EXAMPLES)
def test_the_types_defaults_are_those_of_the_schema(admission: Admission, manifest: dict[str, Any]) -> None:
    stored = admission.admit(manifest)
    spec = read(KINDS[manifest["kind"]], manifest).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    assert _without_empty(stored["spec"]) == _without_empty(spec)


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        members = {name: _without_empty(member) for name, member in value.items()}
        return {name: member for name, member in members.items() if member not in ({}, [])}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def test_defaults_reach_into_sections_that_a_default_made_and_into_items(admission: Admission) -> None:
    stored = admission.admit(JOB)
    assert stored["spec"]["parallelism"] == {
        "tensor": 1,
        "pipeline": 1,
        "pipelineSchedule": "OneFOneB",
        "stagesPerRank": 1,
        "expert": 1,
        "context": 1,
        "contextMethod": "AllGather",
        "sequenceParallel": False,
        "replicate": 1,
    }
    assert stored["spec"]["optimization"]["learningRate"] == "3e-4"
    assert stored["spec"]["data"]["sources"] == [{"name": "text", "path": "/data/text", "weight": 1, "format": "auto"}]
    assert "status" not in stored


def test_a_null_counts_as_absent(admission: Admission) -> None:
    stored = admission.admit(changed(JOB, {"spec.memory": {"precision": None}, "spec.run.elastic": None}))
    assert stored["spec"]["memory"]["precision"] == "bf16"
    assert "elastic" not in stored["spec"]["run"]


def test_arguments_are_not_changed(admission: Admission) -> None:
    manifest = copy.deepcopy(JOB)
    stored = admission.admit(manifest)
    stored["spec"]["data"]["sources"][0]["name"] = "other"
    assert manifest == JOB


def test_opaque_objects_keep_everything(admission: Admission) -> None:
    assert admission.admit(POOL)["spec"]["revisions"][0]["template"]["config"] == {"a": 1}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"shareProcessNamespace": True, "more": [1, {"x": None}]}}
    assert (
        admission.admit(changed(JOB, {"spec.workers.podTemplate": template}))["spec"]["workers"]["podTemplate"]
        == template
    )


def test_a_mount_may_belong_to_a_volume_of_the_pod_template(admission: Admission) -> None:
    mounts = [{"name": "csi", "mountPath": "/data"}]
    admission.admit(changed(JOB, {"spec.workers.podTemplate": {"spec": {}}, "spec.workers.volumeMounts": mounts}))


def test_all_wrong_fields_are_named_at_once(admission: Admission) -> None:
    with pytest.raises(InvalidObject) as refused:
        admission.admit(changed(JOB, {"spec.memory.zeroStage": 9, "spec.training.totalSteps": 0}))
    assert [(cause.field, cause.reason) for cause in refused.value.causes] == [
        ("spec.memory.zeroStage", "FieldValueInvalid"),
        ("spec.training.totalSteps", "FieldValueInvalid"),
    ]


def test_another_version_is_refused(admission: Admission) -> None:
    with pytest.raises(InvalidObject) as refused:
        admission.admit({**JOB, "apiVersion": "stoker.dev/v9"})
    assert refused.value.causes == [
        StatusCause("apiVersion", 'Invalid value: "stoker.dev/v9": must be stoker.dev/v1alpha1', "FieldValueInvalid")
    ]


def test_kinds_of_others_pass(admission: Admission) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "a"}, "spec": {"x": 1}}
    assert admission.admit(claim) == claim


class Compilations:
    """An environment of rules that counts what it compiles."""

    def __init__(self) -> None:
        types = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}
        self.environment = cel.NewEnv(variables=types, extensions=[ext_strings.ExtStrings()])
        self.count = 0

    def compile(self, expression: str) -> Any:
        self.count += 1
        return self.environment.compile(expression)


def test_rules_are_compiled_once(admission: Admission) -> None:
    """Compiled anew for each admission they take a quarter of a second of processor time, else 5 ms."""
    compilations = Compilations()
    schema = definition(KIND_INFOS[0])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules, stored = Rules(schema, environment=compilations), admission.admit(JOB)
    made = compilations.count
    assert made > 20
    for _ in range(3):
        assert list(rules.causes(stored, stored)) == []
    assert compilations.count == made


def test_a_folder_without_crds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no CRD files"):
        Admission.from_folder(tmp_path)


def test_a_number_beyond_64_bits_is_refused(admission: Admission) -> None:
    with pytest.raises(
        InvalidObject, match=r"spec.training.seed in body should be less than or equal to 9223372036854775807"
    ):
        admission.admit(changed(JOB, {"spec.training.seed": 2**63}))


def test_a_rule_that_does_not_compile_is_refused_with_its_place() -> None:
    crd = json.loads(json.dumps(definition(KIND_INFOS[0])))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["run"]["x-kubernetes-validations"] = [{"rule": "self.cancel ===", "message": "m"}]
    with pytest.raises(RuleError, match=r"^\.spec\.run: self\.cancel ===: "):
        Admission([crd])


def test_the_quickstarts_config_map_is_the_jsonl_file() -> None:
    folder = ROOT / "examples" / "quickstart"
    config_map = yaml.safe_load((folder / "15-questions.yaml").read_text(encoding="utf-8"))
    assert config_map["data"]["stoker-qa.jsonl"] == (folder / "stoker-qa.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "uri",
    [
        "hf://a/b", "hf://a/b@main", "hf://a/b@refs/pr/1", "hf://a", "hf://a/b/c", "hf://a/b@", "hf:///b",
        "s3://bucket", "s3://bucket/a/b", "s3://bucket/a/", "s3://b", "s3://Bucket/a", "s3://bucket//a",
        "oci://host/a", "oci://host:5000/a/b:v1", f"oci://host/a@sha256:{'0' * 64}", "oci://host", "oci://host/A",
        "oci://host/a:", "oci://host/a@sha256:0",
    ],
)  # fmt: skip
def test_admission_and_engine_take_the_same_uris(admission: Admission, uri: str) -> None:
    def taken(check: Callable[[], object]) -> bool:
        try:
            check()
        except (InvalidObject, CheckpointError):
            return False
        return True

    manifest = changed(GOOD["InferenceDeployment"], {"spec.model": {"uri": uri}})
    assert taken(lambda: admission.admit(manifest)) == taken(lambda: parse_model_uri(uri))
