"""Rendering of a canary's eval tasks: `python -m stoker.router.evaluate` between two engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.rollout import EvalGate
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import API_KEYS, API_KEYS_FOLDER
from stoker.operator.render.names import stem
from stoker.operator.render.pod import TERMINATION_LOG, PodProgram, metadata_of, render_pod, scratch_volume
from stoker.operator.render.router import deployment_labels

PROMPTS_FOLDER = "/etc/stoker-prompts"
OLD_API_KEYS = "stoker-old-api-keys"
OLD_API_KEYS_FOLDER = "/etc/stoker-old-api-keys"
EVAL = "eval"
"""Value of the label `task` of these pods."""
GATE = "stoker.dev/eval-gate"


@dataclass(frozen=True)
class AskedEngine:
    """A Ready engine of one revision."""

    url: str
    model: str
    """The name by which it serves the model; an edit may give the new revision another one."""
    api_keys: Object | None = None
    """Secret of the keys that it accepts, as a source of a volume; an edit may give the new revision another one."""


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
    fields, keys = deployment.spec.router, _key_files(new, old)
    prompts = {"name": gate.prompts.name, "items": [{"key": gate.prompts.key, "path": "prompts.jsonl"}]}
    files = (
        ({"name": "stoker-prompts", "configMap": prompts}, _read_only("stoker-prompts", PROMPTS_FOLDER)),
        scratch_volume("stoker-tmp", "/tmp"),
        *((volume, mount) for _, volume, mount in keys),
    )
    key_options = [part for option, _, mount in keys for part in (option, f"{mount['mountPath']}/keys")]
    program = PodProgram(
        image=fields.image or settings.control_image,
        command=[*_command(new, old, settings), *key_options],
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


def _key_files(new: AskedEngine, old: AskedEngine) -> list[tuple[str, Object, Object]]:
    """Option, volume and mount of each engine's API keys; one for both where they are the same, none without keys."""
    found = [("--api-keys", API_KEYS, API_KEYS_FOLDER, new.api_keys)]
    if old.api_keys != new.api_keys:
        found.append(("--old-api-keys", OLD_API_KEYS, OLD_API_KEYS_FOLDER, old.api_keys))
    return [
        (option, {"name": name, "secret": secret}, _read_only(name, folder))
        for option, name, folder, secret in found
        if secret is not None
    ]


def _read_only(name: str, folder: str) -> Object:
    return {"name": name, "mountPath": folder, "readOnly": True}
