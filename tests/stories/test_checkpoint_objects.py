"""Checkpoint objects of one running job: requested, kept, given up, adopted, used, deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

from testing.stories.manifests import adopted, claim, corpus, job, save_now
from testing.stories.object_views import FIGURES
from testing.stories.story_cluster import Object, StoryCluster

EVERY = 25


def test_checkpoints_are_asked_for_kept_adopted_used_and_deleted(cluster: StoryCluster, tmp_path: Path) -> None:
    policy = {"training.totalSteps": 100_000, "checkpoint.intervalSteps": EVERY, "checkpoint.maxToKeep": 2}
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), claim("archive", tmp_path / "archive"))
    cluster.apply(job("long", policy), save_now("by-hand", "long", pinned=True, deletionPolicy="Delete"))

    by_hand = cluster.wait("Checkpoint", "by-hand", is_verified, "verified")["status"]
    folder = cluster.claim_folder("checkpoints") / "long" / by_hand["folder"]
    assert (by_hand["reason"], by_hand["verifiedBy"], by_hand["job"]["name"]) == ("request", "Agent", "long")
    assert by_hand["step"] > 0
    assert (folder / "manifest.json").is_file()
    figures = cluster.figures("by-hand")
    assert sorted(figures) == sorted(FIGURES)
    assert figures["files"] == len(list(folder.iterdir())) - 1

    cluster.wait("TrainingJob", "long", lambda found: verified_step(found) >= by_hand["step"] + 4 * EVERY, "further")
    cluster.apply(job("long", {**policy, "run.cancel": True}))
    cluster.wait_for_phase("TrainingJob", "long", "Cancelled")
    two_newest_and_the_pinned_one_are_left(cluster, folder)

    shutil.copytree(folder, tmp_path / "archive" / "runs" / folder.name)
    begun = {"model": None, "modelFrom": {"checkpoint": {"name": "by-hand"}}, "training.totalSteps": 100_000}
    cluster.apply(adopted("adopted", "archive", "runs", folder.name), job("next", begun))
    imported = cluster.wait("Checkpoint", "adopted", is_verified, "verified")["status"]
    assert (imported["verifiedBy"], imported["reason"]) == ("Task", "import")
    assert (imported["digest"], cluster.figures("adopted")) == (by_hand["digest"], figures)

    cluster.wait("Checkpoint", "by-hand", lambda found: found["status"].get("inUseBy"), "in use")
    assert cluster.delete("Checkpoint", "by-hand") is False
    waiting = cluster.wait("Checkpoint", "by-hand", lambda found: "TrainingJob next" in message(found), "held")
    assert waiting["metadata"]["deletionTimestamp"]
    assert folder.is_dir()
    cluster.apply(job("next", {**begun, "run.cancel": True}))  # until then it uses the checkpoint
    cluster.wait_for_phase("TrainingJob", "next", "Cancelled")
    cluster.wait_until_gone("Checkpoint", "by-hand")
    assert not folder.exists()
    assert cluster.events("Checkpoint", "by-hand")["Deleted"] == ["the data is deleted"]

    last = cluster.status("TrainingJob", "long")["newestVerifiedCheckpoint"]
    for kind, name in (("TrainingJob", "long"), ("Checkpoint", last["name"]), ("Checkpoint", "adopted")):
        if kind == "Checkpoint":
            assert is_verified(cluster.get(kind, name)), "a job's end is no checkpoint's end"
        cluster.delete(kind, name)
        cluster.wait_until_gone(kind, name)
    assert (folder.parent / last["folder"] / "manifest.json").is_file()
    assert (tmp_path / "archive" / "runs" / folder.name / "manifest.json").is_file()


def two_newest_and_the_pinned_one_are_left(cluster: StoryCluster, pinned: Path) -> None:
    """Assert that objects and folders agree and that the data which retention gave up is deleted."""

    def folders() -> set[str]:
        return {path.name for path in pinned.parent.glob("step-*")}

    cluster.wait_until(lambda: len(folders()) == len(cluster.all("Checkpoint", job="long")) == 3, "three saves left")
    saves = cluster.all("Checkpoint", job="long")
    by_step = sorted((found["status"] for found in saves), key=lambda status: int(status["step"]))
    assert {status["folder"] for status in by_step} == folders()
    assert by_step[0]["folder"] == pinned.name
    assert by_step[-1]["step"] == cluster.status("TrainingJob", "long")["attempt"]["lastStep"]


def is_verified(found: Object) -> bool:
    status = found.get("status") or {}
    assert status.get("phase") not in ("Failed", "Corrupt"), status
    return bool(status.get("verifiedAt"))


def verified_step(found: Object) -> int:
    return int(((found.get("status") or {}).get("newestVerifiedCheckpoint") or {}).get("step", 0))


def message(found: Object) -> str:
    return str(found["status"].get("message") or "")
