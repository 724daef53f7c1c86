"""What this version cannot do is named with its place, and nothing else is."""

from typing import Any

import pytest

from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.domain.unsupported import SUPPORTED, unsupported

CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("TrainingJob", {}, []),
    ("TrainingJob", {"model": {"architecture": "qwen3"}, "memory": {"zeroStage": 1, "precision": "bf16"}}, []),
    ("TrainingJob", {"memory": {"zeroStage": 3}}, ["not supported yet: spec.memory.zeroStage 3"]),
    ("TrainingJob", {"memory": {"precision": "fp8"}}, ["not supported yet: spec.memory.precision fp8"]),
    ("TrainingJob", {"memory": {"activationCheckpointing": "selective"}}, ["not supported yet: spec.memory.activationCheckpointing selective"]),
    ("TrainingJob", {"memory": {"cpuOffload": True}}, ["not supported yet: spec.memory.cpuOffload true"]),
    ("TrainingJob", {"memory": {"nvmeOffload": {"path": "/x"}}}, ["not supported yet: spec.memory.nvmeOffload"]),
    ("TrainingJob", {"optimization": {"optimizer": "lamb"}}, ["not supported yet: spec.optimization.optimizer lamb"]),
    ("TrainingJob", {"model": {"architecture": "moe"}}, ["not supported yet: spec.model.architecture moe"]),
    ("TrainingJob", {"modelFrom": {"hub": {"id": "a/b"}}}, ["not supported yet: spec.modelFrom.hub"]),
    (
        "TrainingJob",
        {"parallelism": {"tensor": 2, "pipeline": 2, "sequenceParallel": True}},
        [
            "not supported yet: spec.parallelism.tensor 2",
            "not supported yet: spec.parallelism.pipeline 2",
            "not supported yet: spec.parallelism.sequenceParallel true",
        ],
    ),
    ("TrainingJob", {"checkpoint": {"storage": {"s3": {"bucket": "b"}}}}, ["not supported yet: spec.checkpoint.storage.s3"]),
    ("TrainingJob", {"run": {"elastic": {"minWorkers": 1, "maxWorkers": 2}}}, ["not supported yet: spec.run.elastic"]),
    ("TrainingJob", {"logging": {"wandb": {"project": "p"}}}, ["not supported yet: spec.logging.wandb"]),
    ("TrainingJob", {"scheduling": {"backend": "kueue"}}, ["not supported yet: spec.scheduling.backend kueue"]),
    ("TrainingJob", {"scheduling": {"backend": "auto", "gangTimeoutSeconds": 60}}, []),
    ("TrainingJob", {"scheduling": {"gangTimeoutSeconds": 90}}, ["not supported yet: spec.scheduling.gangTimeoutSeconds 90"]),
    ("Checkpoint", {"verification": "Full"}, []),
    ("Checkpoint", {"verification": "Manifest"}, ["not supported yet: spec.verification Manifest"]),
    ("TrainingJob", {"runtime": {"kernels": "fused"}}, ["not supported yet: spec.runtime.kernels fused"]),
    ("Checkpoint", {"source": {"import": {"storage": {"s3": {"bucket": "b"}}}}}, ["not supported yet: spec.source.import.storage.s3"]),
    ("InferenceDeployment", {"model": {"uri": "hf://a/b"}}, ["not supported yet: spec.model.uri hf://a/b"]),
    ("InferenceDeployment", {"model": {"uri": "pvc://models/a"}}, []),
    ("InferenceDeployment", {"rollout": {"type": "canary"}}, ["not supported yet: spec.rollout.type canary"]),
    ("InferenceDeployment", {"router": {"policy": "cacheAware"}}, ["not supported yet: spec.router.policy cacheAware"]),
    (
        "InferenceDeployment",
        {"pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode", "autoscaling": {"max": 3, "mode": "slo"}}]},
        [
            "not supported yet: spec.pools[a].role prefill",
            "not supported yet: spec.pools[b].role decode",
            "not supported yet: spec.pools[b].autoscaling.mode slo",
        ],
    ),
    ("InferenceDeployment", {"pools": [{"name": "a", "autoscaling": {"max": 3, "mode": "external"}}]}, []),
    ("EnginePool", {"revisions": [{"name": "r", "template": {"podsPerReplica": 2}}]}, ["not supported yet: spec.revisions[r].template.podsPerReplica 2"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "spec", "lines"), CASES, ids=[f"{kind} {number}" for number, (kind, _, _) in enumerate(CASES)]
)
def test_unsupported_names(kind: str, spec: dict[str, Any], lines: list[str]) -> None:
    assert unsupported(kind, spec) == lines


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_path_of_the_table_is_a_field_of_the_kind(kind: str) -> None:
    info = next(info for info in KIND_INFOS if info.kind == kind)
    spec = definition(info)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for path in SUPPORTED[kind]:
        schema = spec
        for part in path.split("."):
            schema = schema["properties"][part.removesuffix("[]")]
            schema = schema["items"] if part.endswith("[]") else schema
