"""Two engines as processes on GPUs: blocks by CUDA IPC and its fallbacks, tokens of one engine, a kill of each side."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from testing.engine.transfers import wait_for
from tests.engine.test_handover_served import BODY, PROMPT, Fleet, Served, answers, texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_GPU: dict[str, Any] = {
    "device": "cuda", "deterministic": True, "cache": {"num_blocks": 200, "block_size": 8}, "capture_s": 0.0,
}  # fmt: skip
READY_S = 300.0
"""Longest start: kernels may have to be compiled."""
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}


def gpu(place: int) -> str:
    """The GPU of an engine: two where there are two, else one for both."""
    return str(place % torch.cuda.device_count())


def start(fleet: Fleet, name: str, role: str, place: int, *transports: str, block_size: int = 8) -> Served:
    transfer = {"listen": "127.0.0.1:0", "zone_blocks": 8, "key_file": str(fleet.folder / "key")}
    more = {"transports": transports} if transports else {}
    settings = ON_GPU | {"cache": {"num_blocks": 200, "block_size": block_size}}
    visible = {"CUDA_VISIBLE_DEVICES": gpu(place)}
    return fleet.start(name, role, environment=visible, transfer=transfer | more, **settings)


def until_ready(*served: Served) -> None:
    for one in served:
        wait_for(answers(one), "a ready engine", READY_S)
        wait_for(lambda one=one: one.status()["peer"] is not None, "the first report")  # type: ignore[misc]


def assert_split_as_whole(d: Served, p: Served, transport: str) -> None:
    """Ask both engines the same: blocks must travel by this transport, change no answer, and leave all slots free."""
    until_ready(d, p)
    for first in range(3, 9):
        body: dict[str, Any] = {"prompt": [first, *PROMPT]}
        assert texts(d.ask(p.endpoint, **body)) == texts(p.ask(**body))
    assert d.outcomes()["split"] > 0
    wait_for(lambda: p.status()["transfer"]["transport"] == transport, "the transport in use")
    wait_for(lambda: d.status()["transfer"]["free_slots"] == 8, "free slots")
    assert d.status()["transfer"]["refused_blocks"]["damaged"] == 0


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("gpus"))
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["cuda-ipc", "shared-memory", "tcp"])
def test_a_split_answer_is_that_of_one_engine(fleet: Fleet, transport: str) -> None:
    d = start(fleet, "d", "decode", 1, *([] if transport == "cuda-ipc" else [transport]))
    p = start(fleet, "p", "prefill", 0)
    assert_split_as_whole(d, p, transport)
    wait_for(lambda: d.status()["free_blocks"] == 200, "free blocks")


@pytest.mark.parametrize("transport", ["cuda-ipc", "shared-memory", "tcp"])
@pytest.mark.parametrize(("of_p", "of_d"), [(8, 16), (16, 8)])
def test_blocks_of_another_size_are_cut_and_joined(fleet: Fleet, transport: str, of_p: int, of_d: int) -> None:
    d = start(fleet, "d", "decode", 1, *([] if transport == "cuda-ipc" else [transport]), block_size=of_d)
    p = start(fleet, "p", "prefill", 0, block_size=of_p)
    assert_split_as_whole(d, p, transport)


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_killed_side_leaves_the_other_whole(fleet: Fleet, victim: str) -> None:
    made = {"d": start(fleet, "d", "decode", 1), "p": start(fleet, "p", "prefill", 0)}
    d, p = made["d"], made["p"]
    until_ready(d, p)
    whole = texts(p.ask(**LONG))
    assert texts(d.ask(p.endpoint, **LONG)) == whole
    free = torch.cuda.mem_get_info(int(gpu(1)))[0]
    other = made["p" if victim == "d" else "d"]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(d.ask, p.endpoint, **LONG | {"prompt": [40 + n, *PROMPT]}) for n in range(4)]
        wait_for(lambda: d.status()["transfer"]["receiving"] > 0 or all(one.done() for one in asked), "requests")
        os.kill(made[victim].core_pid(), signal.SIGKILL)
        if victim == "p":
            assert all(len(one.result()["choices"]) == BODY["n"] for one in asked)
    wait_for(lambda: other.status()["transfer"]["receiving"] == other.status()["transfer"]["helping"] == 0, "the end")
    assert texts(other.ask(**LONG)) == whole
    wait_for(lambda: other.status()["transfer"]["free_slots"] == 8, "free slots")
    if victim == "d":
        wait_for(lambda: torch.cuda.mem_get_info(int(gpu(1)))[0] > free, "the memory of the killed engine")
