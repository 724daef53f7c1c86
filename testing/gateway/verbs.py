"""Verbs of the command line against a `KubeServer`: run one, write a manifest, empty the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from stoker.cli.main import stoker
from stoker.operator.domain.plan import Ref
from testing.gateway.kube_server import KubeServer
from testing.gateway.world import JOB_SPEC, World


def run(server: KubeServer, *words: str, code: int = 0) -> str:
    """Output of a verb, standard error with it."""
    result = CliRunner().invoke(stoker, [words[0], "--kubeconfig", str(server.kubeconfig), *words[1:]])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def manifest(folder: Path, name: str = "run", **spec: Any) -> str:
    """Write the manifest of a job."""
    body = {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {**JOB_SPEC, **spec},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(body))
    return str(file)


def emptied(found: World) -> None:
    """Delete every object."""
    found.devices.serve(versions=())
    for kind in ("TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool", "Pod", "Event"):
        for item in found.objects.of_kind(kind):
            metadata = item["metadata"]
            found.objects.delete(Ref(kind, metadata["namespace"], metadata["name"], metadata["uid"]), grace_s=0)
