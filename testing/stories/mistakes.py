"""Manifests that pass admission and cannot work, with the end and the conditions of each.

Both kinds of cluster run the same table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing.stories.manifests import MODEL, Manifest, adopted, claim, corpus, deployment, job, save_now
from testing.stories.object_views import Object
from testing.stories.waits import phase

Check = Callable[[Object], bool]
Mistake = tuple[Manifest, Check, str]
"""(manifest, expected end, expected text of a condition)."""
BROKEN = {"uri": "pvc://models/broken"}
"""A model that `break_model` has put there."""


def surroundings() -> list[Manifest]:
    """Return the objects and files that the mistakes refer to."""
    return [corpus(), claim("checkpoints"), claim("logs")]


def break_model(models: Path) -> Path:
    """Write a Hugging Face folder with an unknown architecture in its config.json; return that file."""
    (models / "broken").mkdir(parents=True)
    config = models / "broken" / "config.json"
    config.write_text(json.dumps({"architectures": ["OtherForCausalLM"], **MODEL}))
    return config


def mistakes() -> list[Mistake]:
    """Return the mistakes with the expected conditions of jobs, checkpoints and deployments."""
    return [*_jobs(), *_checkpoints(), *_deployments()]


def _jobs() -> list[Mistake]:
    return [
        (
            job("no-claim", {"checkpoint.storage": {"claimName": "nowhere"}}),
            waits,
            "PersistentVolumeClaim nowhere does not exist (spec.checkpoint.storage.claimName)",
        ),
        (
            job("no-volume", {"workers.volumes": [volume("tales", "missing"), logs()]}),
            waits,
            "ConfigMap missing does not exist (spec.workers.volumes[0])",
        ),
        (
            job("unbuilt", {"runtime.kernels": "reference", "runtime.attention": "cudnn"}),
            stalls,
            "spec.runtime.attention cudnn is not supported yet with runtime.kernels reference",
        ),
        (job("no-data", {"data.sources": [{"name": "tales", "path": "/data/other.jsonl"}]}), fails, "other.jsonl"),
        (job("bad-model", hugging_face("broken")), fails, "config.json"),
        (
            job("no-base", {"model": None, "modelFrom": {"checkpoint": {"name": "lost"}}}),
            waits,
            "Checkpoint lost does not exist (spec.modelFrom.checkpoint)",
        ),
    ]


def _checkpoints() -> list[Mistake]:
    return [
        (adopted("no-folder", "checkpoints", "runs", "step-00000007.0badc0de"), fails, "step-00000007.0badc0de"),
        (adopted("no-archive", "archive", "runs", "step-00000007.0badc0de"), waits, "PersistentVolumeClaim archive"),
        (save_now("no-job", "nobody"), waits, "TrainingJob nobody does not exist (spec.source.jobRef)"),
    ]


def _deployments() -> list[Mistake]:
    return [
        (
            deployment("no-save", {"checkpointRef": {"name": "lost"}}),
            waits,
            "Checkpoint lost does not exist (spec.model.checkpointRef)",
        ),
        (
            deployment("no-models", {"uri": "pvc://nowhere/model"}),
            waits,
            "PersistentVolumeClaim nowhere does not exist (spec.model.uri)",
        ),
        (deployment("bad-weights", BROKEN), fails, "config.json"),
    ]


def hugging_face(name: str) -> Manifest:
    folder: Any = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    return {
        "model": None,
        "modelFrom": {"huggingFace": {"path": f"/models/{name}"}},
        "workers.volumes": [folder, volume("tales", "tales"), logs()],
        "workers.volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "tales", "mountPath": "/data"},
            {"name": "logs", "mountPath": "/logs"},
        ],
        "data.tokenizer": None,
    }


def volume(name: str, config_map: str) -> Manifest:
    return {"name": name, "configMap": {"name": config_map}}


def logs() -> Manifest:
    return {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}}


def says(ends: Check, text: str) -> Check:
    """Return whether the object ended in the expected way, with a condition that contains the text."""
    return lambda found: ends(found) and text in conditions(found)


def waits(found: Object) -> bool:
    return phase(found) in ("Pending", "WaitingForCheckpoint")


def stalls(found: Object) -> bool:
    return any(c["type"] == "Stalled" and c["status"] == "True" for c in found["status"].get("conditions", ()))


def fails(found: Object) -> bool:
    return phase(found) in ("Failed", "Corrupt")


def conditions(found: Object) -> str:
    """Return the messages of all its conditions."""
    return "\n".join(str(c.get("message")) for c in (found.get("status") or {}).get("conditions", ()))
