"""What the API can say and this version cannot do yet: one table. Reconcilers set `Stalled` with it, so that a later operator takes the same
manifests; admission refuses only what can never be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Fits = Callable[[Any], bool]


def _only(*allowed: Any) -> Fits:
    return lambda value: value in allowed


def _absent(value: Any) -> bool:
    return value in (None, {}, [], "")


def _local(uri: Any) -> bool:
    return str(uri).startswith(("file://", "pvc://"))


def _up_to(limit: int) -> Fits:
    return lambda value: int(value) <= limit


_RUNTIME: dict[str, Fits] = {"kernels": _only("auto", "reference"), "attention": _only("auto", "stoker", "sdpa")}
_SPREAD = ("tensor", "pipeline", "data", "expert")

SUPPORTED: Mapping[str, Mapping[str, Fits]] = {
    "TrainingJob": {
        "model.architecture": _only("llama", "qwen3"),
        "model.slidingWindow": _absent,
        "modelFrom.hub": _absent,
        **{f"parallelism.{axis}": _only(1) for axis in ("tensor", "pipeline", "expert", "context", "replicate")},
        "parallelism.sequenceParallel": _only(False),
        "optimization.optimizer": _only("adam", "adamw"),
        "memory.precision": _only("fp32", "bf16"),
        "memory.zeroStage": _up_to(2),
        "memory.activationCheckpointing": _only("none", "full"),
        "memory.cpuOffload": _only(False),
        "memory.nvmeOffload": _absent,
        "checkpoint.storage.s3": _absent,
        "run.elastic": _absent,
        "logging.tensorboard": _absent,
        "logging.wandb": _absent,
        "logging.mlflow": _absent,
        "scheduling.backend": _only("auto", "stoker"),
        "scheduling.queueName": _absent,
        "scheduling.topology": _absent,
        "scheduling.gangTimeoutSeconds": _only(60),
        **{f"runtime.{field}": fits for field, fits in _RUNTIME.items()},
    },
    "Checkpoint": {
        "verification": _only("Full"),
        "source.import.storage.s3": _absent,
        "source.save.storage.s3": _absent,
    },
    "InferenceDeployment": {
        "model.uri": _local,
        **{f"engine.{field}": fits for field, fits in _RUNTIME.items()},
        "engine.api.fronts": _only(1),
        "pools[].role": _only("colocated"),
        "pools[].podsPerReplica": _only(1),
        **{f"pools[].parallelism.{axis}": _only(1) for axis in _SPREAD},
        "pools[].autoscaling.mode": _only("external"),
        "router.policy": _only("leastPending", "roundRobin"),
        "rollout.type": _only("rolling"),
    },
    "EnginePool": {
        "revisions[].template.role": _only("colocated"),
        "revisions[].template.podsPerReplica": _only(1),
        "revisions[].share": _only(0, 100),
    },
}
"""Kind -> path below `spec` -> what works. A path that is not here works with every value that admission lets through."""


def unsupported(kind: str, spec: Mapping[str, Any]) -> list[str]:
    """One line `not supported yet: spec.FIELD VALUE` for each thing that this version cannot do; empty where it can do all.

    Args:
        spec: as stored, camelCase, with or without defaults: an absent field asks for nothing.
    """
    found = []
    for path, fits in SUPPORTED[kind].items():
        for where, value in _values(spec, path.split("."), "spec"):
            if not fits(value):
                found.append(f"not supported yet: {where}{_shown(value)}")
    return found


def _values(node: Any, path: list[str], where: str) -> Iterator[tuple[str, Any]]:
    """What stands at the path: nothing, one value, or one for each item of a list (`pools[]`)."""
    if not path:
        yield where, node
        return
    name, rest = path[0].removesuffix("[]"), path[1:]
    if not isinstance(node, Mapping) or node.get(name) is None:
        return
    if path[0].endswith("[]"):
        for item in node[name]:
            yield from _values(item, rest, f"{where}.{name}[{item.get('name', '')}]")
    else:
        yield from _values(node[name], rest, f"{where}.{name}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f" {str(value).lower()}"
    return f" {value}" if isinstance(value, int | str) else ""
