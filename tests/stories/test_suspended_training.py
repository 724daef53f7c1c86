"""A user suspends, resumes and cancels a run; its newest save is damaged while it is suspended."""

from __future__ import annotations

from pathlib import Path

from testing.stories.manifests import Manifest, claim, corpus, job
from testing.stories.story_cluster import Object, StoryCluster
from testing.stories.waits import phase

STEPS = 100_000
"""More steps than any machine computes during a test."""
INTERVAL = 25
"""Steps between two saves."""


def run(**controls: bool) -> Manifest:
    return job("long", {"training.totalSteps": STEPS, "checkpoint.intervalSteps": INTERVAL, "run": controls})


def test_a_suspended_run_passes_over_a_damaged_save_and_ends_with_a_last_one_when_it_is_cancelled(
    cluster: StoryCluster,
) -> None:
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), run())
    cluster.wait("TrainingJob", "long", lambda found: verified_step(found) >= 25, "at step 25")

    suspended = suspend(cluster)
    newest = suspended["status"]["newestVerifiedCheckpoint"]
    assert newest["step"] == suspended["status"]["attempt"]["lastStep"]
    assert reason_of(cluster, newest["name"]) in reasons_at(newest["step"])
    kept = [found["status"]["step"] for found in cluster.all("Checkpoint", job="long")]
    before = sorted(kept)[-2]
    assert before >= 25

    damage(cluster.claim_folder("checkpoints") / "long" / newest["folder"])
    cluster.apply(run())
    cluster.wait_for_phase("Checkpoint", newest["name"], "Corrupt")
    found = cluster.wait("TrainingJob", "long", lambda found: resumed_step(found) == before, f"resumed from {before}")
    assert found["status"]["attempt"]["number"] == 2
    failure = found["status"]["lastFailure"]
    assert (failure["cause"], failure["action"]) == ("CheckpointCorrupt", "ResumeOlder")
    assert newest["folder"] in failure["detail"]
    assert "piece" in failure["detail"]
    assert found["status"]["resumption"]["rejected"] == [newest["folder"]]
    assert cluster.condition("Checkpoint", newest["name"], "Verified")["status"] == "False"
    assert "corrupt" in cluster.status("Checkpoint", newest["name"])["message"]
    assert cluster.events("Checkpoint", newest["name"])["Corrupt"]

    cluster.wait("TrainingJob", "long", lambda found: verified_step(found) > before, "past the damaged save")
    cluster.apply(run(cancel=True))
    cluster.wait_for_phase("TrainingJob", "long", "Cancelled")
    cancelled = wait_for_last_save(cluster)
    last = cancelled["status"]["newestVerifiedCheckpoint"]
    assert last["step"] == cancelled["status"]["attempt"]["lastStep"]
    assert reason_of(cluster, last["name"]) in reasons_at(last["step"])
    cluster.wait_until(lambda: not running_pods(cluster), "every pod gone")
    refused = cluster.try_apply(run())[0]
    assert "cancel cannot be undone" in refused["error"]


def reasons_at(step: int) -> set[str]:
    """The reasons that the save has with which a run stops: at a step that is saved anyway it may be there already."""
    return {"interval", "interrupt"} if step % INTERVAL == 0 else {"interrupt"}


def suspend(cluster: StoryCluster) -> Object:
    """Suspend, and wait until the pods have gone and the last save is verified."""
    cluster.apply(run(suspend=True))
    cluster.wait_for_phase("TrainingJob", "long", "Suspended")
    assert running_pods(cluster) == []
    assert cluster.condition("TrainingJob", "long", "Stalled").get("status") != "True"
    return wait_for_last_save(cluster)


def wait_for_last_save(cluster: StoryCluster) -> Object:
    """Wait until the save with which the run stopped is verified; its Checkpoint is made in the pass that stops it."""

    def settled(found: Object) -> bool:
        return bool(verified_step(found) == found["status"]["attempt"]["lastStep"])

    return cluster.wait("TrainingJob", "long", settled, "verified to its last save")


def damage(folder: Path) -> None:
    """Flip one bit in the middle of the newest data file."""
    file = sorted(folder.glob("*.bin"))[0]
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


def running_pods(cluster: StoryCluster) -> list[Object]:
    return [pod for pod in cluster.pods(job="long") if phase(pod) in ("Pending", "Running")]


def verified_step(found: Object) -> int:
    return int(((found.get("status") or {}).get("newestVerifiedCheckpoint") or {}).get("step", 0))


def resumed_step(found: Object) -> int:
    return int(((found["status"].get("attempt") or {}).get("resumedFrom") or {}).get("step", 0))


def reason_of(cluster: StoryCluster, name: str) -> str:
    return str(cluster.status("Checkpoint", name)["reason"])
