"""The time from a killed trainer pod to the next attempt, on real nodes.

The nodes have containerd and kubelet, the installed chart and the images of this checkout.

A job of two pods trains on the CPU. Every process of one pod's container gets SIGKILL at once, or the pod object is
deleted by force, again and again; before each harm the job has made progress (a newer verified save), so that each
failure is the first in a row.

  seen      the job's status names the end of the attempt
  created   all pods of the next attempt exist
  running   the job's status is Running again, resumed from the newest verified save

The kubelet reports a dead container within about a second, and the operator waits one second before a first retry:
both are in the figures.

    python -m bench.cluster.recovery                         # starts and stops a cluster of its own (root, minutes)
    STOKER_E2E_CLUSTER=NAME python -m bench.cluster.recovery # on one that the stories left running

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.charts.helm import NAMESPACE
from e2e.charts.release import Releases
from e2e.cluster.cluster import Cluster
from e2e.images.build import build_images
from e2e.stories.conftest import KEPT_VARIABLE
from e2e.stories.installation import NODES, install
from e2e.stories.story import Object, Story
from testing.stories.manifests import claim, corpus, job

GOAL_S = 3.0
NAME = "recovery"
EVERY = 10
RUN = {
    "workers.replicas": 2,
    "runtime.device": "cpu",
    "training.totalSteps": 100_000,
    "checkpoint.intervalSteps": EVERY,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of harm")
    options = parser.parse_args()
    with installed() as cluster:
        story = Story(cluster, "bench-recovery")
        story.begin()
        try:
            story.apply(corpus(), claim("checkpoints"), claim("logs"), job(NAME, RUN))
            figures = {
                "killed": [recover(story, story.kill) for _ in range(options.rounds)],
                "deleted": [recover(story, lambda pod: delete(story, pod)) for _ in range(options.rounds)],
            }
            story.end()
        finally:
            story.close()
    summary = {
        harm: {what: spread([one[what] for one in found]) for what in found[0]} for harm, found in figures.items()
    }
    print(json.dumps({"bench": "kube_recovery", **summary, "goal_created_s": GOAL_S, "load": os.getloadavg()[0]}))


@contextmanager
def installed() -> Iterator[Cluster]:
    """A cluster with the product; an existing one stays as it is."""
    kept = os.environ.get(KEPT_VARIABLE)
    cluster = Cluster(kept or "recovery", NODES, detached=bool(kept))
    if kept and cluster.running:
        yield cluster
        return
    build_images()
    cluster.up()
    try:
        if not Releases(cluster.kubeconfig).kubectl("get", "namespaces", NAMESPACE, "--ignore-not-found", "-o", "name"):
            install(cluster)
        yield cluster
    finally:
        if not kept:
            cluster.down()


def recover(story: Story, harm: Callable[[Object], None]) -> dict[str, float]:
    """Return the seconds from one disturbance to each stage of the recovery."""
    attempt = progressed(story)
    victim = story.pods(job=NAME, attempt=str(attempt))[1]
    begin = time.monotonic()
    harm(victim)
    stages: dict[str, Callable[[], Any]] = {
        "seen_s": lambda: number(story) > attempt or (state(story).get("attempt") or {}).get("endedAt"),
        "created_s": lambda: len(story.pods(job=NAME, attempt=str(attempt + 1))) == 2,
        "running_s": lambda: number(story) > attempt and state(story).get("phase") == "Running",
    }
    found = {what: round(until(reached) - begin, 2) for what, reached in stages.items()}
    print(f"attempt {attempt + 1}: {found}", flush=True)
    return found


def progressed(story: Story) -> int:
    """Wait until the running attempt has made a verified save of its own; return its number."""

    def saved(found: Object) -> bool:
        status = found.get("status") or {}
        current, newest = status.get("attempt") or {}, status.get("newestVerifiedCheckpoint") or {}
        return status.get("phase") == "Running" and newest.get("step", 0) > (current.get("firstStep") or 0)

    story.wait("TrainingJob", NAME, saved, "a save of the attempt", 180)
    return number(story)


def state(story: Story) -> Object:
    return story.status("TrainingJob", NAME)


def number(story: Story) -> int:
    return int((state(story).get("attempt") or {}).get("number", 0))


def delete(story: Story, pod: Object) -> None:
    """Delete the object at once, as when a node is removed by force."""
    story.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")


def until(reached: Callable[[], Any], timeout_s: float = 180) -> float:
    """Wait until the condition holds and return that moment.

    Raises:
        SystemExit: it never was.
    """
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("the job does not recover")
        time.sleep(0.05)
    return time.monotonic()


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "max": max(seconds)}


if __name__ == "__main__":
    main()
