"""Story 3: the newest checkpoint is damaged on disk.

The job resumes from the one before and reports it; the Checkpoint turns Corrupt.
"""

from __future__ import annotations

from pathlib import Path

from e2e.stories.story import Object, Story
from stoker.checkpoint.store import CheckpointRoot
from testing.stories.manifests import claim, corpus, job
from testing.stories.waits import phase

EVERY = 20
RUN = {"training.totalSteps": 100_000, "checkpoint.intervalSteps": EVERY, "checkpoint.maxToKeep": 5}


def test_a_resume_passes_over_a_damaged_checkpoint_and_says_so(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("train", RUN))
    story.wait("TrainingJob", "train", lambda _: len(verified(story)) >= 2, "saved twice")
    story.patch("TrainingJob", "train", {"run": {"suspend": True}})
    story.wait_for_phase("TrainingJob", "train", "Suspended")
    before, newest = newest_two(story)

    flip_a_bit(story.folder("checkpoints") / "train" / newest["status"]["folder"])
    story.patch("TrainingJob", "train", {"run": {"suspend": False}})

    resumed_older = story.wait(
        "TrainingJob", "train", lambda found: found["status"]["attempt"]["number"] == 2, "resumed older"
    )
    status = resumed_older["status"]
    failure = status["attempts"][0]["failure"]
    assert (failure["cause"], failure["action"]) == ("CheckpointCorrupt", "ResumeOlder")
    assert newest["status"]["folder"] in failure["detail"]
    assert status["attempt"]["resumedFrom"]["folder"] == before["status"]["folder"]
    assert status["lostSteps"] == newest["status"]["step"] - before["status"]["step"]
    [said] = story.wait_for_event("TrainingJob", "train", "CheckpointCorrupt")
    assert said.endswith("ResumeOlder")

    damaged = story.wait_for_phase("Checkpoint", newest["metadata"]["name"], "Corrupt")
    assert "corrupt" in damaged["status"]["message"]
    assert story.condition("Checkpoint", newest["metadata"]["name"], "Verified")["status"] == "False"
    assert phase(story.get("Checkpoint", before["metadata"]["name"])) == "Complete"
    step = before["status"]["step"]
    story.wait(
        "TrainingJob",
        "train",
        lambda found: (found["status"].get("newestVerifiedCheckpoint") or {}).get("step", 0) > step,
        "further",
        90,
    )


def newest_two(story: Story) -> list[Object]:
    """Wait until the save of the suspended run is verified too, which may come after its pods; return the last two."""
    [last, *_] = CheckpointRoot(story.folder("checkpoints") / "train").committed()
    story.wait_until(
        lambda: verified(story)[-1]["status"]["folder"] == last.folder_name, f"{last.folder_name} verified"
    )
    return verified(story)[-2:]


def verified(story: Story) -> list[Object]:
    """Return the job's verified Checkpoints by step."""
    found = [item for item in story.all("Checkpoint", job="train") if item.get("status", {}).get("verifiedAt")]
    return sorted(found, key=lambda item: int(item["status"]["step"]))


def flip_a_bit(folder: Path) -> None:
    """Flip a bit in the middle of a checkpoint's largest file, as a bad disk does."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
