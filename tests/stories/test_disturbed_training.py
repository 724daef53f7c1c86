"""Training with failures: a rank killed, a whole pod killed.

Each time it goes on from the newest verified save, and has the losses of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from testing.stories.manifests import claim, corpus, job
from testing.stories.story_cluster import Object, StoryCluster

STEPS = 100_000
"""More steps than any machine computes before a kill, however late that comes."""
EVERY = 20
RUN = {"workers.ranksPerPod": 2, "training.totalSteps": STEPS, "checkpoint.intervalSteps": EVERY}


def test_a_killed_rank_and_a_killed_pod_cost_a_few_steps_and_change_no_loss(cluster: StoryCluster) -> None:
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), job("calm", RUN), job("hit", RUN))

    leader = attempt_with_save(cluster, number=0, step=EVERY)
    os.kill(rank_pid(leader, 1), signal.SIGKILL)
    first = ended_attempt(cluster, 0)
    assert (first["failure"]["cause"], first["failure"]["rank"], first["failure"]["exitCode"]) == ("RankKilled", 1, 73)
    assert first["failure"]["detail"] == "rank 1 was killed by SIGKILL"
    assert first["failure"]["action"] == "Retry"

    leader = attempt_with_save(cluster, number=1, step=4 * EVERY)
    os.killpg(main_pid(leader), signal.SIGKILL)
    second = ended_attempt(cluster, 1)
    assert (second["failure"]["cause"], second["failure"]["exitCode"]) == ("RankKilled", 137)

    attempt_with_save(cluster, number=2, step=5 * EVERY)
    status = cancelled(cluster, "hit")
    resumed = [second["resumedFrom"]["step"], status["attempt"]["resumedFrom"]["step"]]
    lost = [first["lastStep"] - resumed[0], second["lastStep"] - resumed[1]]
    assert resumed[0] >= EVERY
    assert resumed[1] >= 4 * EVERY
    assert [step % EVERY for step in resumed] == [0, 0]
    assert all(steps >= 0 for steps in lost)
    assert (status["restarts"], status["lostSteps"]) == (2, sum(lost))
    assert status["failuresWithoutProgress"] == 0
    assert len(cluster.events("TrainingJob", "hit")["RankKilled"]) == 2

    hit = losses(cluster, "hit")
    assert sorted(hit) == list(range(1, max(hit) + 1))
    cluster.wait_until(lambda: max(losses(cluster, "calm"), default=0) >= max(hit), "the other one as far")
    calm = cancelled(cluster, "calm")
    assert calm["restarts"] == 0
    parts = calm["attempt"]["startup"]
    assert parts.keys() >= {"start", "rendezvous", "load", "compile", "firstStep"}
    assert sum(parts.values()) > 0
    undisturbed = losses(cluster, "calm")
    assert {step: undisturbed[step] for step in hit} == hit


def cancelled(cluster: StoryCluster, name: str) -> Object:
    """Cancel a job; return its status after its last save is known as verified."""

    def ended(found: Object) -> bool:
        status = found.get("status") or {}
        newest = (status.get("newestVerifiedCheckpoint") or {}).get("step")
        return bool(status.get("phase") == "Cancelled" and newest == status["attempt"]["lastStep"])

    cluster.apply(job(name, {**RUN, "run.cancel": True}))
    status: Object = cluster.wait("TrainingJob", name, ended, "cancelled with a last save")["status"]
    return status


def attempt_with_save(cluster: StoryCluster, number: int, step: int) -> Object:
    """Return pod 0 of an attempt, once its log reports that the save of `step`, or of a later one, reads back."""

    def pod() -> Object | None:
        found = cluster.pods(job="hit", attempt=str(number), node_rank="0")
        return found[0] if found and (found[0].get("status") or {}).get("containerStatuses") else None

    def saved() -> bool:
        found = pod()
        text = cluster.log(found) if found else ""
        return any(int(save) >= step for save in re.findall(r"save step-(\d+)\S* committed, verified", text))

    cluster.wait_until(saved, f"step {step} saved by attempt {number}")
    leader = pod()
    assert leader is not None
    return leader


def ended_attempt(cluster: StoryCluster, number: int) -> Object:
    """Return the status of an attempt after a later one has started."""

    def ended(found: Object) -> bool:
        return bool((found.get("status") or {}).get("attempt", {}).get("number", 0) > number)

    found = cluster.wait("TrainingJob", "hit", ended, f"beyond attempt {number}")
    attempts: list[Object] = found["status"]["attempts"]
    return next(attempt for attempt in attempts if attempt["number"] == number)


def main_pid(pod: Object) -> int:
    """Return the pid of the agent, which leads the pod's process group."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))


def rank_pid(pod: Object, rank: int) -> int:
    agent = main_pid(pod)
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"rank {rank} does not run")


def losses(cluster: StoryCluster, name: str) -> dict[int, Any]:
    """Return losses by step from the log of the run; of a repeated step, the last one."""
    lines = (cluster.claim_folder("logs") / f"{name}.jsonl").read_text().splitlines(keepends=True)
    steps = [json.loads(line) for line in lines if line.endswith("\n")]  # of a running job the last may be half a line
    return {line["step"]: line["loss"] for line in steps if line["kind"] == "step"}
