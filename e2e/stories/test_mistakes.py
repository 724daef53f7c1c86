"""Story 8: bad manifests, images, checkpoints, claims and secrets: each ends in a refusal or a condition that names the field or the object, and goes without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from e2e.stories.story import Object, Story, phase
from tests.stories.manifests import MODEL, Manifest, adopted, claim, corpus, deployment, job, save_now

Check = Callable[[Object], bool]
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"other": "value"}}
MISSING_IMAGE = "localhost/stoker/no-such-image:1"


def test_what_the_api_server_refuses_names_the_field(story: Story) -> None:
    cases: list[tuple[Manifest, str]] = [
        (
            job("batch", {"training.globalBatchSize": 3}),
            "globalBatchSize 3 is not a multiple of microBatchSize 2 x data-parallel size 1 = 2",
        ),
        (
            job("misspelt", {"training.totalStep": 3}),
            'unknown field "totalStep" in dev.stoker.v1alpha1.TrainingJob.spec.training',
        ),
        (job("ranks", {"parallelism.tensor": 3}), "1 ranks do not divide by tensor 3 x pipeline 1 x context 1 = 3"),
        (deployment("both", {"uri": "pvc://models/a", "checkpointRef": {"name": "x"}}), "spec.model"),
        (
            adopted("doomed", "archive", "runs", "step-00000001.00000000", deletionPolicy="Delete"),
            "spec.deletionPolicy",
        ),
        (
            job("root", {"workers.podTemplate": {"spec": {"hostNetwork": "yes"}}, "workers.replicas": 0}),
            "spec.workers.replicas",
        ),
    ]
    for manifest, text in cases:
        assert text in story.refused(manifest), manifest["metadata"]["name"]
    assert story.left() == []


def test_what_cannot_run_says_why_and_goes_without_a_trace(story: Story) -> None:
    story.apply(corpus(), SECRET, claim("checkpoints"), claim("logs"), claim("models"))
    story.wait("PersistentVolumeClaim", "models", lambda found: found["status"]["phase"] == "Bound", "bound")
    broken = story.folder("models") / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], **MODEL}))
    cases = mistakes()
    story.apply(*(manifest for manifest, _, _ in cases))

    for manifest, ends, text in cases:
        story.wait(manifest["kind"], manifest["metadata"]["name"], says(ends, text), text, 180)

    for manifest, _, _ in cases:
        story.delete(manifest["kind"], manifest["metadata"]["name"])
    story.wait_until(lambda: set(story.left()) <= {"ConfigMap/stoker-control-keys"}, "gone without a trace", 120)
    assert (broken / "config.json").exists()


def test_a_corrupt_checkpoint_is_not_adopted_and_its_piece_is_named(story: Story) -> None:
    story.apply(
        corpus(),
        claim("checkpoints"),
        claim("logs"),
        job("taught", {"training.totalSteps": 10, "checkpoint.intervalSteps": 10}),
    )
    story.wait_for_phase("TrainingJob", "taught", "Completed", timeout_s=120)
    (folder,) = story.folder("checkpoints").glob("*/step-*")
    data = max(
        (path for path in folder.iterdir() if path.name != "manifest.json"), key=lambda path: path.stat().st_size
    )
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))

    story.apply(adopted("bitten", "checkpoints", folder.parent.name, folder.name))
    story.apply(deployment("teller", {"checkpointRef": {"name": "bitten"}}))

    story.wait("Checkpoint", "bitten", lambda found: phase(found) == "Corrupt", "corrupt", 90)
    assert data.name in conditions(story.get("Checkpoint", "bitten"))
    story.wait("InferenceDeployment", "teller", lambda found: "bitten" in conditions(found), "naming the checkpoint")
    assert not story.pods(role="engine")
    for kind, name in (("InferenceDeployment", "teller"), ("Checkpoint", "bitten"), ("TrainingJob", "taught")):
        story.delete(kind, name)
    story.kubectl("delete", "checkpoints", "--all")
    story.wait_until(lambda: set(story.left()) <= {"ConfigMap/stoker-control-keys"}, "gone without a trace", 120)
    assert data.exists(), "what was adopted is never deleted"


def mistakes() -> list[tuple[Manifest, Check, str]]:
    """(what is applied, how it ends, what its conditions say)."""
    api_key = {"engine.api": {"apiKeySecretRef": {"name": "nobody", "key": "key"}}}
    wrong_key = {"engine.api": {"apiKeySecretRef": {"name": "keys", "key": "missing"}}}
    good = {"uri": "pvc://models/broken"}
    return [
        (
            job("no-claim", {"checkpoint.storage": {"claimName": "nowhere"}}),
            waits,
            "PersistentVolumeClaim nowhere does not exist (spec.checkpoint.storage.claimName)",
        ),
        (
            job("no-volume", {"workers.volumes": [volume("tales", "missing"), logs()]}),
            waits,
            "ConfigMap missing does not exist (spec.workers.volumes[0])",
        ),
        (
            job("no-secret", {"workers.envFrom": [{"secretRef": {"name": "nobody"}}]}),
            stalls,
            'secret "nobody" not found',
        ),
        (job("no-image", {"workers.image": MISSING_IMAGE}), stalls, MISSING_IMAGE),
        (job("unbuilt", {"memory.cpuOffload": True}), stalls, "not supported yet: spec.memory.cpuOffload"),
        (job("no-data", {"data.sources": [{"name": "tales", "path": "/data/other.jsonl"}]}), fails, "other.jsonl"),
        (job("bad-model", hugging_face("broken")), fails, "config.json"),
        (
            job("no-base", {"model": None, "modelFrom": {"checkpoint": {"name": "lost"}}}),
            waits,
            "Checkpoint lost does not exist (spec.modelFrom.checkpoint)",
        ),
        (adopted("no-folder", "checkpoints", "runs", "step-00000007.0badc0de"), fails, "step-00000007.0badc0de"),
        (adopted("no-archive", "archive", "runs", "step-00000007.0badc0de"), waits, "PersistentVolumeClaim archive"),
        (save_now("no-job", "nobody"), waits, "TrainingJob nobody does not exist (spec.source.jobRef)"),
        (
            deployment("no-save", {"checkpointRef": {"name": "lost"}}),
            waits,
            "Checkpoint lost does not exist (spec.model.checkpointRef)",
        ),
        (
            deployment("no-models", {"uri": "pvc://nowhere/model"}),
            waits,
            "PersistentVolumeClaim nowhere does not exist (spec.model.uri)",
        ),
        (deployment("bad-weights", good), fails, "config.json"),
        (
            deployment("no-keys", good, api_key),
            unready,
            "Secret nobody does not exist",
        ),
        (deployment("wrong-key", good, wrong_key), unready, "Secret keys (key missing)"),
        (
            deployment("no-engine", good, {"pools": [{"name": "main", "replicas": 1, "image": MISSING_IMAGE}]}),
            unready,
            MISSING_IMAGE,
        ),
    ]


def hugging_face(name: str) -> Manifest:
    folder: Any = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    return {
        "model": None,
        "modelFrom": {"huggingFace": {"path": f"/models/{name}"}},
        "workers.volumes": [folder, volume("tales", "tales"), logs()],
        "workers.volumeMounts": [
            {"name": "models", "mountPath": "/models"},
            {"name": "tales", "mountPath": "/data"},
            {"name": "logs", "mountPath": "/logs"},
        ],
        "data.tokenizer": None,
    }


def volume(name: str, config_map: str) -> Manifest:
    return {"name": name, "configMap": {"name": config_map}}


def logs() -> Manifest:
    return {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}}


def says(ends: Check, text: str) -> Check:
    """Ended in that way, with a condition that has the text."""
    return lambda found: ends(found) and text in conditions(found)


def waits(found: Object) -> bool:
    return phase(found) in ("Pending", "WaitingForCheckpoint")


def stalls(found: Object) -> bool:
    return any(c["type"] == "Stalled" and c["status"] == "True" for c in found["status"].get("conditions", ()))


def fails(found: Object) -> bool:
    return phase(found) in ("Failed", "Corrupt")


def unready(found: Object) -> bool:
    return phase(found) not in ("", "Serving")


def conditions(found: Object) -> str:
    return "\n".join(str(c.get("message")) for c in (found.get("status") or {}).get("conditions", ()))
