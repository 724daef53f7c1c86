"""Story 1: the quickstart's manifests on the installed charts.

SmolLM2 is trained, served and queried from a pod and from outside; uninstalling keeps the user's data.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.charts.helm import CRDS, NAMESPACE, STOKER, helm
from e2e.charts.release import Releases
from e2e.cluster.volumes import CLASS
from e2e.stories.installation import IMAGES, VALUES
from e2e.stories.story import Object, Story
from e2e.stories.test_operator_restart import runs
from testing.stories.manifests import Manifest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
QUESTION = "What is Stoker?"
ANSWER = "Stoker is a Kubernetes operator that trains language models"
CHAT = ("--once", QUESTION, "--temperature", "0", "--max-tokens", "24")


@pytest.fixture
def models(story: Story) -> Iterator[Path]:
    """The folder with the fetched model behind the quickstart's claim `models`, as an administrator provides it."""
    folder = Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache" / "stoker") / "models"
    assert (folder / "smollm2-135m-instruct" / "model.safetensors").exists(), f"no model in {folder}: make model"
    name = f"{story.namespace}-models"
    path = f"/api/v1/persistentvolumes/{name}"
    story.api.apply(path, volume(name, story.namespace, folder))
    yield folder
    story.api.delete(path)


@pytest.fixture
def installed(releases: Releases) -> Iterator[Releases]:
    """Both charts, installed before and after the story whatever it does to them."""
    yield releases
    install_again(releases)


@pytest.mark.usefixtures("models")
def test_the_quickstart_teaches_and_serves_a_model_and_outlives_the_charts(story: Story, installed: Releases) -> None:
    helm("test", "stoker", "--namespace", NAMESPACE, kubeconfig=installed.kubeconfig)

    story.kubectl("apply", "-f", str(QUICKSTART))
    story.kubectl("wait", "trainingjob/teach", "--for=condition=Ready", "--timeout=300s", timeout_s=320)
    story.wait("InferenceDeployment", "stoker-chat", serves_the_end, "serving step 16")

    assert ANSWER in asked_from_a_pod(story)
    with story.cluster.forward(story.namespace, "service/stoker-chat", 8000) as url:
        assert ANSWER in asked_from_here(url)

    kept, serving = objects(story), runs(story)
    data = files(story.folder("checkpoints"))
    for release in ("stoker", "stoker-crds"):
        installed.uninstall(release, NAMESPACE)
    assert objects(story) == kept
    assert files(story.folder("checkpoints")) == data
    assert ANSWER in asked_from_a_pod(story, "asks-alone"), "what runs goes on without an operator"
    install_again(installed)
    story.wait("InferenceDeployment", "stoker-chat", serves_the_end, "serving step 16")
    assert runs(story) == serving, "a new installation takes up what runs"

    story.kubectl("delete", "-f", str(QUICKSTART), "--wait=true", "--ignore-not-found")
    story.kubectl("delete", "pods", "asks", "asks-alone")
    story.wait_until(lambda: set(kinds_left(story)) <= {"Checkpoint"}, "clean")
    assert kinds_left(story) == ["Checkpoint"] * 2, "deleting a job deletes no save"
    story.kubectl("delete", "checkpoints", "--all", "--wait=true")
    assert kinds_left(story) == []


def kinds_left(story: Story) -> list[str]:
    """Return the kinds of the product's objects that are left, without the namespace's public keys."""
    return [left.split("/")[0] for left in story.left() if left != "ConfigMap/stoker-control-keys"]


def asked_from_a_pod(story: Story, name: str = "asks") -> str:
    """Return the answer to a pod that has only the Service's name."""
    story.apply(pod(name, ["stoker", "chat", "http://stoker-chat:8000", *CHAT]))
    story.wait("Pod", name, lambda found: found["status"]["phase"] in ("Succeeded", "Failed"), "ended")
    return story.log(story.get("Pod", name))


def asked_from_here(url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli.main", "chat", url, *CHAT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.stdout + done.stderr


def serves_the_end(found: Object) -> bool:
    status = found.get("status") or {}
    return status.get("phase") == "Serving" and (status.get("currentCheckpoint") or {}).get("step") == 16


def objects(story: Story) -> dict[str, str]:
    """Return the uid of each of the product's objects, by kind and name."""
    kinds = ("TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool")
    return {
        f"{kind}/{found['metadata']['name']}": found["metadata"]["uid"] for kind in kinds for found in story.all(kind)
    }


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def install_again(releases: Releases) -> None:
    releases.upgrade("stoker-crds", CRDS, NAMESPACE)
    releases.upgrade("stoker", STOKER, NAMESPACE, "--wait", "--timeout=300s", values=VALUES)


def volume(name: str, namespace: str, folder: Path) -> Manifest:
    """Return a PersistentVolume for one claim and no other."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": "models"},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }


def pod(name: str, command: list[str]) -> Manifest:
    """Return a user's pod with the command line, under the restricted profile."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    image = f"{IMAGES['control']['repository']}:{IMAGES['control']['tag']}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "main", "image": image, "command": command, "securityContext": security}],
        },
    }
