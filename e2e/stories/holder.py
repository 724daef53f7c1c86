"""A pod of another user that holds GPUs of a node and computes nothing."""

from __future__ import annotations

from e2e.cluster.image import BUSYBOX
from testing.stories.manifests import Manifest


def holder(name: str, node: str, gpus: int) -> Manifest:
    """Return the pod. It names its node itself, so that it needs no scheduler."""
    container = {
        "name": "main",
        "image": BUSYBOX,
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
