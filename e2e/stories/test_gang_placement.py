"""Gangs and topology: two jobs that each need all GPUs run one after the other, and a rack holds a gang together."""

from __future__ import annotations

from typing import Any

from e2e.stories.installation import RACK
from e2e.stories.story import Story
from testing.stories.manifests import claim, corpus, job


def gang(gpus: int, steps: int, **more: Any) -> dict[str, Any]:
    """A job of two pods with `gpus` GPUs each; its ranks run on the CPU."""
    return {
        "workers.replicas": 2,
        "workers.gpusPerPod": gpus,
        "workers.ranksPerPod": 1,
        "runtime.device": "cpu",
        "training.totalSteps": steps,
        **more,
    }


def test_gangs_get_their_nodes_at_once_and_racks_hold_them_together(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), job("first", gang(4, 4000)))
    story.wait_for_phase("TrainingJob", "first", "Running")
    assert {pod["spec"]["nodeName"] for pod in story.pods(job="first")} == {"node-a", "node-b"}

    story.apply(job("second", gang(4, 40)))
    waiting = story.wait(
        "TrainingJob",
        "second",
        lambda found: "WaitingForGPUs: 0 of 2 pods fit" in str((found.get("status") or {}).get("message")),
        "waiting for the GPUs of the first",
    )
    assert "nvidia.com/gpu: 0 free, 8 needed" in waiting["status"]["message"]
    pods = story.pods(job="second")
    assert [pod["spec"].get("nodeName") for pod in pods] == [None, None], "not half a gang is bound"

    story.patch("TrainingJob", "first", {"run": {"cancel": True}})
    story.wait_for_phase("TrainingJob", "second", "Completed")

    levels = [{"key": "kubernetes.io/hostname"}, {"key": RACK}, {"key": RACK, "mode": "Required"}]
    story.apply(job("together", gang(2, 40, **{"scheduling.topology": levels})))
    story.wait_for_phase("TrainingJob", "together", "Completed")
    assert len({pod["spec"]["nodeName"] for pod in story.pods(job="together")}) == 1

    story.apply(job("apart", gang(3, 40, **{"scheduling.topology": levels})))
    story.wait(
        "TrainingJob",
        "apart",
        lambda found: f"no {RACK} has room for the 2 pods of a gang" in str((found.get("status") or {}).get("message")),
        "no rack is large enough",
    )
