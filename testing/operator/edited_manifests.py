"""Edits of stored resources that admission refuses, with its message, and edits that it allows."""

from typing import Any

from testing.operator.bad_manifests import CHECKPOINT, DELETE, DEPLOYMENT, JOB, POOL

_FIXED = "is fixed: make a new TrainingJob"
_FROM_FOLDER = {"spec.model": DELETE, "spec.modelFrom": {"huggingFace": {"path": "/m"}}}
_SECOND = {"name": "b", "template": {"config": {}, "pod": {}}, "share": 40}

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("model", JOB, {}, {"spec.model.numLayers": 4}, f"spec.model: Forbidden: model {_FIXED}"),
    ("model to modelFrom", JOB, {}, _FROM_FOLDER, "spec: Forbidden: model, modelFrom and lora are fixed: make a new TrainingJob"),
    ("modelFrom", JOB, _FROM_FOLDER, {"spec.modelFrom.huggingFace.path": "/n"}, f"spec.modelFrom: Forbidden: modelFrom {_FIXED}"),
    ("training", JOB, {}, {"spec.training.totalSteps": 20}, f"spec.training: Forbidden: training {_FIXED}"),
    ("optimization", JOB, {}, {"spec.optimization.learningRate": "1e-4"}, f"spec.optimization: Forbidden: optimization {_FIXED}"),
    ("precision", JOB, {}, {"spec.memory.precision": "fp32"}, f"spec.memory.precision: Forbidden: precision {_FIXED}"),
    ("data", JOB, {}, {"spec.data.sources[0].path": "/other"}, f"spec.data: Forbidden: data {_FIXED}"),
    ("storage", JOB, {}, {"spec.checkpoint.storage.path": "b"}, "spec.checkpoint.storage: Forbidden: storage is fixed: make a new TrainingJob"),
    ("cancel is for good", JOB, {"spec.run.cancel": True}, {"spec.run.cancel": False}, "spec.run.cancel: Forbidden: cancel cannot be undone: make a new TrainingJob"),
    ("cancel by removal", JOB, {"spec.run.cancel": True}, {"spec.run": DELETE}, "spec.run.cancel: Forbidden: cancel cannot be undone: make a new TrainingJob"),
    ("checkpoint source", CHECKPOINT, {}, {"spec.source.jobRef.name": "other"}, "spec.source: Forbidden: source cannot be changed: make a new Checkpoint"),
    ("pool role", DEPLOYMENT, {"spec.pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode"}]}, {"spec.pools": [{"name": "a", "role": "decode"}, {"name": "c", "role": "prefill"}]}, "spec.pools[0].role: Forbidden: role cannot be changed: give a pool of another role another name"),
    ("revision template", POOL, {}, {"spec.revisions[0].template.podsPerReplica": 2}, "spec.revisions[0].template: Forbidden: a revision's template cannot be changed: add another revision"),
]  # fmt: skip

ALLOWED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("suspend and back", JOB, {"spec.run.suspend": True}, {"spec.run.suspend": False}),
    ("cancel", JOB, {}, {"spec.run.cancel": True}),
    ("limits of the run", JOB, {}, {"spec.run": {"backoffLimit": 9, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 5}}),
    ("more saves, fewer kept", JOB, {}, {"spec.checkpoint.intervalSteps": 5, "spec.checkpoint.maxToKeep": 2}),
    ("another number of workers", JOB, {}, {"spec.workers.replicas": 4}),
    ("another image and resources", JOB, {}, {"spec.workers.image": "a:b", "spec.workers.resources": {"requests": {"cpu": 4}}}),
    ("another mesh", JOB, {}, {"spec.parallelism.tensor": 2}),
    ("less memory", JOB, {}, {"spec.memory.zeroStage": 3, "spec.memory.activationCheckpointing": "full"}),
    ("logging, deadlines, scheduling", JOB, {}, {"spec.logging.everySteps": 5, "spec.deadlines.stepSeconds": 9, "spec.scheduling.gangTimeoutSeconds": 90}),
    ("pin and policy of a checkpoint", CHECKPOINT, {}, {"spec.pinned": True, "spec.deletionPolicy": "Delete"}),
    ("everything of a deployment", DEPLOYMENT, {}, {"spec.model": {"uri": "pvc://a/b"}, "spec.pools[0].replicas": 3}),
    ("numbers that no request wakes", DEPLOYMENT, {}, {"spec.pools[0].autoscaling": {"mode": "fixed", "min": 0, "max": 2}}),
    ("a fallback and a model of others", DEPLOYMENT, {}, {"spec.router": {"fallback": {"deploymentRef": {"name": "b"}}, "models": [{"name": "c", "deploymentRef": {"name": "c"}}]}}),
    ("a second revision", POOL, {}, {"spec.revisions": [{**POOL["spec"]["revisions"][0], "share": 60}, _SECOND]}),
    ("an old revision leaves", POOL, {"spec.revisions": [{**POOL["spec"]["revisions"][0], "share": 60}, _SECOND]}, {"spec.revisions": [{**_SECOND, "share": 100}]}),
]  # fmt: skip
