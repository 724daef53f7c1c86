"""A rank as a process: the command line, causes and exit codes, and kill -9 with resume."""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.checkpoint.errors import CheckpointLocked, StorageUnusable
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.config_file import ConfigError, load
from stoker.pod.writer import writer_of
from stoker.trainer.errors import DataError, NonFinite, OtherModel, StorageFailed
from stoker.trainer.protocol.channel import AgentChannel, channel_pair
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import EndEvent, Event, SaveEvent, StepEvent, StopCommand
from stoker.trainer.rank.main import cause_of, hold_root, main
from stoker.trainer.rank.rank_info import find_rank_info

MODEL = {
    "architecture": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
STEPS = 12


NO_CORPUS = {"sources": [{"name": "a", "path": "/nowhere"}]}


def write_config(folder: Path, ranks: int = 1, **changes: Any) -> Path:
    """Write the configuration of a run on real text with a tokenizer of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder.parent / "corpus.jsonl"
    if not text.exists():
        lines = [json.dumps({"text": f"{i} and {i} are {2 * i}; {i} times {i} is {i * i}."}) for i in range(200)]
        text.write_text("\n".join(lines))
    fields: dict[str, Any] = {
        "job": {"name": "run", "uid": "u", "writer": "0a1b2c3d"},
        "gang": {"ranks_per_node": ranks},
        "termination_log": str(folder / "log"),
        "work_dir": str(folder.parent / "work"),
        "device": "cpu",
        "model": MODEL,
        "training": {
            "total_steps": STEPS,
            "global_batch_size": 4,
            "sequence_length": 32,
            "deterministic": "AnyDataParallel",
        },
        "memory": {"precision": "fp32"},
        "data": {"sources": [{"name": "a", "path": str(text)}], "tokenizer": {"kind": "train", "vocab_size": 300}},
        "checkpoint": {"root": str(folder / "root"), "interval_steps": 3},
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


@dataclass
class Ranks:
    """A minimal agent: starts ranks and receives their events."""

    config: Path
    size: int
    events: dict[int, list[Event]] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ends: list[AgentChannel] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            for rank in range(self.size):
                self._start(rank, listener)
        return self

    def _start(self, rank: int, listener: socket.socket) -> None:
        end, theirs = channel_pair()
        command = [
            sys.executable,
            "-m",
            "stoker.trainer.rank",
            "--config",
            str(self.config),
            "--channel-fd",
            str(theirs.fileno()),
        ]
        fds = [theirs.fileno()]
        if rank == 0:
            command += ["--master-listen-fd", str(listener.fileno())]
            fds.append(listener.fileno())
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": self.size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": listener.getsockname()[1],
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in numbers.items()}}
        with theirs:
            self.processes.append(subprocess.Popen(command, pass_fds=fds, env=environment))
        self.ends.append(end)
        self.events[rank] = []

    def listen(self) -> Iterator[tuple[int, Event]]:
        """Receive the events of all ranks until all have ended."""
        with selectors.DefaultSelector() as selector:
            for rank, end in enumerate(self.ends):
                selector.register(end, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    for event in self.ends[key.data].receive():
                        self.events[key.data].append(event)
                        yield key.data, event
                    if self.ends[key.data].closed:
                        selector.unregister(self.ends[key.data])

    def wait(self) -> list[int]:
        """Return the exit codes, after every rank has ended by itself."""
        for _ in self.listen():
            pass
        return [process.wait() for process in self.processes]

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for end in self.ends:
            end.close()

    def losses(self, rank: int = 0) -> dict[int, tuple[float, float | None]]:
        return {
            event.step: (event.loss, event.grad_norm) for event in self.events[rank] if isinstance(event, StepEvent)
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[float, float | None]]]:
    """An uninterrupted run of one rank: its folder and losses."""
    folder = tmp_path_factory.mktemp("rank") / "whole"
    with Ranks(write_config(folder), 1) as ranks:
        assert ranks.wait() == [0]
    assert isinstance(ranks.events[0][-1], EndEvent)
    assert ranks.events[0][-1].cause == "Completed"
    return folder, ranks.losses()


def test_killed_at_a_random_step_and_resumed_the_losses_are_bitwise_those_of_a_run_in_peace(
    whole: tuple[Path, dict[int, tuple[float, float | None]]],
) -> None:
    """The killed run keeps its optimizer's state in host memory, the other one does not."""
    folder = whole[0].parent / "killed"
    victim = random.randint(0, 1)
    fatal_step = random.randint(4, STEPS - 4)  # the rank goes on until the signal comes, and must not end before it
    config = write_config(folder, ranks=2, memory={"precision": "fp32", "cpu_offload": True})
    with Ranks(config, 2) as ranks:
        for rank, event in ranks.listen():
            if rank == victim and isinstance(event, StepEvent) and event.step == fatal_step:
                ranks.processes[victim].send_signal(signal.SIGKILL)
                break
        codes = ranks.wait()  # the survivor notices by itself
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] in (EXIT_CODES[Cause.PEER_LOST], EXIT_CODES[Cause.RANK_FAILED]), ranks.events[1 - victim][
        -1
    ]
    before = ranks.losses(victim)
    with Ranks(config, 2) as ranks:
        assert ranks.wait() == [0, 0]
    after = ranks.losses()
    assert min(after) in (1, 4, 7, 10)  # behind a save
    assert {**before, **after} == whole[1], f"rank {victim} was killed in step {fatal_step}"
    assert ranks.losses(1) == after


def test_sigterm_saves_and_stops_and_a_rank_that_loses_its_agent_ends(
    whole: tuple[Path, dict[int, tuple[float, float | None]]],
) -> None:
    folder = whole[0].parent / "stopped"
    endless = {"total_steps": 100_000, "global_batch_size": 4, "sequence_length": 32}  # however late the signal comes
    config = write_config(folder, checkpoint={"root": str(folder / "root")}, training=endless)
    with Ranks(config, 1) as ranks:
        for _, event in ranks.listen():
            if isinstance(event, StepEvent) and event.step == 2:
                ranks.processes[0].terminate()
        assert ranks.processes[0].wait() == EXIT_CODES[Cause.INTERRUPTED]
    last = [event for event in ranks.events[0] if isinstance(event, SaveEvent)][-1]
    assert (last.reason, last.verified) == ("interrupt", True)
    assert [found.step for found in CheckpointRoot(folder / "root").committed()] == [last.step]
    with Ranks(config, 1) as orphan:
        for _ in orphan.listen():
            break
        orphan.ends[0].close()
        assert orphan.processes[0].wait(240) == EXIT_CODES[Cause.INTERRUPTED]


@pytest.fixture
def _signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("changes", "cause", "message"),
    [
        pytest.param(
            {"parallelism": {"tensor": 2}}, Cause.CONFIG_INVALID, "does not divide", id="a mesh that does not fit"
        ),
        pytest.param(
            {"memory": {"cpu_offload": True, "nvme_offload": {"path": "/nowhere"}}},
            Cause.CONFIG_INVALID,
            "memory.cpuOffload true is not supported yet with memory.nvmeOffload",
            id="what is not built",
        ),
        pytest.param(
            {"memory": {"nvme_offload": {"path": "/dev/null/x"}}},
            Cause.STORAGE_ERROR,
            "memory.nvmeOffload.path /dev/null/x: cannot be used: Not a directory",
            id="no volume for optimizer state",
        ),
        pytest.param(
            {"memory": {"activation_checkpointing": "selective", "activation_budget_gib": 1e-6}, "data": NO_CORPUS},
            Cause.CONFIG_INVALID,
            "memory.activationBudgetGiB 1e-06: activations of",
            id="a budget that cannot be met, before the corpus is read",
        ),
        pytest.param(
            {"memory": {"activation_budget_gib": 1}},
            Cause.CONFIG_INVALID,
            "memory: activation_budget_gib 1.0 needs activation_checkpointing selective, got none",
            id="a budget without a choice",
        ),
        pytest.param(
            {"memory": {"fp8_recipe": "Rowwise"}},
            Cause.CONFIG_INVALID,
            "memory: fp8_recipe Rowwise needs precision fp8, got bf16",
            id="a recipe without eight bits",
        ),
        pytest.param(
            {"optimization": {"schedule": "constant", "min_learning_rate": 1e-5}},
            Cause.CONFIG_INVALID,
            "optimization: min_learning_rate 1e-05 has no effect with schedule constant; allowed: 0, or",
            id="a floor that a constant rate never reaches",
        ),
        pytest.param(
            {"optimization": {"learning_rate": 1e-5, "min_learning_rate": 1e-4}},
            Cause.CONFIG_INVALID,
            "optimization: min_learning_rate 0.0001 is above learning_rate; allowed: 0 to 1e-05",
            id="a floor above the peak",
        ),
        pytest.param({"attention": "flash"}, Cause.CONFIG_INVALID, "flash", id="a missing kernel"),
        pytest.param(
            {"model": {**MODEL, "wings": 2}}, Cause.CONFIG_INVALID, "wings", id="an unknown field of the model"
        ),
        pytest.param(
            {"model": {**MODEL, "max_position_embeddings": 16}},
            Cause.CONFIG_INVALID,
            "training.sequenceLength 32 is above the model's maxPositionEmbeddings 16",
            id="sequences longer than the model's positions",
        ),
        pytest.param(
            {"optimization": {"warmup_steps": 100}},
            Cause.CONFIG_INVALID,
            f"optimization.warmupSteps 100 is above the {STEPS} steps of the run",
            id="a warm-up that does not end",
        ),
        pytest.param(
            {"optimization": {"epsilon": 1e-60}}, Cause.CONFIG_INVALID, "optimization.epsilon", id="an epsilon of 0"
        ),
        pytest.param({"data": NO_CORPUS}, Cause.DATA_ERROR, "/nowhere", id="no corpus"),
        pytest.param(
            {"model": None, "model_from": {"kind": "huggingFace", "path": "/nowhere"}},
            Cause.MODEL_ERROR,
            "/nowhere",
            id="no weights",
        ),
        pytest.param(
            {"resume": {"folder": "step-00000001.0a1b2c3d", "step": 1, "digest": "0" * 64}},
            Cause.STORAGE_ERROR,
            "no sign of any save, but step-00000001.0a1b2c3d was written",
            id="a storage without any checkpoint",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], cause: Cause, message: str
) -> None:
    config = write_config(tmp_path / "run", **changes)
    assert main(["--config", str(config)], {}) == EXIT_CODES[cause]
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
def test_weights_of_a_checkpoint_start_another_run(
    whole: tuple[Path, dict[int, tuple[float, float | None]]], changes: dict[str, Any]
) -> None:
    found = CheckpointRoot(whole[0] / "root").committed()[0]
    folder = whole[0].parent / f"from checkpoint {len(changes)}"
    start = {"kind": "checkpoint", "path": str(found.path), "digest": found.digest}
    log = folder / "log.jsonl"
    config = write_config(folder, model=None, model_from=start, logging={"jsonl": str(log)}, **changes)
    assert main(["--config", str(config)], {}) == 0
    first = json.loads(log.read_text().splitlines()[0])
    assert first["step"] == 1
    assert first["loss"] < whole[1][1][0] - 0.05  # better than random weights
    saved = CheckpointRoot(folder / "root").committed()[0].manifest
    assert any(name.startswith("adapter.") for name in saved.tensors) == ("lora" in changes)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConfigError("x"), Cause.CONFIG_INVALID),
        (DataError("x"), Cause.DATA_ERROR),
        (CheckpointLocked("x"), Cause.CONFIG_INVALID),
        (StorageUnusable("x"), Cause.CONFIG_INVALID),
        (StorageFailed("x"), Cause.STORAGE_ERROR),
        (NonFinite("x"), Cause.NON_FINITE),
        (OtherModel("x"), Cause.MODEL_ERROR),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("x"), Cause.OUT_OF_MEMORY),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), Cause.PEER_LOST),
        (RuntimeError("x"), Cause.RANK_FAILED),
        (PermissionError(13, "Permission denied", "/cache"), Cause.STORAGE_ERROR),
        (BrokenPipeError(32, "Broken pipe"), Cause.RANK_FAILED),
    ],
)
def test_each_error_has_a_cause(error: Exception, cause: Cause) -> None:
    assert cause_of(error) == cause


def test_a_file_that_cannot_be_written_is_named_without_a_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path / "run", logging={"jsonl": str(tmp_path / "file" / "log.jsonl")})
    assert main(["--config", str(config)], {}) == 68
    errors = capfd.readouterr().err
    assert f"StorageError: {tmp_path / 'file'}: " in errors
    assert "Traceback" not in errors


def test_a_stop_command_ends_a_rank_as_its_mode_says(whole: tuple[Path, dict[int, tuple[float, float | None]]]) -> None:
    folder = whole[0].parent / "cancelled"
    with Ranks(write_config(folder), 1) as ranks:
        ranks.ends[0].send(StopCommand(mode="cancel"))
        assert ranks.wait() == [EXIT_CODES[Cause.CANCELLED]]
    assert ranks.losses() == {1: whole[1][1]}


def test_an_attempt_removes_the_unfinished_saves_of_those_before_it_and_no_others(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path / "root")
    stagings = {
        name: root.begin(3, writer) / "rank-00000.bin"
        for name, writer in (("first", writer_of("u", 0)), ("last", writer_of("u", 1)), ("other", writer_of("v", 0)))
    }
    for file in stagings.values():
        file.write_bytes(b"half")
    job = {"name": "run", "uid": "u", "attempt": 2, "writer": writer_of("u", 2)}
    config = load(TrainerConfig, write_config(tmp_path / "run", job=job, retention="external"))
    with hold_root(config, find_rank_info(config, {}), root):
        assert [name for name, file in stagings.items() if file.exists()] == ["other"]
