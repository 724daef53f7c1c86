"""Rendering of a canary's eval tasks: `python -m stoker.router.evaluate` between two engines. Pure."""

from __future__ import annotations

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.rollout import EvalGate
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import API_KEYS_FOLDER, engine_url
from stoker.operator.render.names import stem
from stoker.operator.render.pod import TERMINATION_LOG, PodProgram, metadata_of, render_pod, scratch_volume
from stoker.operator.render.router import deployment_labels

PROMPTS_FOLDER = "/etc/stoker-prompts"
EVAL = "eval"
"""Value of the label `task` of these pods."""
GATE = "stoker.dev/eval-gate"


def eval_pod(
    deployment: InferenceDeployment,
    resource: Object,
    gate: EvalGate,
    revision: str,
    number: int,
    *,
    new: Object,
    old: Object,
    settings: Settings,
) -> Object:
    """Render one try of a gate's task; `new` and `old` are Ready engines of both revisions."""
    index = [found.name for found in deployment.spec.rollout.canary.eval_gates].index(gate.name)  # type: ignore[union-attr]
    name = f"{stem(deployment.metadata.name, deployment.metadata.uid)}-{revision}-e{index}-{number}"
    items = [{"key": gate.prompts.key, "path": "prompts.jsonl"}]
    volumes = [
        {"name": "stoker-prompts", "configMap": {"name": gate.prompts.name, "items": items}},
        scratch_volume("stoker-tmp", "/tmp")[0],
    ]
    mounts = [
        {"name": "stoker-prompts", "mountPath": PROMPTS_FOLDER, "readOnly": True},
        scratch_volume("stoker-tmp", "/tmp")[1],
    ]
    served = deployment.spec.model.names
    command = [
        *settings.python, "-m", "stoker.router.evaluate", "--prompts", f"{PROMPTS_FOLDER}/prompts.jsonl",
        "--model", served[0] if served else deployment.metadata.name,
        "--new", engine_url(new, settings.engine_port), "--old", engine_url(old, settings.engine_port),
        "--termination-log", TERMINATION_LOG,
    ]  # fmt: skip
    key = deployment.spec.engine.api.api_key_secret_ref
    if key is not None:
        secret = {"secretName": key.name, "items": [{"key": key.key, "path": "keys"}]}
        volumes.append({"name": "stoker-api-keys", "secret": secret})
        mounts.append({"name": "stoker-api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True})
        command += ["--api-keys", f"{API_KEYS_FOLDER}/keys"]
    fields = deployment.spec.router
    program = PodProgram(
        image=fields.image or settings.control_image,
        command=command,
        volumes=volumes,
        mounts=mounts,
        deadline_s=settings.task_deadline_s,
        resources=settings.task_resources,
    )
    labels = {**deployment_labels(deployment), "task": EVAL, "revision": revision, GATE: gate.name, "try": str(number)}
    return render_pod(metadata_of(resource, name, "task", labels), program, fields, settings)
