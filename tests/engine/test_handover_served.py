"""Two engines as processes: a request that names a prefill engine, and what happens when that engine dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from stoker.pod.split_requests import PREFILL_HEADER
from testing.engine.transfers import wait_for
from testing.free_port import free_port
from tests.engine.test_server_real import write_model

PROMPT = [3 + 7 * place % 300 for place in range(90)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "seed": 4, "temperature": 1.1, "n": 2, "logprobs": 1}


@dataclass
class Served:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/status", timeout=240).json())

    @property
    def endpoint(self) -> str:
        return str(self.status()["peer"]["endpoint"])

    def ask(self, prefill: str = "", **more: Any) -> dict[str, Any]:
        headers = {PREFILL_HEADER.decode(): prefill} if prefill else {}
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY | more, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def outcomes(self) -> dict[str, int]:
        return dict(self.status()["transfer"]["outcomes"])

    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"core.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 1
        return found[0]


class Fleet:
    """Engines that are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "tiny")
        (folder / "key").write_text("5a" * 32)
        self.made: list[Served] = []

    def start(
        self, name: str, role: str, environment: Mapping[str, str] = MappingProxyType({}), **settings: Any
    ) -> Served:
        port = free_port()
        config = {
            "model": {"path": str(self.folder / "tiny"), "dtype": "float32"}, "listen": {"port": port}, "threads": 1,
            "role": role, "transfer": {"listen": "127.0.0.1:0", "zone_blocks": 8, "key_file": str(self.folder / "key")},
            "cache": {"num_blocks": 200, "block_size": 4}, "scheduler": {"max_batch_tokens": 32, "max_requests": 4},
        } | settings  # fmt: skip
        (self.folder / f"{name}.json").write_text(json.dumps(config))
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "stoker.engine", "--config", str(self.folder / f"{name}.json")],
                env={**os.environ, "STOKER_POD_UID": name, "OMP_NUM_THREADS": "1", **environment}, stderr=file,
            )  # fmt: skip
        served = Served(f"http://127.0.0.1:{port}", process, log)
        self.made.append(served)
        return served

    def close(self) -> None:
        for one in self.made:
            one.process.kill()
            one.process.wait()


def answers(served: Served, path: str = "/readyz", status: int = 200) -> Callable[[], bool]:
    def question() -> bool:
        assert served.process.poll() is None, served.log.read_text()
        try:
            return httpx.get(f"{served.url}{path}").status_code == status
        except httpx.TransportError:
            return False

    return question


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    fleet = Fleet(tmp_path_factory.mktemp("pair"))
    try:
        d, p = fleet.start("d", "decode"), fleet.start("p", "prefill")
        for one in (d, p):
            wait_for(answers(one), "a ready engine")
            wait_for(lambda one=one: one.status()["peer"] is not None, "the first report")  # type: ignore[misc]
        yield d, p
    finally:
        fleet.close()


def texts(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(one["text"], one["finish_reason"], one["logprobs"]["tokens"]) for one in answer["choices"]]


def until_split(d: Served, p: Served) -> None:
    """Ask for one prompt after the other until one is split: on a busy machine P may not answer in time at first."""
    tries = iter(range(1000))

    def asked() -> bool:
        body: dict[str, Any] = {"prompt": [next(tries) + 3, *PROMPT]}
        assert texts(d.ask(p.endpoint, **body)) == texts(p.ask(**body))
        wait_for(lambda: d.status()["transfer"]["receiving"] == 0, "the end")
        return d.outcomes()["split"] > 0

    wait_for(asked, "a split request")


def test_1_a_split_answer_is_that_of_one_engine(pair: tuple[Served, Served]) -> None:
    d, p = pair
    until_split(d, p)
    wait_for(lambda: p.status()["transfer"]["bytes_per_s"].get("shared-memory", 0) > 0, "the measured speed")
    status = p.status()
    assert (status["role"], status["transfer"]["transport"]) == ("prefill", "shared-memory")
    metrics = httpx.get(f"{d.url}/metrics", timeout=120).text
    assert 'stoker_split_requests_total{engine="0",model_name="tiny",outcome="split"}' in metrics
    sent = httpx.get(f"{p.url}/metrics", timeout=120).text
    assert 'stoker_transfer_bytes_total{engine="0",model_name="tiny",transport="shared-memory"}' in sent
    wait_until_free(d, p)


def wait_until_free(*served: Served) -> None:
    """Nothing is held: neither blocks of the cache nor slots of the landing zone."""
    for one in served:
        wait_for(lambda one=one: one.status()["free_blocks"] == 200, "free blocks")  # type: ignore[misc]
        wait_for(lambda one=one: one.status()["transfer"]["free_slots"] == 8, "free slots")  # type: ignore[misc]


def test_2_load_reports_name_the_peer(pair: tuple[Served, Served]) -> None:
    d, p = pair
    reports = []
    for one in (d, p):
        with httpx.stream("GET", f"{one.url}/load", timeout=60) as stream:
            reports.append(json.loads(next(stream.iter_lines()).removeprefix("data: ")))
    first, second = reports
    assert (first["role"], second["role"]) == ("decode", "prefill")
    same = ("fingerprint", "block_size", "block_bytes", "host_id", "transports")
    assert [first["peer"][name] for name in same] == [second["peer"][name] for name in same]
    assert first["peer"]["epoch"] != second["peer"]["epoch"]
    assert second["prefill_tokens_per_s"] > 0


def test_3_a_name_that_is_none_and_a_port_that_none_listens_on_do_no_harm(pair: tuple[Served, Served]) -> None:
    d, p = pair
    for first, name in ((2, "nonsense"), (50, "127.0.0.1:1")):
        body: dict[str, Any] = {"prompt": [first + place % 200 for place in range(70)]}
        assert texts(d.ask(name, **body)) == texts(p.ask(**body))
    wait_for(lambda: d.status()["transfer"]["fallbacks"].get("unreachable", 0) >= 2, "the reason")


def test_4_the_client_leaves_while_p_works(pair: tuple[Served, Served]) -> None:
    d, p = pair
    core, endpoint, before = p.core_pid(), p.endpoint, d.outcomes()
    os.kill(core, signal.SIGSTOP)
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            socket.create_connection(("127.0.0.1", int(d.url.rpartition(":")[2]))) as raw,
        ):
            body = json.dumps(BODY | {"prompt": PROMPT[::-1]})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: d\r\n{PREFILL_HEADER.decode()}: {endpoint}\r\n"
            raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            answered = pool.submit(raw.recv, 1)  # P may be given up before anything is seen here
            wait_for(lambda: d.status()["transfer"]["receiving"] == 1 or answered.done(), "the request")
            raw.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: d.status()["transfer"]["receiving"] == 0, "the end at D")
        after = d.outcomes()
        assert after["cancelled"] + after["local"] == before["cancelled"] + before["local"] + 1
    finally:
        os.kill(core, signal.SIGCONT)
    wait_until_free(d, p)


def test_5_p_is_killed_while_d_has_no_seat_and_p_streams(pair: tuple[Served, Served]) -> None:
    """P decodes for D, whose seats are taken; then P is killed. The last test of the pair.

    No draw of these tokens lies within 1e-4 of the border between two of them. Borders move by some 1e-8 with the rows
    that a step computes together, and how many tokens D computes depends on the moment of the kill.
    """
    d, p = pair
    long = BODY | {"n": 4, "max_tokens": 150, "ignore_eos": True, "prompt": [9, 8, 7]}
    body: dict[str, Any] = {"prompt": [5 + 19 * place % 290 for place in range(60)], "n": 1, "max_tokens": 60}
    whole = p.ask(**body)
    core, endpoint, local = p.core_pid(), p.endpoint, d.outcomes()["local"]
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(d.ask, **long)
        wait_for(lambda: d.status()["running"] == 4 or busy.done(), "taken seats")
        asked = pool.submit(d.ask, endpoint, **body)
        wait_for(lambda: d.status()["transfer"]["receiving"] == 1 or asked.done(), "the request at P")
        os.kill(core, signal.SIGKILL)
        assert texts(asked.result()) == texts(whole)
        busy.result()
    wait_until_free(d)
    again: dict[str, Any] = {"prompt": [5 + 13 * place % 290 for place in range(60)]}
    d.ask(endpoint, **again)
    wait_for(lambda: d.outcomes()["local"] > local, "the outcome without P")
