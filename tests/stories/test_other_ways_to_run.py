"""The same job where pods share one address, and without any operator."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.checkpoint.store import CheckpointRoot
from testing.stories.alone import train_alone
from testing.stories.manifests import Manifest, claim, corpus, job
from tests.stories.conftest import NewCluster

ENDLESS = 100_000
"""More steps than any machine computes before it is interrupted, however late that comes."""
LONGEST_S = 600.0
"""Longest time of a run; a busy machine is slow."""


def test_two_pods_that_share_one_address_find_each_other_by_their_ports(new_cluster: NewCluster) -> None:
    cluster = new_cluster(addresses="ports")
    two_pods = {"workers.replicas": 2, "training.totalSteps": 40}
    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), job("apart", two_pods))

    done = cluster.wait_for_phase("TrainingJob", "apart", "Completed", "Failed")["status"]

    assert (done["phase"], done["restarts"], done["newestVerifiedCheckpoint"]["step"]) == ("Completed", 0, 40)
    assert {pod["status"]["podIP"] for pod in cluster.pods(job="apart")} == {"127.0.0.1"}
    saves = cluster.all("Checkpoint", job="apart")
    assert [found["status"]["layout"]["worldSize"] for found in saves] == [2, 2]


def test_a_job_cut_over_its_tensor_ranks_trains_and_one_that_does_not_fit_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cut = {"workers.ranksPerPod": 2, "parallelism": {"tensor": 2, "sequenceParallel": True}, "training.totalSteps": 20}
    uneven = cut | {"workers.ranksPerPod": 4, "parallelism": {"tensor": 4}}
    refused = cluster.try_apply(job("uneven", uneven))[0]
    assert "numKvHeads 2 is not a multiple of tensor 4" in refused["error"]

    cluster.apply(corpus(), claim("checkpoints"), claim("logs"), job("cut", cut))
    done = cluster.wait_for_phase("TrainingJob", "cut", "Completed", "Failed")["status"]

    assert (done["phase"], done["restarts"], done["newestVerifiedCheckpoint"]["step"]) == ("Completed", 0, 20)
    layout = cluster.all("Checkpoint", job="cut")[0]["status"]["layout"]
    assert (layout["worldSize"], layout["dataParallel"], layout["tensor"]) == (2, 1, 2)


def test_a_run_without_an_operator_saves_on_ctrl_c_and_the_next_one_ends_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    calm.mkdir()
    hit.mkdir()
    with train_alone(hit, corpus(), solo(ENDLESS)) as first:
        lines = lines_until(first, r"step 40 .*committed, verified")
        os.killpg(first.pid, signal.SIGINT)  # what a terminal does with Ctrl-C
        rest, _ = first.communicate(timeout=LONGEST_S)
    assert first.returncode == 78, lines + rest
    saved = max(int(path.name[5:13]) for path in saves(hit))
    assert f"step {saved}  save step-{saved:08}" in (lines + rest).replace("\r", "\n")
    assert 40 <= saved < ENDLESS

    end = saved + 60
    with train_alone(calm, corpus(), solo(end)) as undisturbed, train_alone(hit, corpus(), solo(end)) as second:
        output, _ = second.communicate(timeout=LONGEST_S)
        other, _ = undisturbed.communicate(timeout=LONGEST_S)
    assert (second.returncode, undisturbed.returncode) == (0, 0), output + other
    assert losses(hit) == losses(calm)
    assert list(losses(calm)) == list(range(1, end + 1))
    assert [path.name[:13] for path in saves(calm)][-1] == f"step-{end:08}"
    assert len({path.name for path in saves(hit)}) == len({path.name[:13] for path in saves(hit)})


def solo(steps: int) -> Manifest:
    """A job of two ranks whose learning rate does not depend on the number of its steps."""
    layout = {"workers.ranksPerPod": 2, "training.totalSteps": steps, "checkpoint.intervalSteps": 40}
    return job("solo", {**layout, "optimization.schedule": "constant"})


def test_a_checkpoint_that_is_served_is_not_given_up(taught: Path, tmp_path: Path) -> None:
    root = CheckpointRoot(shutil.copytree(taught, tmp_path / "root"))
    newest, served = root.committed()
    with serve(served.path) as server:
        lines_until(server, "Serving ")
        kept = root.retain(1, lambda name: True)
        server.terminate()
        rest, _ = server.communicate(timeout=LONGEST_S)
    assert (kept.deleted, kept.problems) == ((), (f"{served.folder_name}: {served.path} is being read",)), rest
    assert root.retain(1, lambda name: True).deleted == (served.folder_name,)
    assert root.committed() == [newest]


def serve(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stoker.cli.main", "serve", str(folder), "--port", "0", "--num-blocks", "8"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_until(run: subprocess.Popen[str], pattern: str) -> str:
    """Return the output up to the first line that matches."""
    assert run.stdout is not None
    text, end = "", time.monotonic() + LONGEST_S
    for line in run.stdout:
        text += line
        if re.search(pattern, line):
            return text
        assert time.monotonic() < end, text
    raise AssertionError(text)


def saves(folder: Path) -> list[Path]:
    return sorted((folder / "storage" / "checkpoints" / "solo").glob("step-*"))


def losses(folder: Path) -> dict[int, float]:
    """Return losses by step, of all runs in this folder."""
    lines = (folder / "storage" / "logs" / "solo.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in steps if line["kind"] == "step"}
