"""Rendering of routers: Service, configuration, snapshot of backends, pods.

Pure. Called by the reconciler of InferenceDeployments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.operator.api.inferencedeployment import (
    InferenceDeployment,
    InferenceDeploymentSpec,
    RequestClassSettings,
)
from stoker.operator.domain.labels import DEPLOYMENT_UID, ROLE, ZONE
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.names import digest_of, stem
from stoker.operator.render.pod import (
    CONFIG_FILE,
    KEYS_FOLDER,
    TERMINATION_LOG,
    WORK_FOLDER,
    PodProgram,
    config_volume,
    keys_volume,
    metadata_of,
    render_pod,
    scratch_volume,
)

BACKENDS_FOLDER = "/etc/stoker-backends"
BACKENDS_KEY = "backends.json"
PLACE = {"STOKER_NODE_NAME": "spec.nodeName", "STOKER_ZONE": f"metadata.labels['{ZONE}']"}
"""Where a router runs. Kubernetes 1.35 copies the node's zone to its pods; without it only the node counts."""


def deployment_labels(deployment: InferenceDeployment) -> dict[str, str]:
    return {"deployment": deployment.metadata.name, "deployment-uid": deployment.metadata.uid}


def front_service(deployment: InferenceDeployment, resource: Object, settings: Settings) -> Object:
    """Render the endpoint: the Service of the deployment's name in front of its routers."""
    wanted = deployment.spec.router.service
    metadata = metadata_of(resource, deployment.metadata.name, "router", deployment_labels(deployment))
    if wanted.annotations:
        metadata["annotations"] = dict(wanted.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": wanted.type,
            "selector": {DEPLOYMENT_UID: deployment.metadata.uid, ROLE: "router"},
            "ports": [{"name": "http", "port": wanted.port, "targetPort": settings.router_port}],
        },
    }


def router_names(deployment: InferenceDeployment) -> tuple[str, str]:
    """Return the names of the ConfigMaps with configuration and snapshot."""
    base = stem(deployment.metadata.name, deployment.metadata.uid)
    return f"{base}-router", f"{base}-backends"


def router_config(deployment: InferenceDeployment, settings: Settings) -> dict[str, Any]:
    """Render the router's configuration file."""
    wanted = deployment.spec.router
    return {
        "namespace": deployment.metadata.namespace,
        "deployment": deployment.metadata.name,
        "listen": {
            "host": "0.0.0.0",
            "port": settings.router_port,
            "control_keys": KEYS_FOLDER,
            "control_socket": f"{WORK_FOLDER}/control.sock",
        },
        "termination_log": TERMINATION_LOG,
        "backends_file": f"{BACKENDS_FOLDER}/{BACKENDS_KEY}",
        "policy": wanted.policy,
        "connect_timeout_s": wanted.connect_timeout_seconds,
        "request_timeout_s": wanted.request_timeout_seconds,
        "probe_interval_s": wanted.probe_interval_seconds,
        "max_attempts": wanted.max_attempts,
        "hold_s": wanted.hold_seconds,
        "max_held_requests": wanted.max_held_requests,
        "max_body_bytes": wanted.max_body_bytes,
        "grace_period_s": wanted.grace_period_seconds,
        **({"classes": [_request_class(one) for one in wanted.classes]} if wanted.classes else {}),
    }


def _request_class(wanted: RequestClassSettings) -> dict[str, Any]:
    """Render one class of requests."""
    found: dict[str, Any] = {
        "name": wanted.name,
        "service_tiers": list(wanted.service_tiers),
        "max_queued": wanted.max_queued,
        "max_queue_s": wanted.max_queue_seconds,
    }
    if wanted.ttft_ms is not None:
        found["ttft_goal_s"] = wanted.ttft_ms / 1000
    if wanted.late_class is not None:
        found["late_class"] = wanted.late_class
    if wanted.aging_seconds is not None:
        found["aging_s"] = wanted.aging_seconds
    return found


def router_base(deployment: InferenceDeployment, settings: Settings) -> dict[str, Any]:
    """Render configuration and pod for the present intent, to be pinned in status until it changes."""
    return {"config": router_config(deployment, settings), "pod": _pod_spec(deployment, settings)}


def router_intent(spec: InferenceDeploymentSpec) -> str:
    """Return the hash of `spec.router` without their number, the Service, and other deployments."""
    wire = spec.router.to_wire()
    without = {"replicas", "service", "fallback", "models"} | ({"classes"} if not spec.router.classes else set())
    return digest_of({name: value for name, value in wire.items() if name not in without}, 8)


def router_config_map(deployment: InferenceDeployment, resource: Object, base: Mapping[str, Any]) -> Object:
    name, _ = router_names(deployment)
    return _config_map(
        deployment, resource, name, {"config.json": json.dumps(base["config"], indent=1, sort_keys=True)}
    )


def backends_config_map(deployment: InferenceDeployment, resource: Object, snapshot: Mapping[str, Any]) -> Object:
    """Render the snapshot that a router reads when it starts."""
    _, name = router_names(deployment)
    return _config_map(deployment, resource, name, {BACKENDS_KEY: json.dumps(snapshot, indent=1, sort_keys=True)})


def router_pod(
    deployment: InferenceDeployment, resource: Object, base: Mapping[str, Any], revision: str, index: int
) -> Object:
    """Render one router."""
    name = f"{stem(deployment.metadata.name, deployment.metadata.uid)}-router-{revision}-{index}"
    labels = {**deployment_labels(deployment), "revision": revision}
    metadata = metadata_of(resource, name, "router", labels)
    template = base["pod"]
    metadata["labels"] = {**template.get("metadata", {}).get("labels", {}), **metadata["labels"]}
    if template.get("metadata", {}).get("annotations"):
        metadata["annotations"] = template["metadata"]["annotations"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": dict(template["spec"])}


def _pod_spec(deployment: InferenceDeployment, settings: Settings) -> dict[str, Any]:
    config_name, backends_name = router_names(deployment)
    backends = (
        {"name": "stoker-backends", "configMap": {"name": backends_name}},
        {"name": "stoker-backends", "mountPath": BACKENDS_FOLDER, "readOnly": True},
    )
    pairs = [
        config_volume(config_name),
        keys_volume(settings),
        backends,
        scratch_volume("stoker-work", WORK_FOLDER),
        scratch_volume("stoker-tmp", "/tmp"),
    ]
    wanted = deployment.spec.router
    program = PodProgram(
        image=wanted.image or settings.control_image,
        command=[*settings.python, "-m", "stoker.router", "--config", CONFIG_FILE],
        port=settings.router_port,
        volumes=[volume for volume, _ in pairs],
        mounts=[mount for _, mount in pairs],
        pod_env=PLACE if wanted.policy == "locality" else {},
        grace_period_s=wanted.grace_period_seconds,
        resources=settings.router_resources,
    )
    pod = render_pod({"name": config_name}, program, wanted, settings)
    return {"metadata": {name: value for name, value in pod["metadata"].items() if name != "name"}, "spec": pod["spec"]}


def _config_map(deployment: InferenceDeployment, resource: Object, name: str, data: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(resource, name, "router", deployment_labels(deployment)),
        "data": data,
    }
