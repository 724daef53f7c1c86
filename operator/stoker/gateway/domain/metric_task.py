"""Where the metrics log of a job is read: by the agent that writes it, or by a task pod beside the volume. Pure.

The log lies on a claim of the job (`logging.jsonl`). While a trainer's pod lives, its agent serves it; afterwards a
short task reads it, made from the job's pinned rendering: the same image, claims and place, without GPUs, secrets and
configuration. The operator takes no part in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stoker.gateway.domain.pod_attempts import attempt_of, rank_of
from stoker.pod.metric_reader import MOST

Object = Mapping[str, Any]
ROLE = "stoker.dev/role"
TASK_ROLE = "metrics"
DEADLINE_S = 120
RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
KEPT = (
    "serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "securityContext", "enableServiceLinks",
    "hostUsers", "runtimeClassName",
)  # fmt: skip
"""Fields of the trainer's pod that the task has, too."""
KEPT_BY_CONTAINER = ("image", "imagePullPolicy", "securityContext")


@dataclass(frozen=True)
class Span:
    """The steps of a question: `after < step <= until`."""

    after: int = 0
    until: int | None = None

    @property
    def whole(self) -> bool:
        return self.after == 0 and self.until is None

    def has(self, step: int) -> bool:
        return self.after < step and (self.until is None or step <= self.until)


@dataclass(frozen=True)
class AgentPlace:
    """The agent that writes the log."""

    namespace: str
    pod: str
    port: int

    @staticmethod
    def path(span: Span, max_points: int) -> str:
        """Path and query of the question."""
        until = "" if span.until is None else f"&until_step={span.until}"
        return f"/metrics/history?after_step={span.after}{until}&max_points={max_points}"


def live(pods: Sequence[Object]) -> list[Object]:
    """The trainer's pods that have not ended."""
    return [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]


def agent_of(job: Object, pods: Sequence[Object]) -> AgentPlace | None:
    """The first pod of the newest attempt, where it runs."""
    running = [pod for pod in live(pods) if pod.get("status", {}).get("phase") == "Running"]
    leading = [pod for pod in running if rank_of(pod) == 0]
    if not leading:
        return None
    newest = max(leading, key=attempt_of)
    port = ((_rendered(job).get("config") or {}).get("listen") or {}).get("port") or port_of(newest)
    return AgentPlace(newest["metadata"]["namespace"], newest["metadata"]["name"], int(port)) if port else None


def task_of(job: Object, span: Span) -> dict[str, Any] | None:
    """The pod that reads the log of a job whose pods have ended; None where the log is on no claim."""
    found = _rendered(job)
    log = ((found.get("config") or {}).get("logging") or {}).get("jsonl")
    spec = (found.get("pod") or {}).get("spec") or {}
    main = next((one for one in spec.get("containers") or () if one.get("name") == "main"), None)
    if not log or main is None:
        return None
    volumes, mounts = _claims(spec, main)
    if not any(PurePosixPath(log).is_relative_to(mount["mountPath"]) for mount in mounts):
        return None
    container = {
        "name": "main",
        **{name: main[name] for name in KEPT_BY_CONTAINER if name in main},
        "command": [*_python(main), "-m", "stoker.pod.metric_reader", log, *_arguments(span)],
        "resources": RESOURCES,
        "volumeMounts": mounts,
    }
    own = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        **{name: spec[name] for name in KEPT if name in spec},
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, span), "spec": own}


def why_failed(pod: Object) -> str:
    """Why a task ended badly, or has not ended, in one line."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        found = state.get("terminated") or state.get("waiting") or {}
        message = _last_word(str(found.get("message") or ""))
        if message or found.get("reason"):
            return (message or str(found["reason"]))[:300]
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])[:300]
    return str(status.get("message") or status.get("reason") or status.get("phase") or "Pending")[:300]


def _last_word(text: str) -> str:
    """The detail of a termination message, else the text."""
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text


def _rendered(job: Object) -> Mapping[str, Any]:
    return ((job.get("status") or {}).get("pinned") or {}).get("rendered") or {}


def _metadata(job: Object, span: Span) -> dict[str, Any]:
    """One name for one state of the log and one span, so that questions share the task."""
    metadata = job["metadata"]
    attempt = ((job.get("status") or {}).get("attempt") or {}).get("number")
    asked = json.dumps([metadata["uid"], attempt, span.after, span.until])
    return {
        "name": f"{metadata['name'][:40].rstrip('-.')}-metrics-{hashlib.sha256(asked.encode()).hexdigest()[:10]}",
        "namespace": metadata["namespace"],
        "labels": {
            "app.kubernetes.io/name": "stoker",
            "app.kubernetes.io/component": TASK_ROLE,
            "app.kubernetes.io/part-of": "stoker",
            ROLE: TASK_ROLE,
        },
        "ownerReferences": [
            {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "name": metadata["name"],
             "uid": metadata["uid"]}
        ],
    }  # fmt: skip


def _claims(spec: Object, main: Object) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The claims of the pod and their mounts, which the task only reads."""
    volumes = [
        {"name": one["name"], "persistentVolumeClaim": {**one["persistentVolumeClaim"], "readOnly": True}}
        for one in spec.get("volumes") or ()
        if "persistentVolumeClaim" in one
    ]
    names = {one["name"] for one in volumes}
    mounts = [{**one, "readOnly": True} for one in main.get("volumeMounts") or () if one.get("name") in names]
    return volumes, mounts


def _python(main: Object) -> list[str]:
    """What starts Python in the job's image."""
    command = list(main.get("command") or ())
    return command[: command.index("-m")] if "-m" in command[1:] else ["python"]


def _arguments(span: Span) -> list[str]:
    until = [] if span.until is None else ["--until-step", str(span.until)]
    after = ["--after-step", str(span.after)] if span.after else []
    return [*after, *until, "--max-points", str(MOST), "--termination-log", "/dev/termination-log"]


def port_of(pod: Object) -> int | None:
    """The port on which a pod of ours serves its metrics; None for a pod without one."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    ports = [
        port["containerPort"] for one in containers for port in one.get("ports") or () if port.get("name") == "http"
    ]
    return ports[0] if ports else None
