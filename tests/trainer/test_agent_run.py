"""The agent with simulated ranks: ends of runs, HTTP answers, and that no process outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console as RichConsole

from stoker.pod.causes import Cause
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.control_key import new_private_key, public_key, sign
from stoker.pod.termination_message import SaveReport, TerminationMessage, parse_termination_message
from stoker.trainer.agent.agent import Agent
from stoker.trainer.agent.console import Console
from stoker.trainer.agent.pod_rank import find_pod_rank
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import PhaseEvent

LONGEST_S = 240.0
"""Longest wait for a process or an answer; a busy machine is slow."""

RANK = """
import argparse, faulthandler, os, signal, socket, sys, time
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import EndEvent, RequestEvent, SaveCommand, SaveEvent, StepEvent, ValidationEvent

parser = argparse.ArgumentParser()
parser.add_argument("behaviour")
parser.add_argument("--config")
parser.add_argument("--channel-fd", type=int)
parser.add_argument("--stacks")
parser.add_argument("--master-listen-fd", type=int)
args = parser.parse_args()
rank = int(os.environ["RANK"])
signal.signal(signal.SIGINT, signal.SIG_IGN)
stacks = open(args.stacks, "w")
faulthandler.register(signal.SIGUSR1, file=stacks)
channel = RankChannel(socket.socket(fileno=args.channel_fd), on_orphaned=lambda: os._exit(1))
TOTAL = 5

def step(number):
    channel.send(StepEvent(step=number, total_steps=TOTAL, tokens=number * 64, loss=3.0 / number, learning_rate=1e-3,
                           grad_norm=1.0, tokens_per_s=64.0, step_s=1.0, eta_s=float(TOTAL - number)))

def save(number, reason, verified=True, request=None):
    folder = f"step-{number:08}.0a1b2c3d"
    facts = dict(id=request or folder, folder=folder, step=number, tokens=number * 64, loss=1.0, reason=reason,
                 learning_rate=1e-3, elapsed_s=float(number))
    written = dict(state="Committed", digest="d" * 64, bytes=10, files=2, pieces=3)
    channel.send(SaveEvent(**facts, state="Saving"))
    channel.send(SaveEvent(**facts, **written))
    if verified is not None:
        channel.send(SaveEvent(**facts, **written, verified=verified))
    if request:
        channel.send(RequestEvent(id=request, state="Done", folder=facts["folder"]))

def end(cause, code, step=None, detail=""):
    channel.send(EndEvent(cause=cause, step=step, detail=detail))
    sys.exit(code)

def stuck_here():
    time.sleep(600)

def train(forever=False, deaf=False, unread=False, validates=False):
    channel.phase("FirstStep")
    number = 0
    while forever or number < TOTAL:
        number += 1
        channel.phase("Training")
        step(number)
        time.sleep(0.02)
        for command in channel.take():
            if isinstance(command, SaveCommand):
                save(number, command.reason, request=command.id)
            elif not deaf:
                channel.phase("Saving")
                if rank == 0 and command.save:
                    save(number, "interrupt", verified=None if unread else True)
                channel.phase("Validating" if validates else "Saving")
                if unread or validates:
                    time.sleep(600)
                end(*(("Cancelled", 79) if command.mode == "cancel" else ("Interrupted", 78)), number)
    channel.phase("Finishing")
    if rank == 0:
        channel.send(ValidationEvent(step=number, loss=0.5, tokens=64))
        save(number, "final")
    end("Completed", 0, number)

def rank_1_lives():
    try:
        with open(marker) as file, open(f"/proc/{file.read()}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

def wait_for(question):
    while not question():
        time.sleep(0.02)

marker = os.path.join(os.path.dirname(args.stacks), "pid-of-rank-1")
gate = os.path.join(os.path.dirname(__file__), "gate")
channel.phase("Loading", "LoadingWeights 43 %")
if args.behaviour == "train":
    train()
elif args.behaviour == "environment":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
             "CUDA_VISIBLE_DEVICES")
    fd = args.master_listen_fd
    address = socket.socket(fileno=fd).getsockname() if fd is not None else None
    print("\\n".join(f"{name}={os.environ.get(name)}" for name in names), f"listens={address}", sep="\\n")
    end("Completed", 0, 1)
elif args.behaviour == "forever":
    train(forever=True)
elif args.behaviour == "deaf":
    train(forever=True, deaf=True)
elif args.behaviour == "unread":
    train(forever=True, unread=True)
elif args.behaviour == "validates":
    train(forever=True, validates=True)
elif args.behaviour == "load":
    time.sleep(600)
elif args.behaviour == "gated":
    wait_for(lambda: os.path.exists(gate))
    train(forever=True)
if rank == 1:
    with open(marker + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(marker + ".part", marker)
if rank == 1 and args.behaviour == "crash":
    raise RuntimeError("the third wheel came off")
elif rank == 1 and args.behaviour == "data":
    end("DataError", 65, 3, "corpus.jsonl:7: not JSON")
elif rank == 1 and args.behaviour == "kill":
    step(2)
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 1 and args.behaviour == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
elif rank == 1 and args.behaviour == "silent":
    sys.exit(0)
elif rank == 1 and args.behaviour == "babble":
    channel._connection.sendall(b"{}\\n")
    time.sleep(600)
elif rank == 1 and args.behaviour == "hang":
    channel.phase("Training")
    stuck_here()
elif args.behaviour == "hang":
    wait_for(lambda: os.path.exists(marker))
    channel.phase("Training")
    for number in range(1000):
        step(1)
        time.sleep(0.05)
elif rank == 0 and args.behaviour != "load":  # it notices only that rank 1 is gone
    wait_for(lambda: os.path.exists(marker) and not rank_1_lives())
    end("PeerLost", 74, 2, "connection closed by peer")
"""


def config_for(tmp_path: Path, **fields: Any) -> TrainerConfig:
    return parse(
        TrainerConfig,
        {
            "job": {"name": "job", "uid": "uid", "attempt": 2, "writer": "0a1b2c3d"},
            "listen": {"port": 0},
            "gang": {"ranks_per_node": 2},
            "termination_log": str(tmp_path / "termination-log"),
            "work_dir": str(tmp_path / "work"),
            "device": "cpu",
            "grace_period_s": 600,
            "model": {"vocab_size": 259},
            "training": {"total_steps": 5},
            "data": {"sources": [{"name": "a", "path": "/nowhere"}]},
            "checkpoint": {"root": str(tmp_path / "checkpoints")},
            **fields,
        },
    )


Act = Callable[[Agent], Coroutine[Any, Any, None]]


def agent_for(
    tmp_path: Path,
    behaviour: str,
    screen: io.StringIO | None = None,
    environment: dict[str, str] | None = None,
    **fields: Any,
) -> Agent:
    config = config_for(tmp_path, **fields)
    (tmp_path / "rank.py").write_text(RANK)
    variables = {**os.environ, "STOKER_POD_UID": "pod-0", **(environment or {})}
    return Agent(
        config,
        find_pod_rank(config, variables),
        rank_command=[sys.executable, str(tmp_path / "rank.py"), behaviour],
        environment=variables,
        console=Console(RichConsole(file=screen or io.StringIO(), highlight=False), 1),
    )


def run(agent: Agent, act: Act | None = None) -> TerminationMessage:
    """Run the agent, with `act` beside it, and return the termination message. No rank is left afterwards."""

    async def both() -> TerminationMessage:
        acting = asyncio.create_task(act(agent)) if act is not None else None
        message = await agent.run()
        if acting is not None:
            await acting
        return message

    message = asyncio.run(both())
    assert all(process.returncode is not None for process in agent._processes)
    return message


def client_of(agent: Agent) -> httpx.AsyncClient:
    """A client of the agent's port."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{agent.port}", trust_env=False, timeout=LONGEST_S)


async def until(question: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_S):
        while not question():
            await asyncio.sleep(0.01)


def steps(agent: Agent, count: int) -> Callable[[], bool]:
    return lambda: (agent.state.step or 0) >= count


def alive(pid: int) -> bool:
    """Return whether the process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_that_ends_well_is_completed_with_its_saves(tmp_path: Path) -> None:
    agent = agent_for(tmp_path, "train")
    folder = "step-00000005.0a1b2c3d"
    figures: dict[str, Any] = {
        "tokens": 320,
        "loss": 1.0,
        "validation_loss": 0.5,
        "learning_rate": 1e-3,
        "elapsed_s": 5.0,
    }
    figures |= {"bytes": 10, "files": 2, "pieces": 3, "layout": {}}
    save = SaveReport(id=folder, folder=folder, step=5, digest="d" * 64, verified=True, metrics=figures)
    message = run(agent)
    status = agent.state.status()
    last = {name: message.result[name] for name in ("step", "loss", "tokens", "progressed_at")}
    assert last == {name: status[name] for name in last}
    assert replace(message, result={}) == TerminationMessage(cause=Cause.COMPLETED, step=5, saves=(save,))
    assert status["phase"] == "Exited"
    (shown,) = status["saves"]
    assert {name: shown[name] for name in figures} == figures
    assert (status["step"], status["total_steps"], status["tokens"], status["validation_loss"]) == (5, 5, 320, 0.5)


def test_ranks_get_their_place_and_rank_0_the_rendezvous(tmp_path: Path) -> None:
    screen = io.StringIO()
    run(agent_for(tmp_path, "environment", screen, {"OMP_NUM_THREADS": "1"}))
    said = [line for line in screen.getvalue().splitlines() if line.startswith("[rank")]
    port = next(line for line in said if "MASTER_PORT" in line).rsplit("=", 1)[1]
    for rank, listens in ((0, f"('127.0.0.1', {port})"), (1, "None")):
        assert [line.removeprefix(f"[rank {rank}] ") for line in said if line.startswith(f"[rank {rank}]")] == [
            f"RANK={rank}",
            f"LOCAL_RANK={rank}",
            "WORLD_SIZE=2",
            "MASTER_ADDR=127.0.0.1",
            f"MASTER_PORT={port}",
            "OMP_NUM_THREADS=1",
            "CUDA_VISIBLE_DEVICES=",
            f"listens={listens}",
        ]


@pytest.mark.parametrize(
    ("behaviour", "cause", "rank", "detail"),
    [
        ("crash", Cause.RANK_FAILED, 1, "the third wheel came off"),
        ("data", Cause.DATA_ERROR, 1, "corpus.jsonl:7: not JSON"),
        ("kill", Cause.RANK_KILLED, 1, "rank 1 was killed by SIGKILL"),
        ("segv", Cause.RANK_KILLED, 1, "rank 1 was killed by SIGSEGV"),
        ("silent", Cause.RANK_FAILED, 1, "ended with exit code 0 and reported no cause"),
        ("babble", Cause.INTERNAL, 1, "unknown event"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_own_cause(
    tmp_path: Path, behaviour: str, cause: Cause, rank: int, detail: str
) -> None:
    message = run(agent_for(tmp_path, behaviour))
    assert (message.cause, message.rank) == (cause, rank)
    assert detail in message.detail


def test_a_silent_rank_is_a_hang_and_its_stacks_say_where(tmp_path: Path) -> None:
    screen = io.StringIO()
    message = run(agent_for(tmp_path, "hang", screen, deadlines={"step_s": 4, "load_s": 60}))
    assert (message.cause, message.rank, message.step) == (Cause.HANG, 1, 1)
    assert message.detail.startswith("rank 1 made no progress in phase Training for ")
    assert "rank 1: stuck_here (rank.py:" in message.detail
    assert "stacks of rank 0:" in screen.getvalue()


def test_an_interrupted_run_saves_first(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(steps(agent, 2))
        agent.interrupt("SIGTERM")

    message = run(agent_for(tmp_path, "forever"), act)
    assert message.cause is Cause.INTERRUPTED
    assert [(save.step, save.verified) for save in message.saves] == [(message.step, True)]


def test_at_the_end_of_the_grace_period_a_save_that_was_not_read_back_is_not_verified(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(steps(agent, 2))
        agent.interrupt("SIGTERM")
        await until(lambda: any(save.state == "Committed" for save in agent.state.saves.values()))
        agent.interrupt("SIGTERM")

    message = run(agent_for(tmp_path, "unread", grace_period_s=600), act)
    assert message.cause is Cause.INTERRUPTED
    assert "no time was left for a last save" in message.detail
    assert [save.verified for save in message.saves] == [False]


def test_a_validation_that_the_grace_period_ends_leaves_a_good_save(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(steps(agent, 2))
        agent.interrupt("SIGTERM")
        await until(lambda: agent.state.phase == "Validating")
        agent.interrupt("SIGTERM")

    message = run(agent_for(tmp_path, "validates"), act)
    assert message.cause is Cause.INTERRUPTED
    assert message.detail == "SIGTERM: no time was left for more than the last save (phase Validating)"
    assert [(save.step, save.verified) for save in message.saves] == [(message.step, True)]


def test_ranks_that_do_not_listen_are_ended_by_the_second_interrupt(tmp_path: Path) -> None:
    interrupted_at = 0.0

    async def act(agent: Agent) -> None:
        nonlocal interrupted_at
        await until(steps(agent, 1))
        agent.interrupt("SIGINT")
        await asyncio.sleep(0.1)
        agent.interrupt("SIGINT")
        interrupted_at = time.monotonic()

    assert run(agent_for(tmp_path, "deaf", grace_period_s=3600), act).cause is Cause.INTERRUPTED
    assert time.monotonic() - interrupted_at < LONGEST_S, "the grace period is an hour"


def test_an_interrupt_while_loading_ends_at_once(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(lambda: agent.state.message == "LoadingWeights 43 %")
        agent.interrupt("SIGTERM")

    message = run(agent_for(tmp_path, "load"), act)
    assert (message.cause, message.saves) == (Cause.INTERRUPTED, ())
    assert "nothing new to save (phase Loading)" in message.detail


def test_an_interrupt_while_loading_says_so_even_if_the_ranks_go_on_meanwhile(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(lambda: all(rank.message == "LoadingWeights 43 %" for rank in agent.state.ranks.values()))
        agent.interrupt("SIGTERM")
        for rank in agent.state.ranks:
            agent.state.apply(rank, PhaseEvent(phase="FirstStep"), clock=time.monotonic(), unix=time.time())

    message = run(agent_for(tmp_path, "load"), act)
    assert "nothing new to save (phase FirstStep)" in message.detail


@pytest.mark.parametrize(("mode", "cause"), [("suspend", Cause.INTERRUPTED), ("cancel", Cause.CANCELLED)])
def test_a_drain_saves_and_ends(tmp_path: Path, mode: str, cause: Cause) -> None:
    socket = tmp_path / "control"

    async def act(agent: Agent) -> None:
        await until(steps(agent, 1))
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), timeout=LONGEST_S) as client:
            body = {"id": "d1", "mode": mode, "deadline_s": 600}
            answer = await client.post("http://agent/drain", json=body)
            assert (answer.status_code, answer.json()["state"]) == (202, "Pending")

    message = run(agent_for(tmp_path, "forever", listen={"port": 0, "control_socket": str(socket)}), act)
    assert message.cause is cause
    assert [save.verified for save in message.saves] == [True]
    assert not socket.exists()


def test_a_save_on_request_is_done_once_per_id(tmp_path: Path) -> None:
    socket = tmp_path / "control"

    async def act(agent: Agent) -> None:
        await until(steps(agent, 1))
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), timeout=LONGEST_S) as client:
            first = await client.post("http://agent/checkpoint", json={"id": "c1"})
            assert (first.status_code, first.json()) == (
                202,
                {"id": "c1", "state": "Pending", "folder": "", "detail": ""},
            )
            await until(lambda: agent.state.requests["c1"].state == "Done")
            again = await client.post("http://agent/checkpoint", json={"id": "c1"})
            assert again.json()["state"] == "Done"
            status = (await client.get("http://agent/status")).json()
        agent.interrupt("SIGTERM")
        assert [save["id"] for save in status["saves"]] == ["c1"]
        assert status["requests"]["c1"]["folder"] == status["saves"][0]["folder"]

    message = run(agent_for(tmp_path, "forever", listen={"port": 0, "control_socket": str(socket)}), act)
    assert next(save.id for save in message.saves) == "c1"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/checkpoint", {}, "id must match"),
        ("/checkpoint", {"id": "../x"}, "id must match"),
        ("/checkpoint", {"id": "a", "reason": "mood"}, "reason must be one of"),
        ("/checkpoint", {"id": "a", "now": True}, "unknown fields"),
        ("/drain", {"id": "a", "mode": "stop", "deadline_s": 1}, "mode must be one of suspend, cancel"),
        ("/drain", {"id": "a", "mode": "cancel"}, "deadline_s must be a positive number"),
        ("/drain", {"id": "a", "mode": "cancel", "deadline_s": True}, "deadline_s must be a positive number"),
    ],
)
def test_a_wrong_control_call_is_answered_with_what_is_allowed(
    tmp_path: Path, path: str, body: dict[str, Any], message: str
) -> None:
    socket = tmp_path / "control"

    async def act(agent: Agent) -> None:
        await until(socket.exists)
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), timeout=LONGEST_S) as client:
            answer = await client.post(f"http://agent{path}", json=body)
        agent.interrupt("SIGTERM")
        assert (answer.status_code, message in answer.json()["error"]) == (400, True)

    run(agent_for(tmp_path, "load", listen={"port": 0, "control_socket": str(socket)}), act)


def test_only_a_fresh_token_for_this_call_opens_a_control_route(tmp_path: Path) -> None:
    key = new_private_key()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "current.pem").write_bytes(public_key(key))
    body = json.dumps({"id": "c1"}).encode()

    def token(**changed: Any) -> str:
        call = {
            "pod_uid": "pod-0",
            "method": "POST",
            "path": "/checkpoint",
            "body": body,
            "now": time.time(),
            "token_id": "t1",
        }
        return sign(key, **{**call, **changed})

    async def act(agent: Agent) -> None:
        await until(steps(agent, 1))
        good = token()
        calls = [
            None,
            token(pod_uid="pod-1"),
            token(path="/drain"),
            token(body=b"{}"),
            token(now=time.time() - 300),
            good,
            good,
        ]
        async with client_of(agent) as client:
            answers = [
                await client.post(
                    "/checkpoint", content=body, headers={"Authorization": f"Bearer {call}"} if call else {}
                )
                for call in calls
            ]
        agent.interrupt("SIGTERM")
        assert [answer.status_code for answer in answers] == [401, 401, 401, 401, 401, 202, 401]

    run(agent_for(tmp_path, "forever", listen={"port": 0, "control_keys": str(keys)}), act)


def test_without_keys_the_port_has_no_control_routes(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(lambda: agent.port != 0)
        async with client_of(agent) as client:
            answer = await client.post("/drain", json={"id": "a", "mode": "cancel", "deadline_s": 1})
        agent.interrupt("SIGTERM")
        assert answer.status_code == 404

    run(agent_for(tmp_path, "load"), act)


def test_the_agent_answers_while_ranks_load_and_train(tmp_path: Path) -> None:
    async def act(agent: Agent) -> None:
        await until(lambda: agent.port != 0)
        async with client_of(agent) as client:
            loading = [(await client.get(path)).status_code for path in ("/livez", "/readyz")]
            (tmp_path / "gate").touch()
            await until(lambda: steps(agent, 2)() and agent.state.phase == "Training")
            training = [(await client.get(path)).status_code for path in ("/livez", "/readyz")]
            metrics = (await client.get("/metrics")).text
            status = (await client.get("/status")).json()
        agent.interrupt("SIGTERM")
        assert (loading, training) == ([200, 503], [200, 200])
        for line in (
            'stoker_trainer_phase{phase="Training"} 1.0',
            "stoker_trainer_total_steps 5.0",
            'stoker_trainer_saves_total{state="committed"} 0.0',
        ):
            assert line in metrics.splitlines()
        assert (status["program"], status["pod_uid"], status["job_uid"], status["attempt"]) == (
            "trainer",
            "pod-0",
            "uid",
            2,
        )
        assert status["phase"] == "Training"
        assert abs(status["progressed_at"] - time.time()) < LONGEST_S, "the time of day"

    run(agent_for(tmp_path, "gated"), act)


def test_the_first_pods_agent_gathers_the_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    gang = {"nodes": 2, "ranks_per_node": 1}
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    second = agent_for(tmp_path / "b", "forever", environment={**variables, "STOKER_NODE_RANK": "1"}, gang=gang)

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        other = asyncio.create_task(second.run())
        await until(steps(second, 1))
        agents = ("http://127.0.0.1:1", f"http://127.0.0.1:{second.port}")
        first = agent_for(
            tmp_path / "a",
            "forever",
            environment={**variables, "STOKER_NODE_RANK": "0"},
            gang={**gang, "agents": agents},
        )
        own = asyncio.create_task(first.run())
        await until(lambda: 1 in first.state.peers and first.state.peers[1].reachable)
        together = first.state.status()
        second.interrupt("SIGTERM")
        await other
        await until(lambda: not first.state.peers[1].reachable)
        alone = first.state.status()
        first.interrupt("SIGTERM")
        await own
        return together, alone

    together, alone = asyncio.run(both())
    assert [(node["node_rank"], node["reachable"]) for node in together["nodes"]] == [(0, True), (1, True)]
    assert together["nodes"][1]["phase"] == "Training"
    assert together["nodes"][1]["step"] >= 1
    assert [(node["node_rank"], node["reachable"]) for node in alone["nodes"]] == [(0, True), (1, False)]


def test_a_hang_with_a_peer_that_does_not_answer_is_a_lost_peer(tmp_path: Path) -> None:
    gang = {"nodes": 2, "ranks_per_node": 2, "agents": ("http://127.0.0.1:1", "http://127.0.0.1:1")}
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "STOKER_NODE_RANK": "0"}
    message = run(agent_for(tmp_path, "hang", environment=variables, gang=gang, deadlines={"step_s": 0.5}))
    assert message.cause is Cause.PEER_LOST
    assert "no answer from node 1" in message.detail


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"listen: 127.0.0.1:{port} cannot be bound: Address already in use"):
            run(agent_for(tmp_path, "train", listen={"port": port}))


# --- the program as a process ---

PROGRAM = """
import sys
from stoker.trainer.agent.program import main
sys.exit(main(["--config", sys.argv[1]], rank_module=sys.argv[2:]))
"""


def start(tmp_path: Path, behaviour: str, **fields: Any) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "config.json").write_text(config_for(tmp_path, **fields).model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "config.json"), str(tmp_path / "rank.py"), behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def termination_message(tmp_path: Path) -> TerminationMessage:
    message = parse_termination_message((tmp_path / "termination-log").read_text())
    assert message is not None
    return message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_exit_code_says_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "forever")
    wait_for_line(process, "step 2/5  loss 1.5000  lr 1.0e-03  norm 1.00  64 tokens/s  ETA 3s")
    process.send_signal(number)
    output, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 78
    assert "committed, verified" in output
    message = termination_message(tmp_path)
    assert [save.verified for save in message.saves] == [True]
    step = message.step
    assert step is not None
    assert message.result["step"] == step
    assert message.result["loss"] == pytest.approx(3 / step)  # whichever step the signal met
    assert message.result["save_reasons"] == {message.saves[-1].folder: "interrupt"}


def test_a_killed_rank_gives_its_exit_code_and_last_word(tmp_path: Path) -> None:
    process = start(tmp_path, "kill")
    process.communicate(timeout=LONGEST_S)
    assert process.returncode == 73
    assert termination_message(tmp_path).detail == "rank 1 was killed by SIGKILL"


def test_no_rank_outlives_a_killed_agent(tmp_path: Path) -> None:
    process = start(tmp_path, "deaf")
    wait_for_line(process, "step 1/5")
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + LONGEST_S
    while any(alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ('{"termination_log": "%s", "speed": 9}', "unknown key speed"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_the_last_word(tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(content.replace("%s", str(tmp_path / "termination-log")))
    done = subprocess.run(
        [sys.executable, "-m", "stoker.trainer", "--config", str(config)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, message in done.stderr) == (64, True)
    with contextlib.suppress(FileNotFoundError):
        assert message in termination_message(tmp_path).detail


def test_a_work_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(tmp_path, "train", work_dir=str(tmp_path / "file"))
    output, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 68
    assert "Traceback" not in output
    assert termination_message(tmp_path).detail == f"{tmp_path / 'file' / 'stacks'}: Not a directory"


def test_what_is_not_built_is_refused(tmp_path: Path) -> None:
    unbuilt = {"memory": {"cpu_offload": True, "nvme_offload": {"path": "/nowhere"}}}
    process = start(tmp_path, "train", **unbuilt)
    output, _ = process.communicate(timeout=LONGEST_S)
    assert (process.returncode, termination_message(tmp_path).cause) == (64, Cause.CONFIG_INVALID)
    assert "memory.cpuOffload true is not supported yet with memory.nvmeOffload" in output


def test_the_agent_and_the_data_do_not_import_torch() -> None:
    modules = "stoker.trainer.agent.program, stoker.trainer.rank.data.loader, stoker.trainer.rank.data.tokens"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
