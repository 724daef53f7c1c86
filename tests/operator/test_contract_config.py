"""A section of a custom resource has the fields of the program's configuration, in camelCase.

With `test_contract_capabilities.py` the only test that may import both sides.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stoker.engine.config import (
    CacheConfig,
    CacheEventsConfig,
    DiskConfig,
    EngineApiConfig,
    EngineConfig,
    EngineParallelismConfig,
    ExpertsConfig,
    SchedulerConfig,
    ServedModelConfig,
    StoreConfig,
    TransferConfig,
)
from stoker.engine.core.build import build_engine
from stoker.model import config as model_config
from stoker.model.rope_scaling import Llama3Scaling
from stoker.operator.admission.admission import Admission
from stoker.operator.api import engine_settings, inferencedeployment, model_spec, pool, trainingjob
from stoker.operator.api.metadata import read
from stoker.operator.api.pod_fields import Runtime
from stoker.operator.api.value import wire_name
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import ModelSource, engine_template
from stoker.operator.render.names import digest_of
from stoker.operator.render.router import router_config, router_intent
from stoker.operator.render.trainer import attempt_config, pin
from stoker.pod.config_file import parse
from stoker.router.config import RouterConfig
from stoker.trainer.protocol import config as trainer
from testing.engine.rank_engines import answers, saved
from testing.operator.bad_manifests import DEPLOYMENT, JOB, changed

ROOT = Path(__file__).parents[2]

ROUTERS_OWN = {"maxResumeBytes", "resumeWaitSeconds"}
"""Limits of a router that no deployment chooses."""
OPERATOR_SETS = {"namespace", "name", "deployment", "listen", "terminationLog", "backendsFile"}

SECTIONS: list[tuple[type[BaseModel], type[BaseModel], set[str], set[str]]] = [
    # section of the resource, of the configuration, only in the resource, only in the configuration
    (trainingjob.Parallelism, trainer.ParallelismConfig, set(), set()),
    (trainingjob.Training, trainer.TrainingConfig, set(), set()),
    (trainingjob.Optimization, trainer.OptimizationConfig, set(), set()),
    (trainingjob.Memory, trainer.MemoryConfig, set(), set()),
    (trainingjob.NvmeOffload, trainer.NvmeOffloadConfig, set(), set()),
    (trainingjob.DataSource, trainer.DataSourceConfig, set(), set()),
    (trainingjob.Tokenizer, trainer.TokenizerConfig, set(), set()),
    (trainingjob.Validation, trainer.ValidationConfig, set(), set()),
    (trainingjob.Data, trainer.DataConfig, set(), set()),
    (trainingjob.CheckpointPolicy, trainer.CheckpointConfig, {"storage", "deletionPolicy"}, {"root"}),
    (trainingjob.Guards, trainer.GuardsConfig, set(), set()),
    (trainingjob.Logging, trainer.LoggingConfig, set(), set()),
    (trainingjob.Deadlines, trainer.DeadlineConfig, set(), set()),
    (engine_settings.CacheSettings, CacheConfig, set(), set()),
    (engine_settings.DiskSettings, DiskConfig, {"claimName"}, {"path"}),
    (engine_settings.StoreSettings, StoreConfig, {"claimNames"}, {"paths"}),
    (engine_settings.ExpertSettings, ExpertsConfig, set(), set()),
    (engine_settings.SchedulerSettings, SchedulerConfig, set(), {"mixedTokens"}),
    (
        engine_settings.EngineApi,
        EngineApiConfig,
        {"apiKeySecretRef"},
        {"apiKeyFile", "allowedOrigins", "toolCallParser", "reasoningParser"},
    ),
    (engine_settings.TransferSettings, TransferConfig, set(), {"listen", "keyFile", "transports", "copyNumber"}),
    (
        engine_settings.CacheEventSettings,
        CacheEventsConfig,
        {"port", "replayPort"},
        {"endpoint", "replayEndpoint", "rank"},
    ),
    (pool.EngineParallelism, EngineParallelismConfig, set(), set()),
    (
        inferencedeployment.ServedModel,
        ServedModelConfig,
        {"checkpointRef", "checkpointSelector", "uri", "uriSecretRef"},
        {"path", "digest", "cache"},
    ),
    (
        engine_settings.EngineSettings,
        EngineConfig,
        set(),
        {
            *("identity", "listen", "terminationLog", "workDir", "model", "parallelism", "gracePeriodSeconds"),
            *("timeline", "captureSeconds", "role", "replica"),
        },
    ),
]
IDS = [section.__name__ for section, *_ in SECTIONS]


def wire(model: type[BaseModel]) -> dict[str, str]:
    """Return field names by wire name; durations in seconds are `xSeconds` on the wire and `x_s` in the type."""
    found = {}
    for name in model.model_fields:
        alias = wire_name(name)
        found[alias[:-1] + "Seconds" if name.endswith("_s") else alias] = name
    return found


@pytest.mark.parametrize(("section", "config", "only_resource", "only_config"), SECTIONS, ids=IDS)
def test_a_section_has_the_fields_of_its_configuration(
    section: type[BaseModel], config: type[BaseModel], only_resource: set[str], only_config: set[str]
) -> None:
    ours, theirs = set(wire(section)), set(wire(config))
    assert ours - theirs == only_resource
    assert theirs - ours == only_config


@pytest.mark.parametrize(("section", "config", "only_resource", "only_config"), SECTIONS, ids=IDS)
def test_a_section_has_the_defaults_and_choices_of_its_configuration(
    section: type[BaseModel], config: type[BaseModel], only_resource: set[str], only_config: set[str]
) -> None:
    ours, theirs = wire(section), wire(config)
    for name in (set(ours) & set(theirs)) - {"tokenizer", "cache", "experts", "scheduler", "api", "transfer"}:
        here, there = section.model_fields[ours[name]], config.model_fields[theirs[name]]
        assert _plain(here.default) == _plain(there.default), name
        assert _choices(here) == _choices(there), name


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value.replace(".", "").replace("e-", "").isdigit() else value


def _choices(field: Any) -> set[Any]:
    return {choice for choice in get_args(field.annotation) if isinstance(choice, str)}


def test_the_runtime_section_is_part_of_both_programs_configurations() -> None:
    for config in (trainer.TrainerConfig, EngineConfig):
        for name, field in Runtime.model_fields.items():
            assert config.model_fields[name].annotation == field.annotation
            assert config.model_fields[name].default == field.default


def test_the_routers_settings_are_in_the_deployment() -> None:
    settings = set(wire(inferencedeployment.RouterSettings))
    assert set(wire(RouterConfig)) - settings == OPERATOR_SETS - {"name"} | ROUTERS_OWN


def test_the_events_of_a_manifest_are_those_of_the_engine_with_its_defaults() -> None:
    changes = {"metadata.uid": "3b1f", "spec.engine": {"cacheEvents": {"port": 5557, "replayPort": 5657}}}
    manifest = Admission.from_folder(ROOT / "crds").admit(changed(DEPLOYMENT, changes))
    deployment = read(inferencedeployment.InferenceDeployment, manifest)
    rendered = engine_template(deployment, deployment.spec.pools[0], ModelSource("/model"), Settings())["config"]
    wanted = CacheEventsConfig(endpoint="tcp://0.0.0.0:5557", replay_endpoint="tcp://0.0.0.0:5657")
    assert parse(EngineConfig, rendered).cache_events == wanted


def test_experts_wait_in_main_memory_from_the_manifest_to_a_running_engine(tmp_path: Path) -> None:
    """A manifest, its admission, its rendered configuration, an engine with that: the answers are the same."""
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    sizes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    more: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}
    twin = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **more, **sizes))
    folder, found = saved(twin, tmp_path / "model"), []
    admission = Admission.from_folder(ROOT / "crds")
    for experts in (None, {"onDevice": 3}):
        engine: dict[str, Any] = {
            "device": "cpu",
            "cache": {"numBlocks": 60},
            **({"experts": experts} if experts else {}),
        }
        manifest = changed(DEPLOYMENT, {"metadata.uid": "3b1f", "spec.engine": engine, "spec.model.dtype": "float32"})
        deployment = read(inferencedeployment.InferenceDeployment, admission.admit(manifest))
        rendered = engine_template(deployment, deployment.spec.pools[0], ModelSource(str(folder)), Settings())["config"]
        assert rendered.get("experts") == ({"on_device": 3} if experts else None)
        built, plan = build_engine(parse(EngineConfig, rendered | {"threads": 1}))
        assert plan.experts_on_device == (3 if experts else None)
        found.append(answers(built))
        assert (built.stats().experts is None) is (experts is None)
        built.close()
    torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_the_models_dimensions_have_the_models_names() -> None:
    ours = set(model_spec.ModelSpec.model_fields)
    theirs = set(model_config.ModelConfig.__dataclass_fields__)
    assert theirs - ours == {"bos_token_id", "eos_token_ids", "pad_token_id"}
    assert ours <= theirs
    assert set(model_spec.RopeScaling.model_fields) == {one.name for one in fields(Llama3Scaling)}


def test_a_rendered_router_is_a_configuration_that_the_router_takes() -> None:
    """A router with and without classes; one without them keeps the intent that it had before there were any."""
    plain = read(inferencedeployment.InferenceDeployment, changed(DEPLOYMENT, {"metadata.uid": "3b1f"}))
    classes = [
        {"name": "interactive", "ttftMs": 1500, "maxQueueSeconds": 5, "lateClass": "batch"},
        {"name": "batch", "serviceTiers": ["flex"], "maxQueued": 9, "maxQueueSeconds": 600, "agingSeconds": 60},
    ]
    manifest = changed(DEPLOYMENT, {"metadata.uid": "3b1f", "spec.router": {"classes": classes}})
    classed = read(inferencedeployment.InferenceDeployment, manifest)
    assert parse(RouterConfig, router_config(plain, Settings())).classes == ()
    interactive, batch = parse(RouterConfig, router_config(classed, Settings())).classes
    assert (interactive.ttft_goal_s, interactive.max_queue_s, interactive.ages_after_s) == (1.5, 5, 2.5)
    assert (interactive.max_queued, batch.max_queued) == (256, 9)
    assert (interactive.late_class, batch.late_class) == ("batch", None)
    assert "lateClass" not in classed.spec.router.classes[1].to_wire(), "routers of before keep their intent"
    assert (batch.service_tiers, batch.ttft_goal_s, batch.max_queue_s, batch.ages_after_s) == (("flex",), None, 600, 60)
    assert router_intent(plain.spec) != router_intent(classed.spec)
    not_theirs = {"replicas", "service", "models"}
    before = {key: value for key, value in plain.spec.router.to_wire().items() if key not in not_theirs}
    assert router_intent(plain.spec) == digest_of({key: before[key] for key in before.keys() - {"classes"}}, 8)


EXPERTS = {"spec.model.numExperts": 4, "spec.model.numExpertsPerToken": 2}
SCALED = {"factor": "8", "originalMaxPositionEmbeddings": 1024}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec.model.ropeScaling": SCALED},
        {"spec.optimization.learningRate": "2e-5"},
        {"spec.model.architecture": "mistral", "spec.model.slidingWindow": 64},
        {"spec.model.architecture": "qwen2", "spec.model.slidingWindow": 64, "spec.model.maxWindowLayers": 1},
        {"spec.model.architecture": "mixtral", **EXPERTS},
        {"spec.model.architecture": "qwen3-moe", "spec.model.mlpOnlyLayers": [1], **EXPERTS},
    ],
    ids=["plain", "scaled", "rates", "mistral", "qwen2", "mixtral", "qwen3-moe"],
)
def test_a_rendered_job_is_a_configuration_that_the_trainer_takes(changes: dict[str, Any]) -> None:
    manifest = changed(JOB, {"metadata.uid": "3b1f", **changes})
    job = read(trainingjob.TrainingJob, manifest)
    rendered = attempt_config(job, manifest, pin(job, None, Settings()), 0, None)
    config = parse(trainer.TrainerConfig, json.loads(rendered["data"]["config.json"]))
    assert config.optimization.learning_rate == float(job.spec.optimization.learning_rate)
    model = dict(config.model or {})
    scaling = model.pop("rope_scaling", None)
    built = model_config.ModelConfig(**model, rope_scaling=Llama3Scaling(**scaling) if scaling else None)
    assert isinstance(built.rope_theta, float)
    assert isinstance(built.norm_eps, float)
    assert built.rope_scaling is None or built.rope_scaling.factor == 8.0
