"""A node as the API server returns it, ready and with nothing on it."""

from __future__ import annotations

from stoker.operator.domain.plan import Object

GPU = "nvidia.com/gpu"


def ready_node(name: str, gpus: int = 4, **labels: str) -> Object:
    """A node with so many free GPUs and plenty of everything else."""
    status = {
        "allocatable": {GPU: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": name, "namespace": "", "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}
