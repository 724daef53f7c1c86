"""The whole trainer: agent, real Gloo ranks, its own tokenizer; killed, resumed, saved on request, interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.pod.causes import Cause
from stoker.pod.termination_message import TerminationMessage, parse_termination_message

TOTAL_STEPS = 100
LONGEST_S = 600.0
"""Longest time of a run or of an answer; a busy machine is slow."""
TOPICS = ("the fire", "the boiler", "a ship", "the harbour", "coal", "steam", "the captain", "a whistle")


class Run:
    """One folder in which the trainer is started, perhaps several times."""

    def __init__(self, folder: Path, corpus: Path, ranks: int, parallelism: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.socket = folder / "control"
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(self._config(corpus, ranks) | {"parallelism": parallelism or {}})
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "stoker.trainer", "--config", str(self.folder / "config.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def losses(self) -> dict[int, float]:
        """Return losses by step; of a repeated step, the last one."""
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}

    @property
    def termination_message(self) -> TerminationMessage:
        message = parse_termination_message((self.folder / "termination-log").read_text())
        assert message is not None
        return message

    def client(self) -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://agent", timeout=LONGEST_S
        )

    def _config(self, corpus: Path, ranks: int) -> dict[str, Any]:
        return {
            "job": {"name": "end-to-end", "uid": "uid", "writer": "0a1b2c3d"},
            "listen": {"port": 0, "control_socket": str(self.socket)},
            "gang": {"ranks_per_node": ranks},
            "termination_log": str(self.folder / "termination-log"),
            "work_dir": str(self.folder / "work"),
            "device": "cpu",
            "model": {
                "architecture": "llama",
                "vocab_size": 320,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 8,
            },
            "training": {
                "total_steps": TOTAL_STEPS,
                "global_batch_size": 4,
                "micro_batch_size": 1,
                "sequence_length": 32,
                "deterministic": "AnyDataParallel",
            },
            "memory": {"precision": "fp32"},
            "optimization": {"learning_rate": 0.01, "warmup_steps": 5},
            "data": {
                "sources": [{"name": "tales", "path": str(corpus)}],
                "tokenizer": {"vocab_size": 320},
                "validation": {"fraction": 0.1, "every_steps": 20, "max_sequences": 4},
            },
            "checkpoint": {"root": str(self.folder / "checkpoints"), "interval_steps": 10, "max_to_keep": 3},
            "logging": {"jsonl": str(self.folder / "log.jsonl")},
        }


def wait_for_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """Return the lines up to the first one that holds `text`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came:\n{''.join(lines)}")


def wait_for_request(client: httpx.Client, name: str) -> str:
    """Return the folder that answers a request for a save."""
    until_s = time.monotonic() + LONGEST_S
    while time.monotonic() < until_s:
        request = client.get("/status").json()["requests"][name]
        if request["state"] != "Pending":
            assert request["state"] == "Done", request
            return str(request["folder"])
        time.sleep(0.01)
    raise AssertionError(f"request {name} was never answered")


def pid_of_rank(agent: subprocess.Popen[str], rank: int) -> int:
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"rank {rank} does not run")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return sixty little tales."""
    chance = random.Random(0)
    folder = tmp_path_factory.mktemp("corpus")
    tales = [
        " ".join(f"Then {chance.choice(TOPICS)} met {chance.choice(TOPICS)}." for _ in range(chance.randint(2, 9)))
        for _ in range(60)
    ]
    (folder / "tales.jsonl").write_text("\n".join(json.dumps({"text": tale}) for tale in tales))
    return folder / "tales.jsonl"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The same run on one rank, from beginning to end."""
    run = Run(tmp_path_factory.mktemp("alone") / "run", corpus, ranks=1)
    process = run.start()
    output, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, output
    return run


def test_a_run_that_ends_well_leaves_verified_checkpoints_and_learns(uninterrupted: Run) -> None:
    message = uninterrupted.termination_message
    assert (message.cause, message.step) == (Cause.COMPLETED, TOTAL_STEPS)
    assert [save.step for save in message.saves if save.verified] == [30, 40, 50, 60, 70, 80, 90, 100]
    assert len(list((uninterrupted.folder / "checkpoints").glob("step-*"))) == 3
    assert list(uninterrupted.losses) == list(range(1, TOTAL_STEPS + 1))
    assert uninterrupted.losses[TOTAL_STEPS] < 0.6 * uninterrupted.losses[1]


def test_killed_resumed_interrupted_and_resumed_the_losses_are_those_of_one_uninterrupted_rank(
    tmp_path: Path, corpus: Path, uninterrupted: Run
) -> None:
    run = Run(tmp_path / "run", corpus, ranks=2)

    agent = run.start()
    wait_for_line(agent, "step 10  save step-00000010.0a1b2c3d committed, verified")
    os.kill(pid_of_rank(agent, 1), signal.SIGKILL)
    agent.communicate(timeout=LONGEST_S)
    assert (agent.returncode, run.termination_message.cause, run.termination_message.rank) == (73, Cause.RANK_KILLED, 1)
    assert run.termination_message.detail == "rank 1 was killed by SIGKILL"

    agent = run.start()
    first = next(line for line in wait_for_line(agent, "tokens/s") if "tokens/s" in line)
    assert int(first.split("/")[0].removeprefix("step ")) % 10 == 1
    with run.client() as client:
        assert client.post("/checkpoint", json={"id": "by-hand"}).status_code == 202
        folder = wait_for_request(client, "by-hand")
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=LONGEST_S)
    assert (agent.returncode, run.termination_message.cause) == (78, Cause.INTERRUPTED)
    assert [
        save.verified for save in run.termination_message.saves if save.id == "by-hand" and save.folder == folder
    ] == [True]
    assert (run.termination_message.saves[-1].step, run.termination_message.saves[-1].verified) == (
        run.termination_message.step,
        True,
    )
    interrupted_at = run.termination_message.step
    assert interrupted_at is not None

    agent = run.start()
    lines = wait_for_line(agent, "tokens/s")
    assert lines[-1].startswith(f"step {interrupted_at + 1}/")
    agent.communicate(timeout=LONGEST_S)
    assert (agent.returncode, run.termination_message.cause) == (0, Cause.COMPLETED)
    assert run.losses == uninterrupted.losses


def test_a_tensor_parallel_run_that_was_killed_resumes_bitwise(tmp_path: Path, corpus: Path) -> None:
    cut = {"tensor": 2, "sequence_parallel": True}
    calm, hit = Run(tmp_path / "calm", corpus, 2, cut), Run(tmp_path / "hit", corpus, 2, cut)
    undisturbed = calm.start()
    output, _ = undisturbed.communicate(timeout=LONGEST_S)
    assert undisturbed.returncode == 0, output

    agent = hit.start()
    wait_for_line(agent, "step 10  save step-00000010.0a1b2c3d committed, verified")
    os.kill(pid_of_rank(agent, random.randrange(2)), signal.SIGKILL)
    agent.communicate(timeout=LONGEST_S)
    assert (agent.returncode, hit.termination_message.cause) == (73, Cause.RANK_KILLED)

    agent = hit.start()
    output, _ = agent.communicate(timeout=LONGEST_S)
    assert agent.returncode == 0, output
    assert hit.losses == calm.losses
