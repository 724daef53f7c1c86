"""The engine as a program over a fake core process: its states, its drain, its termination message."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_watch import WatchLimits
from stoker.engine.core.messages import CoreState
from stoker.engine.http.text import TextCodec
from stoker.engine.program import Engine, Environment, end_of_core
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.config_file import parse
from stoker.pod.serve import Server, bind_tcp
from stoker.pod.termination_message import TerminationMessage
from stoker.router.app import Router
from stoker.router.config import RouterConfig
from stoker.router.snapshot import parse_snapshot
from testing.engine.fake_core import ByteCodec, release
from testing.engine.serving import events, run, until

COMPLETIONS = "/v1/completions"
WATCH = WatchLimits()


def fake_core(config_file: Path, address: str) -> Sequence[str]:
    return [sys.executable, "-m", "testing.engine.fake_core", address]


@dataclass
class Program:
    engine: Engine
    http: httpx.AsyncClient
    ended: asyncio.Task[TerminationMessage]


async def follow(p: Program, begun: asyncio.Event) -> str:
    """Read a stream that the core holds in its middle; `begun` is set with its first chunk."""
    body = {"prompt": "held say:" + "x" * 40, "max_tokens": 50, "stream": True}
    text = ""
    async with p.http.stream("POST", COMPLETIONS, json=body) as answer:
        async for part in answer.aiter_text():
            text += part
            begun.set()
    return text


def no_codec(folder: Path) -> TextCodec:
    raise ValueError("tokenizer.json is missing")


@asynccontextmanager
async def program(
    folder: Path,
    command: Any = fake_core,
    open_codec: Any = ByteCodec,
    watch: WatchLimits = WATCH,
    on_state: Callable[[CoreState], None] = lambda _: None,
    **settings: Any,
) -> AsyncIterator[Program]:
    base = {"model": {"path": "/models/tiny"}, "listen": {"port": 0}, "grace_period_s": 6}
    config = parse(EngineConfig, {**base, **settings})
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    environment = Environment(
        pod_uid="pod-1", command=command, open_codec=open_codec, on_listen=port.set_result, watch=watch,
        on_state=on_state,
    )  # fmt: skip
    engine = Engine(config, environment, folder)
    ended = asyncio.create_task(engine.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}", timeout=120) as http:
        try:
            yield Program(engine, http, ended)
        finally:
            engine.stop.set()
            await asyncio.wait({ended})


def test_it_serves_says_where_it_stands_and_drains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, grace_period_s=240) as p:
            await until(lambda: p.engine.front.ready)
            status = (await p.http.get("/status")).json()
            program_facts = {"program": "engine", "pod_uid": "pod-1", "phase": "Serving"}
            assert {**program_facts, "models": ["tiny"], "total_blocks": 64}.items() <= status.items()
            assert status["model_digest"] == "abcdef0123456789"
            running = asyncio.ensure_future(
                p.http.post(COMPLETIONS, json={"prompt": "held say:" + "x" * 40, "max_tokens": 50})
            )
            await until(lambda: p.engine.core.running == 1)
            p.engine.stop.set()
            await until(lambda: p.engine.front.served.draining)
            assert (await p.http.get("/readyz")).status_code == 503
            refused = await p.http.post(COMPLETIONS, json={"prompt": "say:x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            release(tmp_path)
            assert (await running).json()["choices"][0]["text"] == "x" * 40  # what ran has ended whole
            assert await p.ended == TerminationMessage(cause=Cause.INTERRUPTED, detail="stopped after its requests")

    run(scenario)


def test_what_does_not_end_in_the_grace_period_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, grace_period_s=2.5) as p:
            await until(lambda: p.engine.front.ready)
            begun = asyncio.Event()
            running = asyncio.ensure_future(follow(p, begun))
            await begun.wait()
            p.engine.stop.set()
            *_, error, done = events(await running)
            assert (error["error"]["code"], done) == ("aborted", "[DONE]")
            assert (await p.ended).cause is Cause.INTERRUPTED

    run(scenario)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, grace_period_s=60) as p:
            await until(lambda: p.engine.front.ready)
            running = asyncio.ensure_future(p.http.post(COMPLETIONS, json={"prompt": "hang say:x"}))
            await until(lambda: p.engine.core.running == 1)
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: p.engine.front.served.draining)
            os.kill(os.getpid(), signal.SIGINT)
            assert (await p.ended).cause is Cause.INTERRUPTED
            await asyncio.gather(running, return_exceptions=True)

    run(scenario)


def test_a_killed_core_ends_streams_readiness_and_the_program(tmp_path: Path) -> None:
    async def scenario() -> None:
        pids: list[int] = []

        def command(config_file: Path, address: str) -> Sequence[str]:
            return ["sh", "-c", f'echo $$ > {tmp_path}/pid; exec "$@"', "sh", *fake_core(config_file, address)]

        async with program(tmp_path, command) as p:
            await until(lambda: p.engine.front.ready)
            pids.append(int((tmp_path / "pid").read_text()))
            begun = asyncio.Event()
            running = asyncio.ensure_future(follow(p, begun))
            await begun.wait()
            os.kill(pids[0], signal.SIGKILL)
            *_, error, done = events(await running)
            assert (error["error"]["code"], done) == ("engine_lost", "[DONE]")
            word = await p.ended
            assert word == TerminationMessage(cause=Cause.RANK_KILLED, detail="the core process was killed by signal 9")
            assert not p.engine.front.ready

    run(scenario)


@pytest.mark.parametrize(
    ("code", "state", "draining", "cause", "detail"),
    [
        (-9, CoreState("Serving", ""), False, Cause.RANK_KILLED, "the core process was killed by signal 9"),
        (EXIT_CODES[Cause.CHECKPOINT_CORRUPT], CoreState("Failed", "CheckpointCorrupt: piece 3"), False,
         Cause.CHECKPOINT_CORRUPT, "piece 3"),
        (1, CoreState("Loading", "starting the core"), False, Cause.INTERNAL,
         "the core process ended with code 1 in phase Loading (starting the core); the engine's log has the reason"),
        (0, CoreState("Serving", ""), False, Cause.INTERNAL, "the core process ended without being asked to"),
        (0, CoreState("Draining", ""), True, Cause.INTERRUPTED, "drained before it served"),
    ],
)  # fmt: skip
def test_the_end_of_a_core_is_told_with_its_reason_and_not_with_what_it_did_last(
    code: int, state: CoreState, draining: bool, cause: Cause, detail: str
) -> None:
    assert end_of_core(code, state, draining=draining) == TerminationMessage(cause=cause, detail=detail)


def test_a_stopped_core_fails_readiness_then_liveness_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        def command(config_file: Path, address: str) -> Sequence[str]:
            return ["sh", "-c", f'echo $$ > {tmp_path}/pid; exec "$@"', "sh", *fake_core(config_file, address), "2"]

        async with program(tmp_path, command, watch=WatchLimits(dead_factor=2, dead_floor_s=0)) as p:
            await until_answers(p, "/readyz", 200)
            pid = int((tmp_path / "pid").read_text())
            try:
                os.kill(pid, signal.SIGSTOP)
                await until_answers(p, "/readyz", 503)
                message = (await p.http.get("/status")).json()["message"]
                assert re.fullmatch(r"EngineStalled: no news from the core for \d+ s, usual step 0.03 s", message)
                refused = await p.http.post(COMPLETIONS, json={"prompt": "say:x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
                assert message.partition(" for ")[0] in refused.json()["error"]["message"]
                await until_answers(p, "/livez", 503)
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_answers(p, "/readyz", 200)
            await until_answers(p, "/livez", 200)
            assert (await p.http.get("/status")).json()["message"] == ""
            assert (await p.http.post(COMPLETIONS, json={"prompt": "say:abc"})).json()["choices"][0]["text"] == "abc"

    run(scenario)


async def until_answers(p: Program, path: str, status: int, timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while (await p.http.get(path)).status_code != status:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "cause"),
    [(67, Cause.CHECKPOINT_CORRUPT), (69, Cause.OUT_OF_MEMORY), (0, Cause.INTERNAL), (3, Cause.INTERNAL)],
)
def test_the_core_s_exit_code_is_the_program_s_cause(tmp_path: Path, code: int, cause: Cause) -> None:
    async def scenario() -> None:
        async with program(tmp_path) as p:
            await until(lambda: p.engine.front.ready)
            await p.http.post(COMPLETIONS, json={"prompt": f"exit{code}"})
            assert (await p.ended).cause is cause

    run(scenario)


def test_drain_over_the_control_socket_ends_work_but_not_the_program(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"

    async def scenario() -> None:
        async with program(tmp_path, listen={"port": 0, "control_socket": str(path)}) as p:
            await until(lambda: p.engine.front.ready)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            body = {"id": "d1", "deadline_s": 5}
            assert (await p.http.post("/drain", json=body)).status_code == 404  # without keys: not on TCP
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://control", timeout=120) as control:
                assert (await control.post("/drain", json={"id": "d0", "deadline_s": -1})).status_code == 400
                for _ in range(2):  # repeating it is harmless
                    answer = await control.post("/drain", json=body)
                    assert (answer.status_code, answer.json()) == (202, {"id": "d1", "phase": "Draining"})
            await until(lambda: p.engine.status()["phase"] == "Drained")
            assert (await p.http.get("/livez")).status_code == 200
            assert not p.ended.done()

    run(scenario)


def test_a_core_that_never_starts_is_the_program_s_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        def command(config_file: Path, address: str) -> Sequence[str]:
            assert json.loads(config_file.read_text())["model"]["path"] == "/models/tiny"
            return ["sh", "-c", f"until test -e {tmp_path}/end; do sleep 0.05; done; exit 66"]

        async with program(tmp_path, command) as p:
            assert (await p.http.get("/readyz")).status_code == 503
            answer = await p.http.post(COMPLETIONS, json={"prompt": "say:x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            (tmp_path / "end").touch()
            assert (await p.ended).cause is Cause.MODEL_ERROR

    run(scenario)


def test_it_is_warming_until_the_tokenizer_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        opened = threading.Event()

        def slow_codec(folder: Path) -> TextCodec:
            assert opened.wait(120)
            return ByteCodec(folder)

        told: list[tuple[str, str]] = []
        async with program(
            tmp_path, open_codec=slow_codec, on_state=lambda state: told.append((state.phase, state.message))
        ) as p:
            await until(lambda: p.engine.core.serving)
            assert told[-1] == ("Warming", "the tokenizer is being read")
            status = (await p.http.get("/status")).json()
            assert (status["phase"], status["message"]) == ("Warming", "the tokenizer is being read")
            refused = await p.http.post(COMPLETIONS, json={"prompt": "say:x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "The engine is not ready: the tokenizer is being read"
            assert (await p.http.get("/health")).json()["reason"] == "the tokenizer is being read"
            opened.set()
            await until(lambda: p.engine.front.ready)
            status = (await p.http.get("/status")).json()
            assert (status["phase"], status["message"]) == ("Serving", "")
            assert [phase for phase, _ in told].index("Serving") == len(told) - 1

    run(scenario)


def test_a_model_without_a_tokenizer_ends_the_program(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, open_codec=no_codec) as p:
            word = await p.ended
            assert word == TerminationMessage(cause=Cause.MODEL_ERROR, detail="/nowhere: tokenizer.json is missing")

    run(scenario)


def test_behind_a_router_engines_are_replaced_without_a_failed_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with program(tmp_path / "a") as old, program(tmp_path / "b") as new, _router(old, new) as http:
            done, loads = asyncio.Event(), [_Load(http) for _ in range(8)]
            running = [asyncio.ensure_future(load.run(done)) for load in loads]

            async def answered(count: int) -> None:
                """Wait until each has had so many further answers, or one has failed."""
                wanted = [load.answered + count for load in loads]
                await until(
                    lambda: (
                        any(one.done() for one in running)
                        or all(load.answered >= number for load, number in zip(loads, wanted, strict=True))
                    )
                )

            await answered(1)
            old.engine.stop.set()  # SIGTERM without a word to the router: what is refused goes elsewhere
            await old.ended
            await answered(2)
            done.set()
            await asyncio.gather(*running)

    run(scenario)


@asynccontextmanager
async def _router(*programs: Program) -> AsyncIterator[httpx.AsyncClient]:
    config = parse(
        RouterConfig, {"deployment": "d", "backends_file": "unused", "probe_interval_s": 0.1, "connect_timeout_s": 60}
    )
    router = Router(config, pod_uid="router-0")
    server = Server(router.app, bind_tcp("127.0.0.1", 0))
    entries = [{"url": str(p.http.base_url).rstrip("/"), "pod_uid": p.engine.environment.pod_uid} for p in programs]
    router.start(parse_snapshot({"version": 1, "backends": entries}))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as http:
        await until(lambda: len(router.backends.ready) == len(programs))
        yield http
    await server.stop(1)
    await router.stop()


class _Load:
    """Sends requests one after another; each must be answered whole."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http, self.answered = http, 0

    async def run(self, done: asyncio.Event) -> None:
        while not done.is_set():
            assert await self._ask(stream=bool(self.answered % 2)) == "abcde"
            self.answered += 1

    async def _ask(self, *, stream: bool) -> str:
        answer = await self.http.post(COMPLETIONS, json={"prompt": "slow say:abcde", "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            return str(answer.json()["choices"][0]["text"])
        *chunks, end = events(answer.text)
        assert end == "[DONE]", answer.text
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_core_that_started_before_its_front_failed_is_ended(tmp_path: Path) -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as taken, TemporaryDirectory() as short:  # sockets lie in a short path only
        taken.listen()
        config = {
            "model": {"path": "/models/tiny"},
            "listen": {"port": taken.getsockname()[1], "host": "127.0.0.1"},
            "work_dir": short,
            "termination_log": str(tmp_path / "end"),
        }
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        ended = subprocess.run(
            [sys.executable, "-m", "stoker.engine", "--config", str(file)],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert ended.returncode == EXIT_CODES[Cause.INTERNAL], ended.stderr
        assert "in use" in (tmp_path / "end").read_text()
        assert not list(Path(short).iterdir())
        assert not [command for command in command_lines() if short.encode() in command]


def command_lines() -> Iterator[bytes]:
    """Command lines of the running processes; one that ends meanwhile has none."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield file.read_bytes()
