"""Each pair of a TrainingJob's options is refused by admission, plan and trainer alike, or by none of them.

Imports operator and trainer, as `test_contract_config.py` does. `tests/trainer/test_layouts.py` trains such pairs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest
import torch

from stoker.model.config import ModelConfig
from stoker.model.kernels.fp8 import MULTIPLE
from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.domain.job_plan import job_of_spec
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.render.trainer import attempt_config, pin
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.plan.estimate import make_plan
from stoker.pod.plan.layout_rules import EIGHT_BIT_MULTIPLE, refusals_of_trainer
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.parallel_dims import check_supported
from stoker.trainer.rank.ahead.absent_ranks import absent_mesh
from stoker.trainer.rank.fp8_weights import check_fp8
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.run_inputs import check_heads, check_layout, check_length, parse_model

ADMISSION = Admission(definition(info) for info in KIND_INFOS if info.kind == "TrainingJob")
CPU = torch.device("cpu")

DENSE: dict[str, Any] = {
    "architecture": "qwen3",
    "vocabSize": 512,
    "hiddenSize": 64,
    "intermediateSize": 128,
    "numLayers": 4,
    "numHeads": 8,
    "numKvHeads": 4,
    "headDim": 16,
    "maxPositionEmbeddings": 64,
}
EXPERTS = {"architecture": "qwen3-moe", "numExperts": 8, "numExpertsPerToken": 2, "moeIntermediateSize": 64}
SPEC: dict[str, Any] = {
    "model": DENSE,
    "training": {"totalSteps": 2, "globalBatchSize": 8, "sequenceLength": 32},
    "memory": {"precision": "fp32"},
    "runtime": {"device": "cpu"},
    "workers": {
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    },
    "data": {"sources": [{"name": "corpus", "path": "/data"}]},
    "checkpoint": {"storage": {"claimName": "runs"}},
}
PIPELINE = {"parallelism.pipeline": 2}
ZERO_BUBBLE = {"parallelism.pipelineSchedule": "ZeroBubble"}
INTERLEAVED = {"parallelism.pipelineSchedule": "Interleaved"}
CONTEXT = {"parallelism.context": 2}
SELECTIVE = {"memory.activationCheckpointing": "selective"}
NO_EFFECT: dict[str, Mapping[str, Any]] = {
    "sequence parallel alone": {"parallelism.sequenceParallel": True},
    "schedule alone": ZERO_BUBBLE,
    "context method alone": {"parallelism.contextMethod": "Ring"},
    "warm-up": {"optimization.warmupSteps": 3},
}
"""Refused by admission alone: the ranks of a rendered configuration train as without them, or read the corpus first."""
OPTIONS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "tensor 2": (2, {"parallelism.tensor": 2}),
    "tensor 3": (3, {"parallelism.tensor": 3}),
    "sequence parallel": (2, {"parallelism.tensor": 2, "parallelism.sequenceParallel": True}),
    "pipeline": (2, PIPELINE),
    "zero bubble": (2, {**PIPELINE, **ZERO_BUBBLE, "parallelism.stagesPerRank": 2}),
    "interleaved": (2, {**PIPELINE, **INTERLEAVED, "parallelism.stagesPerRank": 2}),
    "interleaved, one stage": (2, {**PIPELINE, **INTERLEAVED}),
    "two stages of 1F1B": (2, {**PIPELINE, "parallelism.stagesPerRank": 2}),
    "more stages than layers": (8, {"parallelism.pipeline": 8}),
    "experts": (1, {"model": EXPERTS}),
    "expert 2": (2, {"model": EXPERTS, "parallelism.expert": 2}),
    "expert 2 of none": (2, {"parallelism.expert": 2}),
    "context": (2, CONTEXT),
    "Ring": (2, {**CONTEXT, "parallelism.contextMethod": "Ring"}),
    "Ulysses": (2, {**CONTEXT, "parallelism.contextMethod": "Ulysses"}),
    "replicate": (2, {"parallelism.replicate": 2}),
    "replicate of one": (1, {"parallelism.replicate": 2}),
    "three ranks": (3, {}),
    "fp16": (1, {"memory.precision": "fp16"}),
    "fp8": (1, {"memory.precision": "fp8", "memory.fp8Recipe": "Rowwise"}),
    "recipe without fp8": (1, {"memory.fp8Recipe": "Rowwise"}),
    "stage 0": (1, {"memory.zeroStage": 0}),
    "stage 3": (1, {"memory.zeroStage": 3}),
    "full": (1, {"memory.activationCheckpointing": "full"}),
    "budget": (1, {**SELECTIVE, "memory.activationBudgetGiB": "1"}),
    "budget too small": (1, {**SELECTIVE, "memory.activationBudgetGiB": "0.000001"}),
    "budget alone": (1, {"memory.activationBudgetGiB": "1"}),
    "cpuOffload": (1, {"memory.cpuOffload": True}),
    "nvmeOffload": (1, {"memory.nvmeOffload": {"path": "/scratch"}}),
    "SameLayout": (1, {"training.deterministic": "SameLayout"}),
    "AnyDataParallel": (1, {"training.deterministic": "AnyDataParallel"}),
    "lamb": (1, {"optimization.optimizer": "lamb"}),
    "lora": (1, {"lora": {"rank": 4}}),
    "micro-batch of 2": (1, {"training.microBatchSize": 2}),
    "micro-batch of 3": (1, {"training.microBatchSize": 3}),
    "odd length": (1, {"training.sequenceLength": 31}),
    "long": (1, {"training.sequenceLength": 128}),
    "fused": (1, {"runtime.kernels": "fused"}),
    "sdpa": (1, {"runtime.attention": "sdpa"}),
    "stoker": (1, {"runtime.attention": "stoker"}),
    "flash": (1, {"runtime.attention": "flash"}),
    "rewind": (1, {"guards.lossSpike": "Rewind", "guards.checksumEverySteps": 1}),
    **{name: (1, patch) for name, patch in NO_EFFECT.items()},
}
"""Name -> factor of the ranks, and fields."""


def pair_of(*names: str) -> tuple[dict[str, Any], ModelConfig]:
    """Return the manifest of a job with these options, and its model, which adapters take from elsewhere."""
    spec, ranks = deepcopy(SPEC), 1
    for factor, patch in (OPTIONS[name] for name in names):
        ranks *= factor
        for path, value in patch.items():
            section, _, field = path.partition(".")
            spec.setdefault(section, {}).update(deepcopy({field: value} if field else value))
    spec["workers"]["replicas"] = ranks
    model = parse_model({re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", k): v for k, v in spec["model"].items()})
    if "lora" in spec:
        del spec["model"]
        spec["modelFrom"] = {"huggingFace": {"path": "/scratch/model"}}
    metadata = {"name": "pair", "namespace": "default", "uid": "u", "generation": 1}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}, model


def refused_by_admission(manifest: dict[str, Any]) -> list[str]:
    """The lines of a server's answer, or of the condition that the operator sets."""
    try:
        spec = ADMISSION.admit(deepcopy(manifest))["spec"]
    except InvalidObject as error:
        return [str(error).partition(" is invalid: ")[2]]
    return unsupported("TrainingJob", spec)


def refused_by_plan(manifest: dict[str, Any], model: ModelConfig) -> list[str]:
    try:
        job = job_of_spec(manifest["spec"], ModelSize.from_fields(asdict(model)))
        make_plan(job, None)
    except ValueError as error:
        return [str(error)]
    return refusals_of_trainer(job)


def refused_by_trainer(manifest: dict[str, Any], model: ModelConfig) -> list[str]:
    """What a rank checks of the rendered configuration before it opens the corpus."""
    job = TrainingJob.model_validate(manifest)
    rendered = attempt_config(job, manifest, pin(job, None, Settings()), 0, None)
    try:
        config = parse(TrainerConfig, json.loads(rendered["data"]["config.json"]))
        dims = check_supported(config)
        check_length(config, model)
        check_heads(config, model)
        check_fp8(config, model, CPU)
        ops, _ = make_ops(config, CPU)
        with absent_mesh(dims, 0, any_data_parallel=config.training.any_data_parallel) as mesh:
            check_layout(config, model, mesh, ops)
    except ConfigError as error:
        return str(error).splitlines()
    return []


OF_CONFIGURATION = r"(config: )?(parallelism|training|memory|kernels|attention)\b"
OF_MANIFEST = r"\[?spec\.(parallelism|training|memory|model|runtime|optimization)\b"


def check_pair(names: tuple[str, ...]) -> None:
    """Assert that a pair is refused with its field by all that can know it, or by none."""
    manifest, model = pair_of(*names)
    admission, trainer = refused_by_admission(manifest), refused_by_trainer(manifest, model)
    plan = refused_by_plan(manifest, model)
    assert all(re.match(OF_MANIFEST, line) for line in admission), admission
    assert all(re.match(OF_CONFIGURATION, line) for line in trainer), trainer
    assert trainer or not plan, plan  # the plan knows no rule of its own
    if "lora" in names:
        assert trainer or not admission or NO_EFFECT.keys() & set(names), admission
        assert not trainer or admission or plan, trainer  # `stoker plan --model` sees what is behind modelFrom
    else:
        assert bool(admission) == bool(trainer) or (admission and NO_EFFECT.keys() & set(names)), (admission, trainer)


def pairs_with(first: str) -> Iterator[tuple[str, ...]]:
    yield (first,)
    names = list(OPTIONS)
    yield from itertools.product([first], names[names.index(first) + 1 :])


@pytest.mark.parametrize("first", OPTIONS)
def test_pairs_are_refused_alike_by_admission_plan_and_trainer(first: str) -> None:
    for names in pairs_with(first):
        check_pair(names)


def test_the_plan_and_the_kernels_have_the_same_multiple_of_eight_bits() -> None:
    assert EIGHT_BIT_MULTIPLE == MULTIPLE


BOTH_OFFLOADS = (
    "memory.cpuOffload true is not supported yet with memory.nvmeOffload: both take the whole state; `stoker plan` "
    "shows its size; allowed: false"
)
ROWS_OF_EXPERTS = (
    "training.deterministic AnyDataParallel needs expert 1, got 2: the rows of an expert come from several ranks into "
    "one sum; allowed: Off, SameLayout"
)


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ("cpuOffload", "nvmeOffload", [BOTH_OFFLOADS]),
        ("expert 2", "AnyDataParallel", [ROWS_OF_EXPERTS]),
        ("cpuOffload", "AnyDataParallel", []),
        ("fp8", "AnyDataParallel", []),
    ],
)
def test_words_of_refusals_are_the_same(first: str, second: str, lines: list[str]) -> None:
    manifest, model = pair_of(first, second)
    assert refused_by_trainer(manifest, model) == lines
    assert refused_by_admission(manifest) == [f"spec.{line}" for line in lines]


def test_heads_that_eight_bits_do_not_allow_are_named_alike() -> None:
    manifest, model = pair_of("tensor 2", "fp8")
    manifest["spec"]["model"]["headDim"] = 4
    trainer = refused_by_trainer(manifest, parse_model({**asdict(model), "head_dim": 4}))
    assert trainer == [
        "memory.precision fp8 needs numKvHeads x headDim 16 / tensor 2 to be a multiple of 16; "
        "allowed: bf16, fp16, fp32"
    ]
    assert refused_by_admission(manifest) == [f"spec.{line}" for line in trainer]


@pytest.mark.parametrize(
    ("runtime", "lines"),
    [
        ({"device": "cpu", "kernels": "fused"}, ["kernels fused is not supported yet with runtime.device cpu; "]),
        ({"device": "cpu", "attention": "flash"}, ["attention flash is not supported yet with runtime.device cpu; "]),
        ({"device": "cuda", "attention": "sdpa"}, ["attention sdpa is not supported yet with runtime.device cuda; "]),
        ({"device": "auto", "kernels": "fused", "attention": "flash"}, []),
        ({"device": "cuda", "attention": "flash"}, []),
    ],
    ids=str,
)
def test_kernels_that_a_chosen_device_lacks_are_refused_at_admission(runtime: dict[str, str], lines: list[str]) -> None:
    manifest, _ = pair_of()
    manifest["spec"]["runtime"] = runtime
    found = refused_by_admission(manifest)
    assert [line.startswith(f"spec.runtime.{start}") for line, start in zip(found, lines, strict=True)] == [True] * len(
        lines
    )
