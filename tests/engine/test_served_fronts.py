"""One engine with two fronts as real processes: answers as one front gives them, one set of pages, deaths, the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from testing.engine.rank_engines import config_of
from tests.engine.test_server_real import write_model

START_S, WAIT_S = 300, 300
MAX_CONNECTIONS = 12
PROMPTS = ["The quick brown fox", "jumps", "over the lazy dog", "and then", "coffee", "The"]
LENGTH = 24
BLOCKS = 2000
ENDLESS, LONG = 12_000, 200
"""Tokens of a stream that no test waits for, and of one that is still running a moment after its first token."""


class Server:
    """The program with two fronts, and what its clients need."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, url: str) -> None:
        self.process, self.folder, self.url = process, folder, url

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, timeout=120, verify=False, limits=httpx.Limits(max_connections=4)
        )  # plain HTTP needs no certificates

    def metrics(self, client: httpx.Client | None = None) -> dict[str, float]:
        """Sample with its labels -> value."""
        if client is None:
            with self.client() as new:
                return self.metrics(new)
        text = client.get("/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def fronts(self) -> dict[int, int]:
        """Number of each front -> its process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if int(parent) == self.process.pid and "stoker.engine.fronts.front_program" in words:
                found[int(words[words.index("--number") + 1])] = int(folder.name)
        return found


def eventually(question: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fronts")
    write_model(folder / "tiny")
    shape = json.loads((folder / "tiny" / "config.json").read_text())
    (folder / "tiny" / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 16384}))
    config = {
        "model": {"path": str(folder / "tiny"), "dtype": "float32"},
        "listen": {
            "port": 0, "control_socket": str(folder / "control.sock"), "limits": {"max_connections": MAX_CONNECTIONS},
        },
        "device": "cpu",
        "threads": 1,
        "cache": {"num_blocks": BLOCKS, "block_size": 16},
        "api": {"fronts": 2},
        "termination_log": str(folder / "termination-log"),
        "grace_period_s": 600,
    }  # fmt: skip
    program = (
        "import sys, os; from pathlib import Path; from stoker.engine.config import EngineConfig;"
        "from stoker.engine.program import Environment, run_engine; from stoker.pod.config_file import load;"
        "from stoker.pod.causes import EXIT_CODES;"
        "told = lambda port: (Path(sys.argv[2] + '.part').write_text(str(port)),"
        " os.replace(sys.argv[2] + '.part', sys.argv[2]));"
        "config, phases = load(EngineConfig, sys.argv[1]), open(sys.argv[2] + '.phases', 'a', buffering=1);"
        "note = lambda state: phases.write(state.phase + chr(10));"
        "end = run_engine(config, Environment(pod_uid='pod-7', on_listen=told, on_state=note));"
        "end.write(config.termination_log); sys.exit(EXIT_CODES[end.cause])"
    )
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder / "config.json"), str(folder / "port")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "STOKER_POD_UID": "pod-7"},
            stderr=log,
        )
    server = Server(process, folder, "")
    try:
        deadline = time.monotonic() + START_S
        while not (folder / "port").exists() or not _is_ready(server):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.3)
        yield server
    finally:
        process.kill()
        process.wait()


def _is_ready(server: Server) -> bool:
    """Whether both fronts serve: two new connections reach one each, since a front that serves comes first."""
    server.url = f"http://127.0.0.1:{(server.folder / 'port').read_text()}"
    with server.client() as one, server.client() as two:
        if any(client.get("/readyz").status_code != 200 for client in (one, two)):
            return False
        return [number_of(server, front, one) for front in (0, 1)] == [1, 1]


@pytest.fixture
def pair(served: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two clients, each with a connection to a front of its own."""
    eventually(lambda: open_connections(served, None) <= 1)  # only that of the question
    with served.client() as one, served.client() as two:
        assert (one.get("/livez").status_code, two.get("/livez").status_code) == (200, 200)
        eventually(lambda: [number_of(served, front, one) for front in (0, 1)] == [1, 1])
        yield one, two


def status_of(served: Server) -> dict[str, Any]:
    with served.client() as client:
        return status_by(client)


def status_by(client: httpx.Client) -> dict[str, Any]:
    """The status of all fronts; one that does not answer at once is shown as it was."""
    return dict(client.get("/status").json())


def number_of(served: Server, front: int, client: httpx.Client | None) -> float:
    return served.metrics(client).get(f'stoker:front_connections{{front="{front}"}}', 0.0)


def open_connections(served: Server, client: httpx.Client | None) -> float:
    found = served.metrics(client)
    return sum(value for name, value in found.items() if name.startswith("stoker:front_connections"))


def body_of(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "ignore_eos": True, "seed": 5, **more}


def test_answers_are_those_of_one_front(served: Server, pair: tuple[httpx.Client, httpx.Client]) -> None:
    """Greedy and sampled, many at a time through both fronts: the tokens of an engine without any."""
    bodies = [body_of(prompt, temperature=t) for prompt in PROMPTS for t in (0.0, 0.8)]

    def answer(number: int) -> str:
        found = pair[number % 2].post("/v1/completions", json=bodies[number // 2]).json()
        return str(found["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answer, range(2 * len(bodies))))
    with LLM(config_of(served.folder / "tiny", 1)) as llm:
        params = [SamplingParams(max_tokens=LENGTH, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.8)]
        outputs = llm.generate([prompt for prompt in PROMPTS for _ in params], params * len(PROMPTS), progress=False)
    expected = [output.completions[0].text for output in outputs for _ in range(2)]
    assert found == expected


def test_observers_are_told_that_the_engine_serves_once(served: Server) -> None:
    """A core that serves, and a second front, are no news."""
    phases = (served.folder / "port.phases").read_text().split()
    assert (phases.count("Serving"), phases[-1]) == (1, "Serving")


def test_each_front_shows_the_pages_of_all(served: Server, pair: tuple[httpx.Client, httpx.Client]) -> None:
    before = served.metrics(pair[0])
    counter = 'vllm:request_params_n_count{engine="0",model_name="tiny"}'
    ids = [client.post("/v1/completions", json=body_of("fox", max_tokens=2)).json()["id"] for client in pair]
    for client in pair:
        eventually(lambda client=client: served.metrics(client)[counter] == before[counter] + 2)  # type: ignore[misc]
        eventually(lambda client=client: status_by(client)["load"]["arrived"] == before[counter] + 2)  # type: ignore[misc]
        status = status_by(client)
        assert (status["phase"], status["pod_uid"], status["total_blocks"]) == ("Serving", "pod-7", BLOCKS)
        for name in ids:
            request = client.get(f"/v1/requests/{name}").json()
            assert (request["id"], request["state"], request["output_tokens"]) == (name, "COMPLETED", 2)
        assert client.get("/v1/requests/cmpl-none").status_code == 404
        assert client.get("/health").json()["status"] == "healthy"
    after = served.metrics(pair[1])
    assert {name.partition("{")[0] for name in after} >= {
        "process_resident_memory_bytes", "stoker_core_process_resident_memory_bytes",
        "stoker_front_process_resident_memory_bytes", "stoker:front_restarts_total", "vllm:num_requests_running",
    }  # fmt: skip


def test_a_running_request_is_found_and_its_load_reported_at_the_other_front(
    served: Server, pair: tuple[httpx.Client, httpx.Client]
) -> None:
    with running(pair[0], "mine") as stream:
        next(stream)
        request = pair[1].get("/v1/requests/mine").json()
        assert (request["state"], request["request_id"]) == ("DECODING", "mine")
        reports = [load_of(served, number) for number in range(2)]
        epochs = {report["epoch"] for report in reports}
        assert len(epochs) == 1, "of one engine"
    eventually(lambda: pair[1].get("/v1/requests/mine").json()["state"] == "FAILED", "its client has gone")


def load_of(served: Server, number: int) -> Mapping[str, Any]:
    """The first report of a new stream that counts the running request; each stream is at another front."""
    with served.client() as client, client.stream("GET", "/load") as answer:
        deadline = time.monotonic() + WAIT_S
        for line in answer.iter_lines():
            assert time.monotonic() < deadline, line
            if line.startswith("data: "):
                report: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if report["requests"] == 1:
                    return report
    raise AssertionError(number)


def running(client: httpx.Client, name: str, **more: Any) -> Any:
    """A long stream that is being answered: a context with an iterator of its lines."""
    body = body_of("fox", stream=True, **{"max_tokens": ENDLESS, **more})
    return _Stream(client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}))


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Iterator[str]:
        lines: Iterator[str] = self._stream.__enter__().iter_lines()
        return lines

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)


def test_connections_are_shared_out_evenly_and_limited_together(served: Server) -> None:
    eventually(lambda: open_connections(served, None) <= 1)
    with ExitStack() as stack:
        clients = [stack.enter_context(served.client()) for _ in range(MAX_CONNECTIONS)]
        for client in clients:
            assert client.get("/v1/models").status_code == 200
        assert [number_of(served, front, clients[0]) for front in (0, 1)] == [MAX_CONNECTIONS / 2] * 2
        for _ in range(2):  # at either front, which has only its half
            with served.client() as late:
                refused = late.get("/v1/models")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
                assert late.get("/readyz").status_code == 200
    eventually(lambda: open_connections(served, None) <= 1)


def test_the_control_socket_is_served_by_the_fronts(served: Server) -> None:
    transport = httpx.HTTPTransport(uds=str(served.folder / "control.sock"))
    with httpx.Client(transport=transport, base_url="http://x", timeout=60) as client:
        assert client.get("/status").json()["phase"] == "Serving"
        answer = client.post("/drain", json={"deadline_s": "soon"})
        assert (answer.status_code, "deadline_s" in answer.text) == (400, True)
    assert httpx.post(f"{served.url}/drain", json={"deadline_s": 5}, timeout=60).status_code == 404


def test_a_front_that_dies_takes_its_own_requests_alone(
    served: Server, pair: tuple[httpx.Client, httpx.Client]
) -> None:
    counter = 'vllm:request_params_n_count{engine="0",model_name="tiny"}'
    aborts = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    before = served.metrics(pair[0])
    dying, fronts = victim(served, pair), served.fronts()
    survivor = pair[1] if dying is pair[0] else pair[0]
    with running(dying, "dies") as cut, running(survivor, "lives", max_tokens=LONG) as lives:
        next(cut)
        next(lives)
        os.kill(fronts[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            for _ in cut:
                pass
        lines = [line for line in lives if line]
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
    eventually(lambda: served.metrics()["stoker:front_restarts_total"] == before["stoker:front_restarts_total"] + 1)
    eventually(lambda: served.metrics().get(aborts, 0) > before.get(aborts, 0))
    eventually(lambda: served.fronts().keys() == {0, 1})
    assert served.fronts()[0] != fronts[0]
    assert served.fronts()[1] == fronts[1]
    eventually(lambda: status_of(served)["running"] == 0)
    assert served.metrics()[counter] >= before[counter], "a counter never falls"
    for client in pair:  # whose idle connections would be counted
        client.close()
    eventually(lambda: _is_ready(served))
    with served.client() as one, served.client() as two:
        texts = {
            one_of.post("/v1/completions", json=body_of("fox")).json()["choices"][0]["text"] for one_of in (one, two)
        }
        assert len(texts) == 1


def victim(served: Server, pair: tuple[httpx.Client, httpx.Client]) -> httpx.Client:
    """The client whose connection is at front 0: a third client joins one of them, by turns, and is counted."""
    sockets = [inode_of(client) for client in pair]
    its_sockets = set()
    for file in Path(f"/proc/{served.fronts()[0]}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            its_sockets.add(str(file.readlink()))
    return pair[0] if any(f"socket:[{inode}]" in its_sockets for inode in sockets[0]) else pair[1]


def inode_of(client: httpx.Client) -> set[str]:
    """Inodes of the server's end of a client's connections, from the kernel's table."""
    transport: Any = client._transport
    ports = {
        connection._connection._network_stream.get_extra_info("client_addr")[1]
        for connection in transport._pool.connections
    }
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) in ports:
            found.add(fields[9])
    return found


def test_the_end_lets_running_answers_end(served: Server) -> None:
    """SIGTERM: streams at both fronts end whole, every process is gone, the cause is told."""
    fronts = served.fronts()
    ends: list[str] = []
    begun = threading.Barrier(3)

    def follow(client: httpx.Client, name: str) -> None:
        with running(client, name, max_tokens=LONG) as lines:
            next(lines)
            begun.wait(WAIT_S)
            ends.append([line for line in lines if line][-1])

    with served.client() as one, served.client() as two:
        threads = [threading.Thread(target=follow, args=(client, f"end-{n}")) for n, client in enumerate((one, two))]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        served.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(WAIT_S)
    assert ends == ["data: [DONE]"] * 2
    assert served.process.wait(WAIT_S) == 0 or "Interrupted" in (served.folder / "termination-log").read_text()
    assert re.search(r'"cause": ?"Interrupted"', (served.folder / "termination-log").read_text())
    assert len(fronts) == 2
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in fronts.values()), fronts)
