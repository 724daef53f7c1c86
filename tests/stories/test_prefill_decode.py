"""The example of prefill and decode pools on an embedded cluster: engines pair up, and no answer is lost."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from functools import partial
from pathlib import Path

from testing.stories.load import Load
from testing.stories.manifests import Manifest, claim
from testing.stories.served_examples import in_pairs
from testing.stories.split_probe import is_split, paired
from testing.stories.story_cluster import Object, StoryCluster

NAME = "long-context"
PROMPT = "Then the boiler met the captain. Then the captain met coal. Then steam met a whistle."


def example() -> Manifest:
    return in_pairs({"uri": "pvc://models/smollm2-135m-instruct"})


def test_engines_of_both_pools_pair_up_and_either_serves_alone(
    cluster: StoryCluster, taught: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(sorted(taught.glob("step-*"))[-1], models / "smollm2-135m-instruct")
    cluster.apply(claim("models", models), example())
    cluster.wait("InferenceDeployment", NAME, paired, "serving in pairs")
    prefill, decode = engine(cluster, "prefill"), engine(cluster, "decode")
    tries = itertools.count()
    cluster.wait_until(
        lambda: is_split(prefill, decode, NAME, f"{PROMPT} {next(tries)}"), "a request that both compute"
    )

    with Load(cluster.ready_url(NAME), NAME, lengths=(16, 24, 100)) as load:
        cluster.more_answers(load, 6)
        killed_is_told(cluster, prefill, "NoPrefillEngine")
        cluster.more_answers(load, 6)
        cluster.wait("InferenceDeployment", NAME, paired, "in pairs again")
        killed_is_told(cluster, decode, "NoDecodeEngine")
        cluster.more_answers(load, 6)
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"

    cluster.delete("InferenceDeployment", NAME)
    cluster.wait_until(lambda: not cluster.all("Secret") and not cluster.pods(role="engine"), "pools and key gone")


def test_a_prefill_engine_over_two_pods_computes_prompts_for_two_data_ranks_in_one(
    cluster: StoryCluster, taught: Path, tmp_path: Path
) -> None:
    """Two stages of a pipeline, each in a pod of its own; on CPUs blocks are repacked for a data rank, and back."""
    models = tmp_path / "models"
    shutil.copytree(sorted(taught.glob("step-*"))[-1], models / "smollm2-135m-instruct")
    manifest = example()
    manifest["spec"]["pools"][0] |= {"podsPerReplica": 2, "parallelism": {"pipeline": 2}}
    manifest["spec"]["pools"][1] |= {"ranksPerPod": 2, "parallelism": {"data": 2}}
    cluster.apply(claim("models", models), manifest)
    cluster.wait("InferenceDeployment", NAME, paired, "serving in pairs")
    prefill, member = sorted(cluster.pods(role="engine", pool="prefill"), key=lambda pod: str(pod["metadata"]["name"]))
    assert str(member["metadata"]["name"]).startswith(prefill["metadata"]["name"])
    decode = engine(cluster, "decode")
    tries = itertools.count()
    for helper, answering in ((prefill, decode), (decode, prefill)):
        cluster.wait_until(
            lambda helper=helper, answering=answering: is_split(helper, answering, NAME, f"{next(tries)} {PROMPT}"),  # type: ignore[misc]
            "a request that both compute",
        )
    with Load(cluster.ready_url(NAME), NAME, lengths=(16, 24)) as load:
        cluster.more_answers(load, 4)
    assert load.failures == []


def test_streams_go_on_while_both_pools_move_to_a_revision_and_change_their_size(
    cluster: StoryCluster, taught: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(sorted(taught.glob("step-*"))[-1], models / "smollm2-135m-instruct")
    cluster.apply(claim("models", models), example())
    first = cluster.wait("InferenceDeployment", NAME, paired, "serving in pairs")["status"]["currentRevision"]

    with Load(cluster.ready_url(NAME), NAME, lengths=(16, 24, 100)) as load:
        cluster.more_answers(load, 6)
        cluster.apply(changed(1))
        cluster.wait(
            "InferenceDeployment", NAME, lambda found: paired(found) and moved(found, first), "in pairs, moved"
        )
        cluster.wait_until(lambda: len(cluster.pods(role="engine")) == 2, "the old engines gone")
        cluster.more_answers(load, 6)
        for replicas in (2, 1):
            cluster.apply(changed(replicas))
            cluster.wait(
                "InferenceDeployment", NAME, partial(serves, ready=f"{2 * replicas}/{2 * replicas}"), "resized"
            )
            cluster.wait_until(partial(has_engines, cluster, 2 * replicas), "as many engines as replicas")
            cluster.more_answers(load, 6)
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"
    cluster.delete("InferenceDeployment", NAME)


def changed(replicas: int) -> Manifest:
    """The example with another limit of its engines, which makes a new revision of both pools."""
    manifest = example()
    manifest["spec"]["engine"]["scheduler"]["maxRequests"] = 12
    for pool in manifest["spec"]["pools"]:
        pool["replicas"] = replicas
    return manifest


def has_engines(cluster: StoryCluster, count: int) -> bool:
    return len(cluster.pods(role="engine")) == count


def moved(found: Object, first: str) -> bool:
    status = found["status"]
    return status["currentRevision"] != first and all(pool["updated"] == pool["replicas"] for pool in status["pools"])


def serves(found: Object, ready: str) -> bool:
    status = found.get("status") or {}
    return (status.get("phase"), status.get("ready")) == ("Serving", ready)


def engine(cluster: StoryCluster, pool: str) -> Object:
    (pod,) = cluster.pods(role="engine", pool=pool)
    return pod


def killed_is_told(cluster: StoryCluster, pod: Object, reason: str) -> None:
    """Kill an engine, and see the condition say so, if only until another one is ready."""
    since = cluster.get("InferenceDeployment", NAME)["metadata"]["resourceVersion"]
    os.killpg(main_pid(pod), signal.SIGKILL)
    cluster.wait_for_passing("InferenceDeployment", NAME, since, lambda found: told(found) == reason, reason)


def told(found: Object) -> str | None:
    conditions = found["status"].get("conditions") or ()
    return next((each["reason"] for each in conditions if each["type"] == "Disaggregated"), None)


def main_pid(pod: Object) -> int:
    """Return the pid of the program, which leads the pod's process group."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))
