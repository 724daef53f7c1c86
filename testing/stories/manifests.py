"""Manifests of the stories: a model of about 25,000 parameters on sixty short texts.

Training is quick enough for one test and slow enough to be disturbed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]

API = "stoker.dev/v1alpha1"
TOPICS = ("the fire", "the boiler", "a ship", "the harbour", "coal", "steam", "the captain", "a whistle")
VOCABULARY = 320
MODEL = {
    "architecture": "llama",
    "vocabSize": VOCABULARY,
    "hiddenSize": 32,
    "intermediateSize": 64,
    "numLayers": 2,
    "numHeads": 4,
    "numKvHeads": 2,
    "tieEmbeddings": True,
    "maxPositionEmbeddings": 512,
}
EXACT = "float32"
"""The type of a model whose answers a test compares: in bfloat16 two words tie often, and the batch decides."""
LOCAL_FOLDER = "stoker.dev/local-folder"


def tales() -> str:
    """Return sixty little tales as JSON lines."""
    chance = random.Random(0)
    lines = []
    for _ in range(60):
        tale = " ".join(
            f"Then {chance.choice(TOPICS)} met {chance.choice(TOPICS)}." for _ in range(chance.randint(2, 9))
        )
        lines.append(json.dumps({"text": tale}))
    return "\n".join(lines)


def corpus(name: str = "tales") -> Manifest:
    """Return the tales as a ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"tales.jsonl": tales()}}


def claim(name: str, folder: object = None) -> Manifest:
    """Return a PersistentVolumeClaim; with `folder` it stands for a folder of this machine."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "annotations": {LOCAL_FOLDER: str(folder)} if folder else {}},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def job(name: str, changes: Mapping[str, Any] | None = None) -> Manifest:
    """Return a TrainingJob; `{"training.totalSteps": 50}` changes one member of its spec, None removes it."""
    spec: Manifest = {
        "model": dict(MODEL),
        "workers": {
            "replicas": 1,
            "ranksPerPod": 1,
            "gracePeriodSeconds": 20,
            "volumes": [
                {"name": "tales", "configMap": {"name": "tales"}},
                {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}},
            ],
            "volumeMounts": [
                {"name": "tales", "mountPath": "/data", "readOnly": True},
                {"name": "logs", "mountPath": "/logs"},
            ],
        },
        "training": {
            "totalSteps": 60,
            "globalBatchSize": 4,
            "microBatchSize": 2,
            "sequenceLength": 32,
            "seed": 7,
            "deterministic": "SameLayout",
        },
        "optimization": {"learningRate": "1e-2", "warmupSteps": 5},
        "memory": {"precision": "fp32"},
        "data": {
            "sources": [{"name": "tales", "path": "/data/tales.jsonl"}],
            "tokenizer": {"kind": "train", "vocabSize": VOCABULARY},
        },
        "checkpoint": {"storage": {"claimName": "checkpoints"}, "intervalSteps": 20},
        "logging": {"jsonl": f"/logs/{name}.jsonl"},
    }
    return _changed({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}, changes)


def deployment(name: str, model: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Manifest:
    """Return an InferenceDeployment of one pool with one replica."""
    spec: Manifest = {
        "model": dict(model),
        "engine": {
            "threads": 1,
            "cache": {"memoryBytes": 16 << 20},
            "scheduler": {"maxBatchTokens": 256, "maxRequests": 16, "maxModelLen": 256},
        },
        "pools": [{"name": "main", "replicas": 1, "gracePeriodSeconds": 20}],
        "router": {"service": {"port": 8000}},
    }
    return _changed(
        {"apiVersion": API, "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec}, changes
    )


def save_now(name: str, job_name: str, **spec: Any) -> Manifest:
    """Return a Checkpoint that requests a save from a running job."""
    return checkpoint(name, {"jobRef": {"name": job_name}}, **spec)


def adopted(name: str, claim_name: str, path: str, folder: str, **spec: Any) -> Manifest:
    """Return a Checkpoint that imports a folder."""
    source = {"import": {"storage": {"claimName": claim_name, "path": path}, "folder": folder}}
    return checkpoint(name, source, **spec)


def checkpoint(name: str, source: Mapping[str, Any], **spec: Any) -> Manifest:
    return {
        "apiVersion": API,
        "kind": "Checkpoint",
        "metadata": {"name": name},
        "spec": {"source": dict(source), **spec},
    }


def _changed(manifest: Manifest, changes: Mapping[str, Any] | None) -> Manifest:
    for path, value in (changes or {}).items():
        *sections, field = path.split(".")
        section = manifest["spec"]
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(field, None)
        else:
            section[field] = value
    return manifest
