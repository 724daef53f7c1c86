"""`run.applyChanges: Restart` on real nodes: an edit saves the run and restarts it in the new form."""

from __future__ import annotations

from e2e.stories.story import Object, Story
from testing.stories.manifests import Manifest, claim, corpus, job


def run(step_seconds: int) -> Manifest:
    return job(
        "long",
        {
            "training.totalSteps": 1_000_000,
            "checkpoint.intervalSteps": 1_000_000,
            "deadlines.stepSeconds": step_seconds,
            "run": {"applyChanges": "Restart"},
        },
    )


def test_an_edit_saves_the_run_and_restarts_it_where_it_was(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), run(600))
    story.wait("TrainingJob", "long", lambda found: step(found) > 0, "training")
    story.apply(run(700))
    found = story.wait("TrainingJob", "long", lambda found: attempt(found) == 1 and step(found) > 0, "restarted")
    status = found["status"]
    ended = status["attempts"][0]
    assert status["attempt"]["resumedFrom"]["step"] == ended["lastStep"] > 0, "it saved before it went"
    assert "failure" not in ended
    assert (status.get("restarts", 0), status.get("lostSteps", 0)) == (0, 0)
    assert status["pinned"]["rendered"]["config"]["deadlines"]["step_s"] == 700
    assert story.events("TrainingJob", "long")["RestartForEdit"]
    story.wait("TrainingJob", "long", lambda found: step(found) > ended["lastStep"], "training on")


def attempt(found: Object) -> int:
    return int(((found.get("status") or {}).get("attempt") or {}).get("number", 0))


def step(found: Object) -> int:
    return int(((found.get("status") or {}).get("progress") or {}).get("step", 0))
