"""The example of a replica over two nodes: its pods wait together, start together in one rack, and answer as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import yaml

from e2e.stories.holder import holder
from e2e.stories.installation import RACK
from e2e.stories.story import Object, Story
from testing.stories.manifests import EXACT, Manifest, claim, corpus, deployment, job

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-multi-node" / "serve.yaml"
TAUGHT = {"training.totalSteps": 10, "checkpoint.intervalSteps": 10}


def test_a_replica_of_two_pods_waits_whole_and_is_placed_whole(story: Story) -> None:
    story.apply(corpus(), claim("checkpoints"), claim("logs"), claim("models"), job("taught", TAUGHT))
    story.apply(holder("one", "node-a", 1), holder("other", "node-b", 1))
    manifest = example()
    name = manifest["metadata"]["name"]
    story.wait_for_phase("TrainingJob", "taught", "Completed")
    (saved,) = story.folder("checkpoints").glob("*/step-*")
    shutil.copytree(saved, story.folder("models") / "llama-405b")
    story.apply(manifest)

    missing = f"no {RACK} has room for the 2 pods of a tensor group; the largest, rack-1, has room for 1"
    story.wait("InferenceDeployment", name, lambda found: missing in message(found), "waiting for room in one rack")
    pods = story.pods(role="engine")
    assert [pod["spec"].get("nodeName") for pod in pods] == [None, None], "not half a replica is bound"
    assert [pod["spec"]["schedulingGates"] for pod in pods] == [[{"name": "stoker.dev/placement"}]] * 2

    story.delete("Pod", "other")

    story.wait_for_phase("InferenceDeployment", name, "Serving")
    placed = story.pods(role="engine")
    assert [pod["metadata"]["uid"] for pod in placed] == [pod["metadata"]["uid"] for pod in pods]
    assert [pod["spec"]["nodeName"] for pod in placed] == ["node-b", "node-b"]
    assert story.status("InferenceDeployment", name)["ready"] == "1/1"
    listed = httpx.get(f"http://{placed[0]['status']['podIP']}:8000/status", timeout=240).json()["ranks"]
    assert [rank["rank"] for rank in listed] == [0, 1]
    body = {"model": "llama-405b", "prompt": "Then coal met", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{story.url(name)}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text


def example() -> Manifest:
    """Return the example with engines of this machine's size, one tensor rank in each of two pods, in one rack."""
    manifest: Manifest = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    spec = manifest["spec"]
    small = deployment("small", {})["spec"]
    (pool,) = spec["pools"]
    for field in ("resources", "tolerations"):
        del pool[field]
    (level,) = pool["scheduling"]["topology"]
    level["key"] = RACK
    pool |= {"gpusPerPod": 2, "ranksPerPod": 1, "parallelism": {"tensor": pool["podsPerReplica"]}}
    pool["gracePeriodSeconds"] = 20
    spec["model"]["dtype"] = EXACT
    spec["engine"] = {**small["engine"], "device": "cpu"}
    spec["router"] = small["router"]
    return manifest


def message(found: Object) -> str:
    return str((found.get("status") or {}).get("message") or "")
