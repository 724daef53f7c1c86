"""Manifests that cannot work: refused with the field, or ended in a condition that names the field, the file or the object. Deleting them leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stories.manifests import MODEL, Manifest, adopted, claim, corpus, deployment, job, save_now
from tests.stories.story_cluster import Object, StoryCluster, phase

Check = Callable[[Object], bool]


def test_what_admission_refuses_names_the_field(cluster: StoryCluster) -> None:
    wrong = job("wrong", {"training.globalBatchSize": 3})
    misspelt = job("misspelt", {"training.totalStep": 3, "training.totalSteps": None})
    both = deployment("both", {"uri": "pvc://models/a", "checkpointRef": {"name": "x"}})
    doomed = adopted("doomed", "archive", "runs", "step-00000001.00000000", deletionPolicy="Delete")

    errors = [result.get("error", "") for result in cluster.try_apply(wrong, misspelt, both, doomed)]

    assert "spec.training.globalBatchSize" in errors[0]
    assert "globalBatchSize 3 is not a multiple of microBatchSize 2 x data-parallel size 1 = 2" in errors[0]
    assert "spec.training" in errors[1]
    assert "totalStep" in errors[1]
    assert "spec.model" in errors[2]
    assert "spec.deletionPolicy" in errors[3]
    assert not cluster.all("TrainingJob")
    assert not cluster.all("Checkpoint")


def test_what_cannot_run_says_why_and_goes_without_a_trace(cluster: StoryCluster, tmp_path: Path) -> None:
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), claim("models", models(tmp_path / "models")))
    cases: list[tuple[Manifest, Check, str]] = [
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
        (job("unbuilt", {"memory.cpuOffload": True}), stalls, "not supported yet: spec.memory.cpuOffload"),
        (job("no-data", {"data.sources": [{"name": "tales", "path": "/data/other.jsonl"}]}), fails, "other.jsonl"),
        (job("bad-model", hugging_face("broken")), fails, "config.json"),
        (
            job("no-checkpoint", {"model": None, "modelFrom": {"checkpoint": {"name": "lost"}}}),
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
            deployment("no-folder", {"uri": "pvc://nowhere/model"}),
            waits,
            "PersistentVolumeClaim nowhere does not exist (spec.model.uri)",
        ),
        (deployment("bad-weights", {"uri": "pvc://models/broken"}), fails, "config.json"),
    ]
    cluster.apply(*(manifest for manifest, _, _ in cases))

    for manifest, ends, text in cases:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        cluster.wait(kind, name, lambda found, ends=ends, text=text: ends(found) and text in message(found), text, 90)
        assert text in condition_texts(cluster.get(kind, name)), cluster.status(kind, name)

    for name, cause in (("no-data", "DataError"), ("bad-model", "ModelError")):
        failure = cluster.status("TrainingJob", name)["lastFailure"]
        assert (failure["cause"], failure["action"], cluster.status("TrainingJob", name)["restarts"]) == (
            cause,
            "Fail",
            0,
        )
        assert cluster.events("TrainingJob", name)[cause]
    for manifest, _, _ in cases:
        cluster.delete(manifest["kind"], manifest["metadata"]["name"])
    for kind in ("TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool", "Pod", "Service"):
        cluster.wait_until(lambda kind=kind: not cluster.all(kind), f"no {kind} left")
    cluster.wait_until(
        lambda: [found["metadata"]["name"] for found in cluster.all("ConfigMap")] == ["tales"],
        "only the user's is left",
    )


def test_a_job_that_waits_for_a_claim_starts_when_it_comes(cluster: StoryCluster) -> None:
    cluster.apply(corpus(), claim("logs"), job("patient", {"training.totalSteps": 5}))
    waiting = cluster.wait("TrainingJob", "patient", lambda found: "checkpoints" in message(found), "waiting")
    assert "attempt" not in waiting["status"]
    cluster.apply(claim("checkpoints"))
    cluster.wait_for_phase("TrainingJob", "patient", "Completed")


def models(folder: Path) -> Path:
    """A Hugging Face folder whose config.json names an architecture that nobody has."""
    (folder / "broken").mkdir(parents=True)
    (folder / "broken" / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], **MODEL}))
    return folder


def hugging_face(name: str) -> Manifest:
    folder: Any = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    mount = {"name": "models", "mountPath": "/models"}
    return {
        "model": None,
        "modelFrom": {"huggingFace": {"path": f"/models/{name}"}},
        "workers.volumes": [folder, volume("tales", "tales"), logs()],
        "workers.volumeMounts": [
            mount,
            {"name": "tales", "mountPath": "/data"},
            {"name": "logs", "mountPath": "/logs"},
        ],
        "data.tokenizer": None,
    }


def volume(name: str, config_map: str) -> Manifest:
    return {"name": name, "configMap": {"name": config_map}}


def logs() -> Manifest:
    return {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}}


def waits(found: Object) -> bool:
    return phase(found) in ("Pending", "WaitingForCheckpoint")


def stalls(found: Object) -> bool:
    return any(c["type"] == "Stalled" and c["status"] == "True" for c in found["status"].get("conditions", ()))


def fails(found: Object) -> bool:
    return phase(found) in ("Failed", "Corrupt")


def message(found: Object) -> str:
    return str((found.get("status") or {}).get("message") or "")


def condition_texts(found: Object) -> str:
    return "\n".join(str(c.get("message")) for c in found["status"].get("conditions", ()))
