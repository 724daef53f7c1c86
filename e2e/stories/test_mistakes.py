"""Story 8: bad manifests, images, checkpoints, claims and secrets.

Each ends in a refusal or a condition that names the field or the object, and leaves no trace.
"""

from __future__ import annotations

from e2e.stories.story import Object, Story
from testing.stories.manifests import Manifest, adopted, claim, corpus, deployment, job
from testing.stories.mistakes import BROKEN, Mistake, break_model, conditions, mistakes, says, stalls, surroundings
from testing.stories.waits import phase

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
    story.apply(*surroundings(), SECRET, claim("models"))
    story.wait("PersistentVolumeClaim", "models", lambda found: found["status"]["phase"] == "Bound", "bound")
    config = break_model(story.folder("models"))
    cases = [*mistakes(), *mistakes_of_pods()]
    story.apply(*(manifest for manifest, _, _ in cases))

    for manifest, ends, text in cases:
        story.wait(manifest["kind"], manifest["metadata"]["name"], says(ends, text), text)

    for manifest, _, _ in cases:
        story.delete(manifest["kind"], manifest["metadata"]["name"])
    story.wait_until(lambda: set(story.left()) <= {"ConfigMap/stoker-control-keys"}, "gone without a trace")
    assert config.exists()


def test_a_corrupt_checkpoint_is_not_adopted_and_its_piece_is_named(story: Story) -> None:
    story.apply(
        corpus(),
        claim("checkpoints"),
        claim("logs"),
        job("taught", {"training.totalSteps": 10, "checkpoint.intervalSteps": 10}),
    )
    story.wait_for_phase("TrainingJob", "taught", "Completed")
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

    story.wait("Checkpoint", "bitten", lambda found: phase(found) == "Corrupt", "corrupt")
    assert data.name in conditions(story.get("Checkpoint", "bitten"))
    story.wait("InferenceDeployment", "teller", lambda found: "bitten" in conditions(found), "naming the checkpoint")
    assert not story.pods(role="engine")
    for kind, name in (("InferenceDeployment", "teller"), ("Checkpoint", "bitten"), ("TrainingJob", "taught")):
        story.delete(kind, name)
    story.kubectl("delete", "checkpoints", "--all")
    story.wait_until(lambda: set(story.left()) <= {"ConfigMap/stoker-control-keys"}, "gone without a trace")
    assert data.exists(), "what was adopted is never deleted"


def mistakes_of_pods() -> list[Mistake]:
    """Return mistakes that only a kubelet detects: images and Secrets."""
    api_key = {"engine.api": {"apiKeySecretRef": {"name": "absent", "key": "key"}}}
    wrong_key = {"engine.api": {"apiKeySecretRef": {"name": "keys", "key": "missing"}}}
    pools = {"pools": [{"name": "main", "replicas": 1, "image": MISSING_IMAGE}]}
    return [
        (
            job("no-secret", {"workers.envFrom": [{"secretRef": {"name": "absent"}}]}),
            stalls,
            'secret "absent" not found',
        ),
        (job("no-image", {"workers.image": MISSING_IMAGE}), stalls, MISSING_IMAGE),
        (deployment("no-keys", BROKEN, api_key), unready, "Secret absent (key key)"),
        (deployment("wrong-key", BROKEN, wrong_key), unready, "Secret keys (key missing)"),
        (deployment("no-engine", BROKEN, pools), unready, MISSING_IMAGE),
    ]


def unready(found: Object) -> bool:
    return phase(found) not in ("", "Serving")
