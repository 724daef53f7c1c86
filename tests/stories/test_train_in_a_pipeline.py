"""A job whose layers lie on two ranks trains from its manifest, and its Checkpoint names the layout."""

from __future__ import annotations

from testing.stories.manifests import claim, corpus, job
from testing.stories.story_cluster import StoryCluster

STEPS = 12


def test_a_job_trains_in_a_zero_bubble_pipeline_of_two_ranks(cluster: StoryCluster) -> None:
    layout = {"pipeline": 2, "pipelineSchedule": "ZeroBubble"}
    training = job(
        "piped",
        {
            "workers.ranksPerPod": 2,
            "parallelism": layout,
            "training.totalSteps": STEPS,
            "checkpoint.intervalSteps": STEPS,
        },
    )
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), training)

    cluster.wait_for_phase("TrainingJob", "piped", "Completed")

    status = cluster.status("TrainingJob", "piped")
    assert (status["progress"]["step"], status["worldSize"], status["dataParallel"]) == (STEPS, 2, 1)
    (saved,) = cluster.all("Checkpoint", job="piped")
    assert saved["status"]["phase"] == "Complete"
    assert saved["status"]["layout"]["pipeline"] == 2
