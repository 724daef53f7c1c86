"""The agent's decisions as tables: outcomes, deadlines, pod ranks, status."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console as RichConsole
from starlette.responses import JSONResponse

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.termination_message import TerminationMessage
from stoker.trainer.agent.console import Console, duration, run_output
from stoker.trainer.agent.metrics import registry_of
from stoker.trainer.agent.outcome import NOT_OF_RANKS, RankEnd, RunOutcome, diagnose, read_oom_kills
from stoker.trainer.agent.pod_rank import find_pod_rank, open_rendezvous, rank_environment
from stoker.trainer.agent.run_state import MAX_REQUESTS, RunState
from stoker.trainer.agent.stacks import innermost
from stoker.trainer.protocol.config import DeadlineConfig, TrainerConfig
from stoker.trainer.protocol.hang import Hang, Heartbeat, find_hang
from stoker.trainer.protocol.messages import (
    EndEvent,
    Event,
    MomentEvent,
    PhaseEvent,
    PlanEvent,
    RetentionEvent,
    SaveEvent,
    SourcesEvent,
    StepEvent,
    StragglersEvent,
    ValidationEvent,
)


def config_for(**fields: Any) -> TrainerConfig:
    return parse(
        TrainerConfig,
        {
            "job": {"name": "job", "uid": "uid", "writer": "0a1b2c3d"},
            "termination_log": "/dev/null",
            "work_dir": "none",
            "model": {"vocab_size": 259},
            "training": {"total_steps": 5},
            "data": {"sources": [{"name": "a", "path": "/nowhere"}]},
            "checkpoint": {"root": "/nowhere"},
            **fields,
        },
    )


def reported(cause: Cause, rank: int = 0, detail: str = "") -> RankEnd:
    return RankEnd(rank, EXIT_CODES[cause], EndEvent(cause=cause.value, step=7, detail=detail))


def killed(number: int, rank: int = 1) -> RankEnd:
    return RankEnd(rank, -number, None, "")


@pytest.mark.parametrize(
    ("ends", "oom_kills", "nodes", "cause", "rank"),
    [
        ([reported(Cause.COMPLETED), reported(Cause.COMPLETED, 1)], 0, 1, Cause.COMPLETED, None),
        ([reported(Cause.COMPLETED), reported(Cause.INTERRUPTED, 1)], 0, 1, Cause.INTERRUPTED, None),
        ([reported(Cause.INTERRUPTED), reported(Cause.CANCELLED, 1)], 0, 1, Cause.CANCELLED, None),
        ([reported(Cause.PEER_LOST), killed(signal.SIGKILL)], 0, 1, Cause.RANK_KILLED, 1),
        ([reported(Cause.PEER_LOST), killed(signal.SIGKILL)], 1, 1, Cause.OUT_OF_MEMORY, 1),
        ([reported(Cause.PEER_LOST), killed(signal.SIGSEGV)], 1, 1, Cause.RANK_KILLED, 1),
        ([reported(Cause.PEER_LOST), reported(Cause.RANK_FAILED, 1)], 0, 1, Cause.RANK_FAILED, 1),
        ([reported(Cause.PEER_LOST), reported(Cause.PEER_LOST, 1)], 0, 1, Cause.RANK_FAILED, 0),
        ([reported(Cause.PEER_LOST), reported(Cause.PEER_LOST, 1)], 0, 2, Cause.PEER_LOST, 0),
        ([reported(Cause.PEER_LOST), reported(Cause.INTERRUPTED, 1)], 0, 2, Cause.INTERRUPTED, None),
        ([reported(Cause.CANCELLED), reported(Cause.PEER_LOST, 1)], 0, 1, Cause.CANCELLED, None),
        ([reported(Cause.COMPLETED), reported(Cause.PEER_LOST, 1)], 0, 2, Cause.PEER_LOST, 1),
        ([reported(Cause.RANK_FAILED), reported(Cause.NON_FINITE, 1)], 0, 1, Cause.NON_FINITE, 1),
        ([reported(Cause.RANK_FAILED), reported(Cause.OUT_OF_MEMORY, 1)], 0, 1, Cause.OUT_OF_MEMORY, 1),
        ([RankEnd(0, 1, None, "ImportError")], 0, 1, Cause.RANK_FAILED, 0),
        ([RankEnd(0, 65, None, "")], 0, 1, Cause.DATA_ERROR, 0),
        ([RankEnd(0, 0, None, "")], 0, 1, Cause.RANK_FAILED, 0),
        ([RankEnd(0, 1, EndEvent(cause="Completed"), "")], 0, 1, Cause.RANK_FAILED, 0),
        ([RankEnd(0, 1, EndEvent(cause="Mood"), "")], 0, 1, Cause.RANK_FAILED, 0),
        ([RankEnd(0, -9, EndEvent(cause="StorageError", detail="disk full"), "")], 0, 1, Cause.STORAGE_ERROR, 0),
        ([RankEnd(0, 76, None, "")], 0, 1, Cause.RANK_FAILED, 0),
    ],
)
def test_the_root_cause_among_the_ends_decides(
    ends: list[RankEnd], oom_kills: int, nodes: int, cause: Cause, rank: int | None
) -> None:
    outcome = diagnose(ends, oom_kills=oom_kills, nodes=nodes)
    assert (outcome.cause, outcome.rank) == (cause, rank)


def test_a_rank_may_report_every_cause_but_those_of_agents_and_tasks() -> None:
    for cause in set(Cause) - NOT_OF_RANKS:
        outcome = diagnose([reported(cause, detail="why")], oom_kills=0, nodes=2)
        assert (outcome.cause, outcome.detail) == (cause, "why")
    for cause in NOT_OF_RANKS:
        assert diagnose([reported(cause)], oom_kills=0, nodes=2).cause is Cause.RANK_FAILED


def test_the_log_of_a_rank_that_reports_no_cause_is_quoted() -> None:
    assert diagnose([RankEnd(3, 1, None, "ImportError: no torch")], oom_kills=0, nodes=1) == RunOutcome(
        Cause.RANK_FAILED, 3, None, "rank 3 ended with exit code 1 and reported no cause: ImportError: no torch"
    )


def test_out_of_memory_kills_are_read_from_the_control_group() -> None:
    assert read_oom_kills("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert read_oom_kills("") == 0


DEADLINES = DeadlineConfig(load_s=100, first_step_s=50, step_s=10, save_s=30, validation_s=40)


@pytest.mark.parametrize(
    ("heartbeats", "hang"),
    [
        ({}, None),
        ({0: Heartbeat("Training", 95), 1: Heartbeat("Training", 91)}, None),
        ({0: Heartbeat("Training", 95), 1: Heartbeat("Training", 89)}, Hang(1, "Training", 11, 10)),
        ({0: Heartbeat("Saving", 71), 1: Heartbeat("Training", 75)}, None),
        ({0: Heartbeat("Saving", 69), 1: Heartbeat("Training", 75)}, Hang(0, "Saving", 31, 30)),
        ({0: Heartbeat("Loading", 10), 1: Heartbeat("FirstStep", 20)}, None),
        ({0: Heartbeat("Exited", 39)}, Hang(0, "Exited", 61, 60)),
    ],
    ids=[
        "no ranks",
        "all in time",
        "one is late",
        "waits for a save",
        "the save is late",
        "waits for a load",
        "does not exit",
    ],
)
def test_silence_is_judged_by_the_longest_phase_of_the_pod(heartbeats: dict[int, Heartbeat], hang: Hang | None) -> None:
    assert find_hang(heartbeats, DEADLINES, now=100) == hang


@pytest.mark.parametrize(
    ("nodes", "environment", "message"),
    [
        (2, {}, "STOKER_NODE_RANK is missing"),
        (2, {"STOKER_NODE_RANK": "2", "MASTER_ADDR": "x"}, "STOKER_NODE_RANK is 2, gang.nodes 2 allows 0 to 1"),
        (2, {"STOKER_NODE_RANK": "one"}, "STOKER_NODE_RANK must be a whole number, got 'one'"),
        (2, {"STOKER_NODE_RANK": "1"}, "MASTER_ADDR is missing"),
    ],
)
def test_a_place_that_cannot_be_is_refused(nodes: int, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_pod_rank(config_for(gang={"nodes": nodes}), environment)


def test_a_pod_of_a_gang_knows_its_ranks() -> None:
    pod = find_pod_rank(
        config_for(gang={"nodes": 3, "ranks_per_node": 4}), {"STOKER_NODE_RANK": "2", "MASTER_ADDR": "node-0"}
    )
    assert (list(pod.ranks), pod.world_size, pod.master_port) == ([8, 9, 10, 11], 12, 29500)
    assert open_rendezvous(config_for(), pod) is None


@pytest.mark.parametrize(
    ("device", "visible", "gpus"),
    [
        ("auto", "4,5", ["4", "5"]),
        ("cuda", "GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"]),
        ("cpu", "4,5", ["", ""]),
        ("cuda", None, ["0", "1"]),
    ],
)
def test_each_rank_sees_one_gpu(device: str, visible: str | None, gpus: list[str]) -> None:
    config = config_for(device=device, gang={"ranks_per_node": 2})
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    pod = find_pod_rank(config, environment)
    assert [rank_environment(config, pod, rank, environment)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == gpus


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    config = config_for(gang={"ranks_per_node": 2})
    environment = {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(ConfigError, match=r"workers.ranksPerPod 2 needs as many GPUs, .* has \['3'\]"):
        rank_environment(config, find_pod_rank(config, environment), 0, environment)


def state_of(ranks: int = 2) -> RunState:
    config = config_for(gang={"ranks_per_node": ranks})
    return RunState(config.job, find_pod_rank(config, {}), started_at=0)


def save(step: int, **fields: Any) -> SaveEvent:
    name = f"step-{step:08}.0a1b2c3d"
    return SaveEvent(
        **{
            "id": name,
            "folder": name,
            "step": step,
            "tokens": 1,
            "loss": 1.0,
            "state": "Committed",
            "reason": "interval",
            **fields,
        }
    )


def test_the_phase_is_the_earliest_while_ranks_start() -> None:
    state = state_of()
    for rank, phase, expected in [
        (0, "FirstStep", "Loading"),
        (1, "FirstStep", "FirstStep"),
        (0, "Training", "FirstStep"),
        (1, "Training", "Training"),
        (0, "Saving", "Saving"),
    ]:
        state.apply(rank, PhaseEvent(phase=phase, message=f"{rank}"), clock=1, unix=1)  # type: ignore[arg-type]
        assert state.phase == expected


def step(**fields: Any) -> StepEvent:
    numbers = dict.fromkeys(("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "eta_s"), 1.0)
    return StepEvent(**{"step": 1, "total_steps": 5, "tokens": 8, **numbers, **fields})


def test_the_validation_before_the_first_step_is_kept_to_the_end() -> None:
    state = state_of()
    assert state.status()["start_validation"] is None
    events: list[Event] = [ValidationEvent(step=7, loss=0.5, tokens=9), step(step=8)]
    for event in (*events, ValidationEvent(step=8, loss=0.4, tokens=9)):
        state.apply(0, event, clock=1, unix=1)
    assert state.status()["start_validation"] == {"step": 7, "loss": 0.5}
    assert state.last_numbers()["start_validation"] == {"step": 7, "loss": 0.5}
    assert state.status()["validation_loss"] == 0.4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_validation_that_is_not_finite_leaves_the_status_readable(loss: float) -> None:
    state = state_of()
    for event in (ValidationEvent(step=4, loss=loss, tokens=9), step(step=4), save(4, verified=True)):
        state.apply(0, event, clock=1, unix=1)
    status = json.loads(bytes(JSONResponse(state.status()).body))
    assert (status["validation_loss"], status["start_validation"]) == (None, {"step": 4, "loss": None})
    assert [(found["folder"], found["validation_loss"]) for found in status["saves"]] == [
        ("step-00000004.0a1b2c3d", None)
    ]
    assert "validation_loss" not in state.last_numbers()


def test_a_moment_of_the_start_is_that_of_the_last_rank() -> None:
    state = state_of()
    events: list[tuple[int, Event]] = [
        (0, MomentEvent(moment="started")),
        (1, MomentEvent(moment="started")),
        (0, MomentEvent(moment="joined")),
        (1, MomentEvent(moment="joined")),
        (0, PhaseEvent(phase="FirstStep")),
        (1, PhaseEvent(phase="FirstStep")),
        (0, step(compile_s=2.0)),
    ]
    for unix, (rank, event) in enumerate(events, start=100):
        state.apply(rank, event, clock=1, unix=unix)
    assert state.startup.status() == {"started_at": 101, "joined_at": 103, "loaded_at": 105}
    state.apply(1, step(compile_s=5.0), clock=1, unix=110)
    state.apply(1, step(step=2), clock=1, unix=120)
    expected = {"started_at": 101, "joined_at": 103, "loaded_at": 105, "stepped_at": 110, "compile_s": 5.0}
    assert state.status()["startup"] == expected
    text = generate_latest(registry_of(state, lambda: 0.0)).decode()
    assert 'stoker_trainer_startup_timestamp_seconds{moment="joined"} 103.0' in text


def test_stragglers_are_shown_with_their_node_until_they_are_none() -> None:
    state, screen = state_of(), io.StringIO()
    late = StragglersEvent(stragglers=[{"rank": 3, "busy_s": 0.9, "typical_s": 0.5}])
    state.apply(0, late, clock=1, unix=1)
    assert state.status()["stragglers"] == [{"rank": 3, "busy_s": 0.9, "typical_s": 0.5, "node_rank": 1}]
    text = generate_latest(registry_of(state, lambda: 0.0)).decode()
    assert 'stoker_trainer_straggler_ratio{rank="3"} 1.8' in text
    console = Console(RichConsole(file=screen, width=120), 1)
    console.show(late)
    console.show(StragglersEvent(stragglers=[]))
    lines = ["stragglers: rank 3 computes 0.9 s a step, others 0.5 s", "no straggler any more"]
    assert screen.getvalue().splitlines() == lines
    state.apply(0, StragglersEvent(stragglers=[]), clock=1, unix=1)
    assert state.status()["stragglers"] == []


def test_committed_saves_are_for_the_end_and_the_last_requests_are_kept() -> None:
    state = state_of()
    for step in range(1, 11):
        state.apply(0, save(step, state="Saving"), clock=1, unix=1)
        state.apply(0, save(step), clock=1, unix=1)
        state.apply(0, save(step, verified=step != 9), clock=1, unix=1)
    state.apply(0, save(11, state="Failed"), clock=1, unix=1)
    assert [record.step for record in state.save_records(unread=None)] == list(range(1, 11))
    assert state.status()["saves_omitted"] == 0
    state.apply(0, RetentionEvent(deleted=["a", "b"], problems=["c: is being read"]), clock=1, unix=1)
    ends = {"committed": 10, "failed": 1, "verified": 9, "unreadable": 1, "deleted": 2, "not_deleted": 1}
    assert state.save_counts == ends
    for number in range(MAX_REQUESTS + 1):
        assert state.register_request(f"r{number}") is None
    assert state.register_request("r5") is not None
    assert state.register_request("r0") is None


def test_an_operator_that_was_away_finds_the_saves_of_the_meantime() -> None:
    state = state_of()
    for number in range(1, 71):
        state.apply(0, save(number, verified=True), clock=1, unix=1)
    state.apply(0, step(step=70), clock=1, unix=1)
    assert [found["step"] for found in state.status()["saves"]] == list(range(7, 71))
    assert state.status()["saves_omitted"] == 6
    message = TerminationMessage(
        cause=Cause.INTERRUPTED,
        saves=state.save_records(unread=None),
        saves_omitted=state.saves_omitted,
        result=state.last_numbers(),
    )
    word = json.loads(message.encode())
    assert [found["step"] for found in word["saves"]] == list(range(63, 71))
    assert word["saves_omitted"] == 62


def test_the_innermost_calls_of_the_main_thread_are_shown() -> None:
    stacks = (
        'Thread 0x01 (most recent call first):\n  File "/a/channel.py", line 3 in _receive\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/a/b/loop.py", line 12 in wait\n  File "/a/run.py", line 40 in step\n'
    )
    assert innermost(stacks) == "wait (loop.py:12) < step (run.py:40)"
    library = (
        '  File "/x/c10d.py", line 1 in gather\n  File "/x/log.py", line 2 in wrapper\n'
        '  File "/a/stoker/loop.py", line 3 in step\n'
    )
    assert (
        innermost(f"Current thread 0x02 (most recent call first):\n{library}")
        == "gather (c10d.py:1) < step (loop.py:3)"
    )
    assert innermost("") == "no stacks"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (45.4, "45s"),
        (130, "2m10s"),
        (3 * 3600 + 300, "3h05m"),
        (2 * 86400 + 4 * 3600, "2d04h"),
        (float("nan"), "?"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_log_gets_plain_lines_for_every_nth_step_and_the_last() -> None:
    screen = io.StringIO()
    console = Console(RichConsole(file=screen), every_steps=2)
    console.show(PhaseEvent(phase="Loading", message="LoadingWeights 43 %"))
    for step in range(1, 4):
        console.show(
            StepEvent(
                step=step,
                total_steps=3,
                tokens=1,
                loss=2.5,
                learning_rate=3e-4,
                grad_norm=0.9,
                tokens_per_s=1310,
                step_s=1,
                eta_s=130,
            )
        )
    console.show(save(3, verified=True))
    console.show(save(3, verified=False, detail="flipped bit"))
    console.show(RetentionEvent(deleted=["step-00000001.0a1b2c3d"], problems=["step-00000002.0a1b2c3d: is being read"]))
    assert screen.getvalue().splitlines() == [
        "Loading  LoadingWeights 43 %",
        "step 2/3  loss 2.5000  lr 3.0e-04  norm 0.90  1,310 tokens/s  ETA 2m10s",
        "step 3/3  loss 2.5000  lr 3.0e-04  norm 0.90  1,310 tokens/s  ETA 2m10s",
        "step 3  save step-00000003.0a1b2c3d committed, verified",
        "step 3  save step-00000003.0a1b2c3d committed, NOT verified: flipped bit",
        "not deleted, tried again after the next save: step-00000002.0a1b2c3d: is being read",
    ]


def test_a_terminal_gets_one_live_line() -> None:
    screen = io.StringIO()
    console = Console(RichConsole(file=screen, force_terminal=True, width=120), every_steps=1)
    console.show(
        StepEvent(
            step=1,
            total_steps=3,
            tokens=1,
            loss=2.5,
            learning_rate=3e-4,
            grad_norm=0.9,
            tokens_per_s=1310,
            step_s=1,
            eta_s=130,
        )
    )
    console.close(None)
    assert "step 1/3  loss 2.5000" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_the_plan_against_the_first_steps_is_in_the_status_and_in_the_log() -> None:
    state, screen = state_of(), io.StringIO()
    assert state.status()["plan"] is None
    event = PlanEvent(
        predicted_step_s=1.1,
        measured_step_s=1.0,
        step_error=0.1,
        predicted_bytes=9.0,
        measured_bytes=None,
        memory_error=None,
        line="plan: step 1 s measured",
    )
    state.apply(0, event, clock=1, unix=1)
    assert state.status()["plan"] == {
        "predicted_step_s": 1.1,
        "measured_step_s": 1.0,
        "step_error": 0.1,
        "predicted_bytes": 9.0,
        "measured_bytes": None,
        "memory_error": None,
    }
    console = Console(RichConsole(file=screen), every_steps=1)
    console.show(event)
    console.close(None)
    assert screen.getvalue() == "plan: step 1 s measured\n"


def test_progress_by_source_is_in_the_status_and_in_the_metrics() -> None:
    state = state_of()
    web = {"name": "web", "samples": 12, "sequences": 40}
    state.apply(0, SourcesEvent(sources=[web]), clock=1, unix=1)
    assert state.status()["sources"] == [web]
    shown = generate_latest(registry_of(state, lambda: 1.0)).decode()
    assert 'stoker_trainer_source_samples{source="web"} 12.0' in shown


def test_a_reader_that_leaves_ends_the_output_and_not_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    complaints = io.StringIO()
    with os.fdopen(writing, "w") as file:
        console = Console(RichConsole(file=run_output(file, complaints)), every_steps=1)
        for _ in range(2):
            console.line("a line for a reader that has left")
        console.close(None)
    assert complaints.getvalue() == ""


def test_a_full_disk_loses_lines_of_the_log_says_so_once_and_the_run_goes_on(tmp_path: Path) -> None:
    complaints = io.StringIO()
    with Path("/dev/full").open("w") as full, (tmp_path / "log").open("w") as log:
        output = run_output(full, complaints)
        console = Console(RichConsole(file=output), every_steps=1)
        for _ in range(2):
            console.line("a line for a full disk")
        os.dup2(log.fileno(), full.fileno())  # there is room again
        console.line("a line with room")
    assert complaints.getvalue() == ("standard output: No space left on device; the run goes on, its log lacks lines\n")
    assert (tmp_path / "log").read_text() == "a line with room\n"
