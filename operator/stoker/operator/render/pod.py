"""Rendering of a pod from the curated fields of a resource.

First the restricted profile with our volumes and variables, then the user's, then the user's `podTemplate`.

Pure; called by the renderings of engine, router, trainer and task pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.operator.api.pod_fields import PodFields, SmallPod
from stoker.operator.domain.labels import PREFIX
from stoker.operator.domain.placement.node_capacity import affinity_to
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pod_paths import CHECKPOINT_FOLDER as CHECKPOINT_FOLDER
from stoker.operator.domain.pod_paths import WORK_FOLDER as WORK_FOLDER
from stoker.operator.domain.pod_template import own_metadata
from stoker.operator.domain.pods import MAIN, PLACEMENT_GATE
from stoker.operator.domain.settings import Settings
from stoker.pod.resources.gpu import GPU, is_gpu_resource

CONFIG_FOLDER = "/etc/stoker"
CONFIG_FILE = f"{CONFIG_FOLDER}/config.json"
KEYS_FOLDER = "/etc/stoker-keys"
TERMINATION_LOG = "/dev/termination-log"
USER = 65532
"""User of the images; volumes belong to its group."""


@dataclass(frozen=True, kw_only=True)
class PodProgram:
    """Program of the pod's main container."""

    image: str
    command: Sequence[str]
    port: int | None = None
    """Port of /livez and /readyz; None for tasks."""
    env: Mapping[str, str] = field(default_factory=dict)
    pod_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that take their values from fields of the pod, by the path of the field."""
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    grace_period_s: int = 30
    deadline_s: int | None = None
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Resources if the user names none."""


def owner_reference(owner: Object) -> dict[str, Any]:
    """Return a controller reference, by which the garbage collector removes the child with its owner."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata_of(owner: Object, name: str, component: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return name, owner and labels of a child.

    Labels of the owner are never copied: GitOps tools would adopt the child by them.
    """
    return {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": {
            "app.kubernetes.io/name": "stoker",
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/part-of": "stoker",
            "app.kubernetes.io/managed-by": "stoker-operator",
            f"{PREFIX}/role": component,
            **{name if "/" in name else f"{PREFIX}/{name}": value for name, value in labels.items()},
        },
        "ownerReferences": [owner_reference(owner)],
    }


def render_pod(metadata: Mapping[str, Any], program: PodProgram, fields: SmallPod, settings: Settings) -> Object:
    """Render a whole pod."""
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": dict(metadata),
        "spec": _pruned(
            {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": program.grace_period_s,
                "activeDeadlineSeconds": program.deadline_s,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "serviceAccountName": fields.service_account_name,
                "imagePullSecrets": _pull_secrets(fields, settings),
                "nodeSelector": dict(fields.node_selector),
                "tolerations": [toleration.to_wire() for toleration in fields.tolerations],
                "priorityClassName": fields.priority_class_name,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER,
                    "runAsGroup": USER,
                    "fsGroup": USER,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(program, fields, settings)],
                "volumes": [*program.volumes, *_volumes(fields)],
            }
        ),
    }
    template = fields.pod_template or {}
    spec = merge_template(pod["spec"], template.get("spec") or {})
    return {**pod, "metadata": own_metadata(template, metadata), "spec": spec}


def with_gate(pod: Object) -> Object:
    """Return a pod that waits until the operator has chosen the nodes of its gang."""
    others = [gate for gate in pod["spec"].get("schedulingGates", ()) if gate["name"] != PLACEMENT_GATE]
    gates = [*others, {"name": PLACEMENT_GATE}]
    return {**pod, "spec": {**pod["spec"], "schedulingGates": gates}}


def on_node(pod: Object, node: str) -> Object:
    """Return a pod that starts on one node."""
    return {**pod, "spec": {**pod["spec"], "affinity": affinity_to(node, pod["spec"].get("affinity"))}}


def config_volume(config_map: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return volume and mount of the configuration."""
    return (
        {"name": "stoker-config", "configMap": {"name": config_map}},
        {"name": "stoker-config", "mountPath": CONFIG_FOLDER, "readOnly": True},
    )


def keys_volume(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return volume and mount of the operator's public keys."""
    return (
        {"name": "stoker-keys", "configMap": {"name": settings.control_keys_config_map}},
        {"name": "stoker-keys", "mountPath": KEYS_FOLDER, "readOnly": True},
    )


def claim_volume(claim: str, *, read_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return volume and mount of the claim with the checkpoints."""
    return (
        {"name": "stoker-checkpoints", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "stoker-checkpoints", "mountPath": CHECKPOINT_FOLDER, "readOnly": read_only},
    )


def scratch_volume(name: str, path: str, medium: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return volume and mount of an empty folder that lives as long as the pod."""
    source = {"medium": medium} if medium else {}
    return {"name": name, "emptyDir": source}, {"name": name, "mountPath": path}


def merge_template(base: Any, patch: Any) -> Any:
    """Merge strategically, as far as pods need it.

    Maps merge, null removes, lists of named items merge by name, other lists are replaced.
    """
    if isinstance(base, dict) and isinstance(patch, Mapping):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge_template(merged.get(key), value)
        return merged
    key = _merge_key(base, patch)
    if key is None:
        return patch
    by_key = {item[key]: item for item in base}
    for item in patch:
        by_key[item[key]] = merge_template(by_key.get(item[key], {}), item)
    return list(by_key.values())


def with_config_map(volumes: Sequence[Mapping[str, Any]], placeholder: str, name: str) -> list[dict[str, Any]]:
    """Replace the placeholder in the volumes of a template by the ConfigMap `name`."""
    return [
        {**volume, "configMap": {"name": name}}
        if volume.get("configMap", {}).get("name") == placeholder
        else dict(volume)
        for volume in volumes
    ]


def _container(program: PodProgram, fields: SmallPod, settings: Settings) -> dict[str, Any]:
    container = {
        "name": MAIN,
        "image": fields.image or program.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(program.command),
        "env": [*_own_env(program), *_env(fields)],
        "envFrom": [source.to_wire() for source in fields.env_from] if isinstance(fields, PodFields) else [],
        "resources": _resources(fields) or {name: dict(amounts) for name, amounts in program.resources.items()},
        "volumeMounts": [*program.mounts, *_mounts(fields)],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **_probes(program.port),
    }
    return _pruned(container)


def _pull_secrets(fields: SmallPod, settings: Settings) -> list[dict[str, Any]]:
    """List the user's pull secrets, then the installation's, each once."""
    named = [secret.to_wire() for secret in fields.image_pull_secrets]
    own = [{"name": name} for name in settings.image_pull_secrets]
    return [*named, *(secret for secret in own if secret not in named)]


def _own_env(program: PodProgram) -> list[dict[str, Any]]:
    fields = {"STOKER_POD_UID": "metadata.uid", **program.pod_env}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in program.env.items()),
    ]


def _env(fields: SmallPod) -> list[dict[str, Any]]:
    return [variable.to_wire() for variable in fields.env] if isinstance(fields, PodFields) else []


def _volumes(fields: SmallPod) -> list[dict[str, Any]]:
    return [volume.to_wire() for volume in fields.volumes] if isinstance(fields, PodFields) else []


def _mounts(fields: SmallPod) -> list[dict[str, Any]]:
    return [mount.to_wire() for mount in fields.volume_mounts] if isinstance(fields, PodFields) else []


def _resources(fields: SmallPod) -> dict[str, Any]:
    resources: dict[str, Any] = fields.resources.to_wire()
    if isinstance(fields, PodFields) and fields.gpus_per_pod:
        limits = dict(resources.get("limits", {}))
        resources["limits"] = {**limits, GPU: str(fields.gpus_per_pod)}
    return resources


def _probes(port: int | None) -> dict[str, Any]:
    if port is None:
        return {}
    return {
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": {"httpGet": {"path": "/livez", "port": port}, "periodSeconds": 1, "failureThreshold": 120},
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": port},
            "periodSeconds": 10,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
        },
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": port}, "periodSeconds": 1, "timeoutSeconds": 5},
    }


def _merge_key(base: Any, patch: Any) -> str | None:
    """Return the field by which two lists merge; None for lists that do not."""
    if not isinstance(base, list) or not isinstance(patch, list):
        return None
    items = [*base, *patch]
    if not all(isinstance(item, Mapping) for item in items):
        return None
    return next((key for key in ("mountPath", "name") if all(key in item for item in items)), None)


def _pruned(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value not in (None, [], {}, "")}


def device_of(wanted: str, fields: PodFields) -> str:
    """Choose the device; a pod with GPUs fails rather than fall back to the CPU."""
    return "cuda" if wanted == "auto" and has_gpus(fields) else wanted


def has_gpus(fields: PodFields) -> bool:
    """Whether a pod asks for GPUs: by `gpusPerPod`, or for a MIG device by `resources`."""
    named = fields.resources.to_wire()
    asked = {name for part in named.values() for name in part if is_gpu_resource(name)}
    return bool(fields.gpus_per_pod or asked)


def may_have_gpus(fields: PodFields) -> bool:
    """Whether a pod has GPUs, or claims devices that may be some."""
    spec = (fields.pod_template or {}).get("spec") or {}
    return has_gpus(fields) or bool(spec.get("resourceClaims"))
