"""Rendering of a canary's eval tasks: `python -m stoker.router.evaluate` between two engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.rollout import EvalGate
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import API_KEYS_FOLDER
from stoker.operator.render.names import stem
from stoker.operator.render.pod import TERMINATION_LOG, PodProgram, metadata_of, render_pod, scratch_volume
from stoker.operator.render.router import deployment_labels

PROMPTS_FOLDER = "/etc/stoker-prompts"
EVAL = "eval"
"""Value of the label `task` of these pods."""
GATE = "stoker.dev/eval-gate"


@dataclass(frozen=True)
class AskedEngine:
    """A Ready engine of one revision."""

    url: str
    model: str
    """The name by which it serves the model; an edit may give the new revision another one."""


def eval_pod(
    deployment: InferenceDeployment,
    resource: Object,
    gate: EvalGate,
    revision: str,
    number: int,
    *,
    new: AskedEngine,
    old: AskedEngine,
    settings: Settings,
) -> Object:
    """Render one try of a gate's task."""
    canary = deployment.spec.rollout.canary
    assert canary is not None, "a gate is one of a canary"
    index = [found.name for found in canary.eval_gates].index(gate.name)
    name = f"{stem(deployment.metadata.name, deployment.metadata.uid)}-{revision}-e{index}-{number}"
    fields, keys = deployment.spec.router, _key_files(deployment)
    prompts = {"name": gate.prompts.name, "items": [{"key": gate.prompts.key, "path": "prompts.jsonl"}]}
    files = (
        ({"name": "stoker-prompts", "configMap": prompts}, _read_only("stoker-prompts", PROMPTS_FOLDER)),
        scratch_volume("stoker-tmp", "/tmp"),
        *keys,
    )
    key_option = ["--api-keys", f"{API_KEYS_FOLDER}/keys"] if keys else []
    program = PodProgram(
        image=fields.image or settings.control_image,
        command=[*_command(new, old, settings), *key_option],
        volumes=[volume for volume, _ in files],
        mounts=[mount for _, mount in files],
        deadline_s=settings.task_deadline_s,
        resources=settings.task_resources,
    )
    labels = {**deployment_labels(deployment), "task": EVAL, "revision": revision, GATE: gate.name, "try": str(number)}
    return render_pod(metadata_of(resource, name, "task", labels), program, fields, settings)


def _command(new: AskedEngine, old: AskedEngine, settings: Settings) -> list[str]:
    return [
        *settings.python, "-m", "stoker.router.evaluate", "--prompts", f"{PROMPTS_FOLDER}/prompts.jsonl",
        "--model", new.model, *(["--old-model", old.model] if old.model != new.model else []),
        "--new", new.url, "--old", old.url, "--termination-log", TERMINATION_LOG,
    ]  # fmt: skip


def _key_files(deployment: InferenceDeployment) -> list[tuple[Object, Object]]:
    """Volume and mount of the engines' API keys; none where they need none."""
    key = deployment.spec.engine.api.api_key_secret_ref
    if key is None:
        return []
    secret = {"secretName": key.name, "items": [{"key": key.key, "path": "keys"}]}
    return [({"name": "stoker-api-keys", "secret": secret}, _read_only("stoker-api-keys", API_KEYS_FOLDER))]


def _read_only(name: str, folder: str) -> Object:
    return {"name": name, "mountPath": folder, "readOnly": True}
