"""The sections of a job in the REST API (`model_config`, `parallelism_config`, ...) as parts of a TrainingJob's spec.

One table, read in both directions: `to_spec` for requests, `from_spec` for answers, `request_field` to name a wrong
field as the caller wrote it. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from stoker.gateway.problem import wrong_field

Spec = dict[str, Any]
Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _lower(value: str) -> str:
    return value.lower()


def _upper(value: str) -> str:
    return value.upper()


def decimal_text(value: float) -> str:
    """Write a number as the resources want it: 3e-05 as `0.00003`, without an exponent where that is short."""
    plain = format(Decimal(repr(value)), "f")
    return plain if len(plain) <= 24 else repr(value)


def _text_of(value: Any) -> str:
    return decimal_text(value)


@dataclass(frozen=True)
class Field:
    """One field of a section and its place in the spec."""

    name: str
    path: str
    to_spec: Convert = _same
    from_spec: Convert = _same


def _number(name: str, path: str) -> Field:
    return Field(name, path, _text_of, float)


def _word(name: str, path: str) -> Field:
    return Field(name, path, _lower, _upper)


SECTIONS: Mapping[str, tuple[Field, ...]] = {
    "model_config": (
        Field("architecture", "model.architecture"),
        Field("num_layers", "model.numLayers"),
        Field("hidden_size", "model.hiddenSize"),
        Field("num_attention_heads", "model.numHeads"),
        Field("num_kv_heads", "model.numKvHeads"),
        Field("intermediate_size", "model.intermediateSize"),
        Field("vocab_size", "model.vocabSize"),
        Field("max_position_embeddings", "model.maxPositionEmbeddings"),
        Field("num_experts", "model.numExperts"),
        Field("num_experts_per_token", "model.numExpertsPerToken"),
    ),
    "parallelism_config": (
        Field("tensor_parallel_size", "parallelism.tensor"),
        Field("pipeline_parallel_size", "parallelism.pipeline"),
        Field("expert_parallel_size", "parallelism.expert"),
        Field("sequence_parallel", "parallelism.sequenceParallel"),
        Field("context_parallel_size", "parallelism.context"),
    ),
    "optimization_config": (
        _word("optimizer", "optimization.optimizer"),
        _number("learning_rate", "optimization.learningRate"),
        _number("weight_decay", "optimization.weightDecay"),
        _number("beta1", "optimization.beta1"),
        _number("beta2", "optimization.beta2"),
        _number("epsilon", "optimization.epsilon"),
        _number("gradient_clipping", "optimization.gradientClipping"),
        Field("warmup_steps", "optimization.warmupSteps"),
        Field("total_steps", "training.totalSteps"),
        _word("lr_scheduler", "optimization.schedule"),
    ),
    "memory_config": (
        _word("precision", "memory.precision"),
        Field("zero_stage", "memory.zeroStage"),
        Field("cpu_offload", "memory.cpuOffload"),
        _word("activation_checkpointing_granularity", "memory.activationCheckpointing"),
    ),
    "data_config": (
        Field("sequence_length", "training.sequenceLength"),
        Field("global_batch_size", "training.globalBatchSize"),
        Field("micro_batch_size", "training.microBatchSize"),
    ),
    "checkpoint_config": (
        Field("checkpoint_interval_steps", "checkpoint.intervalSteps"),
        Field("checkpoint_interval_minutes", "checkpoint.intervalMinutes"),
        Field("max_checkpoints_to_keep", "checkpoint.maxToKeep"),
        Field("async_save", "checkpoint.asyncSave"),
    ),
}
"""Fields that have a place of their own; the others are translated by `_special`."""

SPECIAL = {
    "data_config.dataset_path": "data.sources",
    "data_config.tokenizer_path": "data.tokenizer",
    "checkpoint_config.checkpoint_dir": "checkpoint.storage",
    "memory_config.gradient_checkpointing": "memory.activationCheckpointing",
    "memory_config.nvme_offload": "memory.nvmeOffload",
    "parallelism_config.data_parallel_size": "workers.replicas",
}


def to_spec(sections: Mapping[str, Mapping[str, Any]], spec: Mapping[str, Any]) -> Spec:
    """Merge the sections of a request into the spec given with it; neither is changed.

    Raises:
        Problem: a field is given twice with different values, or cannot be translated.
    """
    merged: Spec = copy.deepcopy(dict(spec))
    if (sections.get("memory_config") or {}).get("nvme_offload") is False and _get(spec, "memory.nvmeOffload"):
        raise wrong_field("memory_config.nvme_offload", "false differs from spec.memory.nvmeOffload: give one of them")
    for section, path, value in _translated(sections):
        if value is not None:
            _put(merged, path, value, section)
    return merged


def from_spec(spec: Mapping[str, Any], data_parallel: int | None) -> dict[str, dict[str, Any]]:
    """The sections of a stored job; without the fields that it does not set."""
    found: dict[str, dict[str, Any]] = {}
    for section, fields in SECTIONS.items():
        for field in fields:
            value = _get(spec, field.path)
            if value is not None:
                found.setdefault(section, {})[field.name] = field.from_spec(value)
    for path, value in _special_values(spec, data_parallel):
        if value is not None:
            section, _, name = path.partition(".")
            found.setdefault(section, {})[name] = value
    if found.get("memory_config", {}).get("activation_checkpointing_granularity") == "NONE":
        del found["memory_config"]["activation_checkpointing_granularity"]
    return found


def request_field(path: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The field of the request that became `path` of the resource; `spec...` where it was given so."""
    inside = path.removeprefix("spec.")
    for name in _names_of(inside):
        section, _, field = name.partition(".")
        if (sections.get(section) or {}).get(field) is not None:
            return name
    return path


def _names_of(path: str) -> Iterator[str]:
    for section, fields in SECTIONS.items():
        yield from (f"{section}.{field.name}" for field in fields if field.path == path)
    yield from (name for name, place in SPECIAL.items() if path == place or path.startswith((f"{place}.", f"{place}[")))


def _translated(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (field of the request, path in the spec, value)."""
    for section, fields in SECTIONS.items():
        given = sections.get(section) or {}
        for field in fields:
            value = given.get(field.name)
            if value is not None:
                yield f"{section}.{field.name}", field.path, field.to_spec(value)
    yield from _special(sections)


def _special(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    data, memory = sections.get("data_config") or {}, sections.get("memory_config") or {}
    saves, layout = sections.get("checkpoint_config") or {}, sections.get("parallelism_config") or {}
    if data.get("dataset_path") is not None:
        yield "data_config.dataset_path", "data.sources", [{"name": "data", "path": data["dataset_path"]}]
    if data.get("tokenizer_path") is not None:
        yield "data_config.tokenizer_path", "data.tokenizer", {"kind": "path", "path": data["tokenizer_path"]}
    if saves.get("checkpoint_dir") is not None:
        yield "checkpoint_config.checkpoint_dir", "checkpoint.storage", _storage(saves["checkpoint_dir"])
    again = memory.get("gradient_checkpointing")
    if again is not None and not (again and memory.get("activation_checkpointing_granularity")):
        yield "memory_config.gradient_checkpointing", "memory.activationCheckpointing", "full" if again else "none"
    if memory.get("nvme_offload"):
        raise wrong_field(
            "memory_config.nvme_offload", "true needs a folder: give spec.memory.nvmeOffload.path instead"
        )
    if layout.get("data_parallel_size") is not None:
        cure = "it is calculated from the number of workers: leave it out and give spec.workers"
        raise wrong_field("parallelism_config.data_parallel_size", cure)


def _storage(folder: str) -> dict[str, str]:
    """`pvc://CLAIM/FOLDER` as a storage. Raises Problem."""
    claim, _, path = folder.removeprefix("pvc://").partition("/")
    if not folder.startswith("pvc://") or not claim:
        allowed = "pvc://CLAIM or pvc://CLAIM/FOLDER is needed (others: spec.checkpoint.storage)"
        raise wrong_field("checkpoint_config.checkpoint_dir", f"{folder!r} is no claim: {allowed}")
    return {"claimName": claim, **({"path": path.strip("/")} if path.strip("/") else {})}


def _special_values(spec: Mapping[str, Any], data_parallel: int | None) -> Iterator[tuple[str, Any]]:
    sources = _get(spec, "data.sources") or []
    storage = _get(spec, "checkpoint.storage") or {}
    kept = _get(spec, "memory.activationCheckpointing")
    yield "data_config.dataset_path", sources[0].get("path") if len(sources) == 1 else None
    yield "data_config.tokenizer_path", _get(spec, "data.tokenizer.path")
    parts = [part for part in (storage.get("claimName"), storage.get("path")) if part]
    yield "checkpoint_config.checkpoint_dir", f"pvc://{'/'.join(parts)}" if storage.get("claimName") else None
    yield "memory_config.gradient_checkpointing", None if kept is None else kept != "none"
    yield "memory_config.nvme_offload", _get(spec, "memory.nvmeOffload") is not None
    yield "parallelism_config.data_parallel_size", data_parallel


def _get(spec: Mapping[str, Any], path: str) -> Any:
    value: Any = spec
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _put(spec: Spec, path: str, value: Any, field: str) -> None:
    """Set a member of the spec. Raises Problem when it is there with another value."""
    *parents, last = path.split(".")
    place: Any = spec
    for part in parents:
        place = place.setdefault(part, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise wrong_field(f"spec.{'.'.join(parents)}", f"an object is needed, because {field} is given too")
    if last not in place:
        place[last] = value
    elif not _equal(place[last], value):
        raise wrong_field(field, f"{value!r} differs from {place[last]!r} in spec.{path}: give one of them")


def _equal(given: Any, value: Any) -> bool:
    """Whether two values of a field are the same; a number may be written in several ways (3e-4, 0.0003)."""
    if given == value:
        return True
    try:
        return isinstance(given, str) and isinstance(value, str) and Decimal(given) == Decimal(value)
    except InvalidOperation:
        return False
