"""Shared volumes: folders of this machine at the same path on every node, as PersistentVolumes that any claim binds.

They stand in for a network file system: ReadWriteMany, readable from every node and from this machine. A released
volume keeps its files and is not bound again.
"""

from pathlib import Path
from typing import Any

from e2e.cluster.api import Api

CLASS = "shared"
COUNT = 48
SIZE = "100Gi"


def provide(api: Api, folder: Path) -> None:
    """Create the default StorageClass and its volumes, each an empty folder that every user may write."""
    api.apply(f"/apis/storage.k8s.io/v1/storageclasses/{CLASS}", _storage_class())
    for number in range(COUNT):
        name = f"{CLASS}-{number:02d}"
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        api.apply(f"/api/v1/persistentvolumes/{name}", _volume(name, path))


def _storage_class() -> dict[str, Any]:
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": default},
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
    }


def _volume(name: str, path: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": SIZE},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }
