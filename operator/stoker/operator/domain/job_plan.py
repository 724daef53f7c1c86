"""A TrainingJob as the arithmetic of `stoker.pod.plan` sees it, and what its GPUs cannot hold.

Pure; called by `unsupported` and by `stoker plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.pod.plan.gpu import Gpu, known_gpu
from stoker.pod.plan.job import Job
from stoker.pod.plan.layer_choice import BudgetTooSmall, layer_choices
from stoker.pod.plan.memory import Memory, fullest
from stoker.pod.plan.model_size import ModelSize

GPU_PRODUCT = "nvidia.com/gpu.product"
"""Label of a node, from NVIDIA's feature discovery."""
TOLERANCE = 0.1
"""A job is refused only where less than this part of the prediction is missing."""


def job_of_spec(spec: Mapping[str, Any], model: ModelSize | None = None, name: str = "") -> Job:
    """Read a spec in wire form, with or without defaults. `model`: the sizes behind `modelFrom`.

    Raises:
        ValueError: sizes are missing or do not multiply out.
    """
    fields = _snake(spec)
    config: dict[str, Any] = {
        "job": {"name": name},
        "gang": _gang(spec),
        **{section: fields.get(section) or {} for section in ("parallelism", "training", "memory", "optimization")},
    }
    config["lora"] = fields.get("lora")
    return Job.from_config(config, model or ModelSize.from_fields(fields.get("model") or {}))


def _gang(spec: Mapping[str, Any]) -> dict[str, int]:
    workers = spec.get("workers") or {}
    ranks = workers.get("ranksPerPod") or max(workers.get("gpusPerPod") or 0, 1)
    return {"nodes": workers.get("replicas") or 1, "ranks_per_node": ranks}


def gpu_of_spec(spec: Mapping[str, Any]) -> Gpu | None:
    """Return the GPU that the node selector names; None where it names none that is known."""
    selector = (spec.get("workers") or {}).get("nodeSelector") or {}
    return known_gpu(str(selector.get(GPU_PRODUCT, "")))


def too_large(spec: Mapping[str, Any]) -> list[str]:
    """Return one line if a rank surely needs more memory than its GPU has; none where either is not known."""
    gpu = gpu_of_spec(spec)
    if gpu is None or not spec.get("model"):
        return []
    try:
        needed = fullest(job_of_spec(spec))
    except ValueError:
        return []  # admission names what does not multiply out, `over_budget` what the budget cannot hold
    if needed.total * (1 - TOLERANCE) <= gpu.memory_bytes:
        return []
    place = f"spec.workers.nodeSelector {GPU_PRODUCT} {spec['workers']['nodeSelector'][GPU_PRODUCT]}"
    return [
        f"{place}: a rank needs about {_gib(needed.total)} ({_shown(needed)}), an {gpu.name} has "
        f"{_gib(gpu.memory_bytes)}; `stoker plan` lists layouts that fit"
    ]


def over_budget(spec: Mapping[str, Any]) -> list[str]:
    """Return one line if a rank's activations cannot be kept within the budget.

    A model behind `modelFrom` is not known here: its ranks check the budget before they start.
    """
    budget = (spec.get("memory") or {}).get("activationBudgetGiB")
    if budget is None or not spec.get("model"):
        return []
    try:
        layer_choices(job_of_spec(spec))
    except BudgetTooSmall as error:
        return [f"spec.memory.activationBudgetGiB {budget}: {error}"]
    except ValueError:
        return []  # admission names what does not multiply out
    return []


def _shown(memory: Memory) -> str:
    return ", ".join(f"{name} {_gib(count)}" for name, count in memory.parts().items())


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _snake(value: Any) -> Any:
    """Names of the wire as programs write them: `zeroStage` is `zero_stage`, `activationBudgetGiB` is `..._gib`."""
    if isinstance(value, Mapping):
        return {_snake_name(str(name)): _snake(inner) for name, inner in value.items()}
    return value


def _snake_name(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])[A-Z]", lambda found: f"_{found[0].lower()}", name.replace("GiB", "Gib"))
