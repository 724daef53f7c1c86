"""A gang whose room is taken between its choice and its scheduling gives it back and is placed anew, for free."""

from __future__ import annotations

from e2e.stories.holder import holder
from e2e.stories.installation import RACK
from e2e.stories.pair import PAIR
from e2e.stories.story import Story
from stoker.operator.domain.placement.node_capacity import pinned_node
from testing.stories.manifests import claim, corpus, job

RUN = {
    **PAIR,
    "training.totalSteps": 20,
    "scheduling.topology": [{"key": RACK, "mode": "Required"}],
    "scheduling.gangTimeoutSeconds": 10,
}


def test_a_gang_whose_room_is_taken_before_it_is_scheduled_is_placed_anew(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"))
    with story.cluster.plane.without_scheduler():
        story.apply(job("late", RUN))
        story.wait_until(lambda: len(places(story, 0)) == 2 and None not in places(story, 0), "both pods placed")
        (taken,) = set(places(story, 0))
        assert taken is not None
        story.apply(holder("thief", taken, 4))

    story.wait_for_phase("TrainingJob", "late", "Completed")
    status = story.status("TrainingJob", "late")
    ended = next(attempt for attempt in status["attempts"] if attempt["number"] == 0)
    assert (ended["failure"]["cause"], ended["failure"]["action"]) == ("GangTimeout", "RetryFree")
    assert "not scheduled in 10 s" in ended["failure"]["detail"]
    assert status["attempt"]["number"] == 1
    assert (status.get("failuresWithoutProgress", 0), status.get("lostSteps", 0)) == (0, 0)
    assert set(places(story, 1)) == {"node-a", "node-b"} - {taken}
    assert story.get("Pod", "thief")["status"]["phase"] == "Running"


def places(story: Story, attempt: int) -> list[str | None]:
    """Return the node that the operator has chosen for each pod of an attempt."""
    return [pinned_node(pod) for pod in story.pods(job="late", attempt=str(attempt))]
