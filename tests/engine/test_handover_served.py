"""Two engines as processes: a request that names a prefill engine, and what happens when that engine dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.pod.split_requests import PREFILL_HEADER
from testing.engine.transfers import wait_for
from tests.engine.test_server_real import write_model

PROMPT = [3 + 7 * place % 300 for place in range(90)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "seed": 4, "temperature": 1.1, "n": 2, "logprobs": 1}


@dataclass
class Served:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/status", timeout=30).json())

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

    def start(self, name: str, role: str, **settings: Any) -> Served:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
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
                env={**os.environ, "STOKER_POD_UID": name, "OMP_NUM_THREADS": "1"}, stderr=file,
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


def test_1_a_split_answer_is_that_of_one_engine(pair: tuple[Served, Served]) -> None:
    d, p = pair
    whole = p.ask()
    split = d.ask(p.endpoint)
    assert texts(split) == texts(whole)
    assert split["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    wait_for(lambda: d.outcomes()["split"] + d.outcomes()["prefill_only"] == 1, "the outcome")
    wait_for(lambda: p.status()["transfer"]["bytes_per_s"].get("shared-memory", 0) > 0, "the measured speed")
    status = p.status()
    assert (status["role"], status["transfer"]["transport"]) == ("prefill", "shared-memory")
    metrics = httpx.get(f"{d.url}/metrics").text
    assert 'stoker_split_requests_total{engine="0",model_name="tiny",outcome="' in metrics
    sent = httpx.get(f"{p.url}/metrics").text
    assert 'stoker_transfer_bytes_total{engine="0",model_name="tiny",transport="shared-memory"}' in sent
    wait_for(lambda: d.status()["free_blocks"] == 200 == p.status()["free_blocks"], "free blocks")


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
    wait_for(lambda: d.status()["transfer"]["fallbacks"] == {"unreachable": 2}, "the reason")


def test_4_the_client_leaves_while_p_works(pair: tuple[Served, Served]) -> None:
    d, p = pair
    core = p.core_pid()
    endpoint = p.endpoint
    os.kill(core, signal.SIGSTOP)
    try:
        headers = {PREFILL_HEADER.decode(): endpoint}
        body = BODY | {"prompt": PROMPT[::-1]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{d.url}/v1/completions", json=body, headers=headers, timeout=0.5)
        wait_for(lambda: d.outcomes()["cancelled"] == 1, "the end at D")
    finally:
        os.kill(core, signal.SIGCONT)
    for one in pair:
        wait_for(lambda one=one: one.status()["free_blocks"] == 200, "free blocks")  # type: ignore[misc]
    wait_for(lambda: d.status()["transfer"]["free_slots"] == 8, "free slots")


def test_5_p_is_killed_before_its_first_token_and_d_goes_on(pair: tuple[Served, Served]) -> None:
    """The last test of the pair."""
    d, p = pair
    body: dict[str, Any] = {"prompt": [5 + 11 * place % 290 for place in range(90)]}
    whole = p.ask(**body)
    core, endpoint = p.core_pid(), p.endpoint
    local = d.outcomes()["local"]
    os.kill(core, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(d.ask, endpoint, **body)
        wait_for(lambda: d.status()["transfer"]["receiving"] == 1, "the request at P")
        os.kill(core, signal.SIGKILL)
        assert texts(asked.result()) == texts(whole)
    wait_for(lambda: d.outcomes()["local"] == local + 1, "the outcome")
    wait_for(lambda: d.status()["free_blocks"] == 200, "free blocks")
    wait_for(lambda: d.status()["transfer"]["free_slots"] == 8, "free slots")


def test_an_engine_that_cannot_offer_what_is_required_is_not_ready(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        one = fleet.start("d", "decode", transfer={"listen": "127.0.0.1:0", "require": "nvlink"})
        reason = "transfer.require is nvlink; this engine offers shared-memory, tcp"
        wait_for(lambda: bool(answers(one, "/livez")()) and reason == one.status()["message"], "the reason")
        assert httpx.get(f"{one.url}/readyz").status_code == 503
        health = httpx.get(f"{one.url}/health")
        assert (health.status_code, health.json()["reason"]) == (503, reason)
    finally:
        fleet.close()
