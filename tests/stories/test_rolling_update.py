"""A deployment changes checkpoint and size while clients stream: no request fails, no stream is cut."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from testing.stories.load import Load
from testing.stories.manifests import EXACT, Manifest, adopted, claim, deployment
from testing.stories.story_cluster import Object, StoryCluster

ENOUGH = 8
"""Answers to wait for before the next change."""


def teller(checkpoint: str, replicas: int = 1) -> Manifest:
    manifest = deployment("teller", {"checkpointRef": {"name": checkpoint}, "dtype": EXACT})
    manifest["spec"]["pools"][0]["replicas"] = replicas
    return manifest


def test_streams_go_on_through_a_rolling_update_and_through_a_change_of_size(
    cluster: StoryCluster, taught: Path
) -> None:
    older, newer = sorted(path.name for path in taught.glob("step-*"))
    cluster.apply(claim("archive", taught.parent), adopted("older", "archive", "taught", older))
    cluster.apply(adopted("newer", "archive", "taught", newer), teller("older"))
    cluster.wait_for_phase("InferenceDeployment", "teller", "Serving")
    prints = [f"fp_{cluster.status('Checkpoint', name)['digest'][:10]}" for name in ("older", "newer")]

    with Load(cluster.ready_url("teller"), "teller") as load:
        more_answers(cluster, load)
        assert load.fingerprints == prints[:1]

        cluster.apply(teller("newer"))
        cluster.wait("InferenceDeployment", "teller", lambda found: serves(found, "newer"), "moved to newer")
        cluster.wait_until(lambda: len(engines(cluster)) == 1, "the old engine gone")
        more_answers(cluster, load)
        assert load.fingerprints == prints

        cluster.apply(teller("newer", replicas=2))
        cluster.wait("InferenceDeployment", "teller", lambda found: serves(found, "newer", "2/2"), "grown")
        more_answers(cluster, load)
        cluster.apply(teller("newer"))
        cluster.wait_until(lambda: len(engines(cluster)) == 1, "shrunk")
        cluster.wait("InferenceDeployment", "teller", lambda found: serves(found, "newer", "1/1"), "at rest")
        more_answers(cluster, load)

    assert load.failures == []
    same = {(answer.fingerprint, answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == 2 * len(set(load.lengths)), "greedy answers depend on nothing but the model"
    assert cluster.status("Checkpoint", "newer")["inUseBy"] == [{"kind": "InferenceDeployment", "name": "teller"}]
    cluster.wait_until(lambda: not cluster.status("Checkpoint", "older").get("inUseBy"), "the older one free")
    events = cluster.events("InferenceDeployment", "teller")["RevisionChosen"]
    assert [any(f"Checkpoint {name}" in text for text in events) for name in ("older", "newer")] == [True, True]

    cluster.delete("InferenceDeployment", "teller")
    cluster.wait_until(lambda: not engines(cluster) and not cluster.pods(role="router"), "every pod gone")
    for kind in ("InferenceDeployment", "EnginePool", "Service"):
        cluster.wait_until(partial(no_more, cluster, kind), f"no {kind} left")


def test_a_deployment_with_a_refused_edit_replaces_what_is_killed_and_answers_on(
    cluster: StoryCluster, taught: Path
) -> None:
    (newest, *_) = sorted((path.name for path in taught.glob("step-*")), reverse=True)
    cluster.apply(claim("archive", taught.parent), adopted("newer", "archive", "taught", newest), teller("newer"))
    cluster.wait("InferenceDeployment", "teller", lambda found: serves(found, "newer"), "serving")
    refused = teller("newer", replicas=2)
    refused["spec"]["engine"]["attention"] = "cudnn"
    cluster.apply(refused)
    cluster.wait_until(lambda: cluster.condition("InferenceDeployment", "teller", "EditRefused"), "refused")
    text = cluster.condition("InferenceDeployment", "teller", "EditRefused")["message"]
    assert "spec.engine.attention cudnn" in text

    (engine,), (router,) = engines(cluster), cluster.pods(role="router")
    for pod in (engine, router):
        os.killpg(main_pid(pod), signal.SIGKILL)
    cluster.wait_until(lambda: uids(running(cluster, "router")) - uids([router]), "another router")
    cluster.wait_until(lambda: uids(running(cluster, "engine")) - uids([engine]), "another engine")
    cluster.wait("InferenceDeployment", "teller", lambda found: serves(found, "newer"), "serving again")
    with Load(cluster.ready_url("teller"), "teller") as load:
        more_answers(cluster, load)
    assert load.failures == []
    assert cluster.condition("InferenceDeployment", "teller", "EditRefused")["status"] == "True"
    cluster.delete("InferenceDeployment", "teller")


def no_more(cluster: StoryCluster, kind: str) -> bool:
    return not cluster.all(kind)


def running(cluster: StoryCluster, role: str) -> list[Object]:
    return [pod for pod in cluster.pods(role=role) if pod["status"]["phase"] == "Running"]


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def main_pid(pod: Object) -> int:
    """Return the pid of the program, which leads the pod's process group."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))


def more_answers(cluster: StoryCluster, load: Load) -> None:
    wanted = len(load.answers) + ENOUGH
    cluster.wait_until(lambda: load.failures or len(load.answers) >= wanted, f"{ENOUGH} more answers")


def serves(found: Object, checkpoint: str, ready: str = "1/1") -> bool:
    status = found.get("status") or {}
    current = (status.get("currentCheckpoint") or {}).get("name")
    return (status.get("phase"), current, status.get("ready")) == ("Serving", checkpoint, ready)


def engines(cluster: StoryCluster) -> list[Object]:
    return cluster.pods(role="engine")
