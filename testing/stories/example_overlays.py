"""Overlays that scale the training examples down to a tiny model on CPU ranks of this machine.

What an example is about stays: its layout's axes, savings of memory, precision, schedule, mix of sources and
validation. Replaced are sizes, places (volumes, hub, tracking servers) and pods of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.stories.manifests import MODEL, VOCABULARY, Manifest

ROOT = Path(__file__).parents[2] / "examples"
TEXT = "/data/tales.jsonl"
DROP = None
WEIGHTS: Manifest = {"modelFrom": {"huggingFace": {"path": "/models"}}}
"""The weights of a claim in place of a hub or a large folder."""


@dataclass(frozen=True)
class Overlay:
    """One example, and the members of its spec that a small machine replaces; None removes one."""

    path: str
    ranks: int
    changes: Manifest

    def apply(self) -> Manifest:
        """Return the example's TrainingJob with the overlay."""
        (found,) = (one for one in yaml.safe_load_all((ROOT / self.path).read_text()) if one["kind"] == "TrainingJob")
        spec = found["spec"]
        _merge(spec, {"workers": DROP})
        _merge(spec, {"workers": workers(self.ranks), **self.changes})
        for source in (*spec["data"]["sources"], (spec["data"].get("validation") or {}).get("source") or {}):
            source |= {"path": TEXT} if source else {}
        return dict(found)


def workers(ranks: int) -> Manifest:
    """Return pods with the tales, a claim of models and a scratch volume."""
    return {
        "ranksPerPod": ranks,
        "volumes": [
            {"name": "tales", "configMap": {"name": "tales"}},
            {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "offload", "persistentVolumeClaim": {"claimName": "offload"}},
        ],
        "volumeMounts": [
            {"name": "tales", "mountPath": "/data", "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "offload", "mountPath": "/offload"},
        ],
    }


OVERLAYS = (
    Overlay(
        "pretrain-64-gpus/train.yaml",
        4,
        {
            "model": MODEL,
            "parallelism": {"tensor": 2},
            "training": {"totalTokens": 3 * 8 * 32, "globalBatchSize": 8, "sequenceLength": 32},
            "optimization": {"warmupSteps": 1},
            "data": {
                "tokenizer": {"kind": "train", "path": DROP, "vocabSize": VOCABULARY},
                "validation": {"everySteps": 2, "maxSequences": 4},
                "cacheDir": "/offload/cache",
            },
            "run": {"elastic": {"minWorkers": 1, "maxWorkers": 2}},
            "logging": {"everySteps": 1, "wandb": DROP},
            "scheduling": DROP,
        },
    ),
    Overlay(
        "finetune-hub/train.yaml",
        2,
        {
            **WEIGHTS,
            "training": {"epochs": 1, "globalBatchSize": 8, "sequenceLength": 32},
            "optimization": {"warmupSteps": 2},
            "data": {"validation": {"fraction": "0.1", "everySteps": 4}},
            "logging": DROP,
        },
    ),
    Overlay(
        "finetune-lora/10-train.yaml",
        1,
        {**WEIGHTS, "training": {"epochs": 1, "sequenceLength": 32}, "optimization": {"warmupSteps": 1}},
    ),
)


def _merge(target: Manifest, changes: Manifest) -> None:
    for name, value in changes.items():
        if value is DROP:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict) and name not in ("model", "modelFrom"):
            _merge(target[name], value)
        else:
            target[name] = value


def layout_of(spec: Manifest) -> dict[str, Any]:
    """Return what the example's layout is about: its axes above 1, ZeRO stage and savings of memory."""
    parallelism, memory = spec.get("parallelism", {}), spec.get("memory", {})
    axes = sorted(name for name, size in parallelism.items() if size not in (1, False))
    return {"axes": axes, "memory": memory, "lora": spec.get("lora")}
