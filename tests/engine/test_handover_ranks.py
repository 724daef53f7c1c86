"""Engines of one rank, of two tensor ranks and of two stages in two pods, as processes: prompts that one computes for
the other, whatever the two have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from testing.engine.transfers import wait_for
from testing.free_port import free_port
from tests.engine.test_handover_served import BODY, Fleet, Served, answers, texts

START_S = 600.0
"""Ten processes import torch at once."""


class Engines(NamedTuple):
    one: Served
    """Of one rank."""
    two: Served
    """Of two ranks, like `other`."""
    other: Served
    staged: Served
    """Of two stages, each in a pod of its own."""
    eight: Served
    """Of one rank, with blocks of eight tokens; the others' have four."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    fleet = Fleet(tmp_path_factory.mktemp("ranks"))
    try:
        wide: dict[str, Any] = {"parallelism": {"tensor": 2}}
        made = Engines(
            start(fleet, "one", "decode", "nixl", "shared-memory"),
            fleet.start("two", "decode", **wide),
            start(fleet, "o", "prefill", "nixl", "shared-memory", **wide),
            start_pods(fleet, "staged", "prefill"),
            fleet.start("eight", "prefill", cache={"num_blocks": 200, "block_size": 8}),
        )
        for served in made:
            wait_for(answers(served), "a ready engine", START_S)
            wait_for(lambda served=served: served.status()["peer"] is not None, "a report", START_S)  # type: ignore[misc]
        yield made
    finally:
        fleet.close()


def start(fleet: Fleet, name: str, role: str, *transports: str, **settings: Any) -> Served:
    key = str(fleet.folder / "key")
    transfer = {"listen": "127.0.0.1:0", "zone_blocks": 8, "key_file": key, "transports": transports}
    return fleet.start(name, role, transfer=transfer, **settings)


def start_pods(fleet: Fleet, name: str, role: str) -> Served:
    """The leader of two pods with a stage each. The other pod ends with the fleet."""
    port = free_port()
    shape: dict[str, Any] = {
        "parallelism": {"pipeline": 2},
        "replica": {"pods": 2, "key_file": str(fleet.folder / "key")},
        "device": "cpu",
    }
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fleet.start(f"{name}-1", role, place | {"STOKER_NODE_RANK": "1"}, **shape)
    return fleet.start(name, role, place | {"STOKER_NODE_RANK": "0"}, **shape)


@pytest.mark.parametrize(
    ("decodes", "prefills", "transport"),
    [
        ("two", "other", "shared-memory"),
        ("two", "one", "shared-memory"),
        ("one", "other", "nixl"),
        ("one", "staged", "shared-memory"),
        ("staged", "other", "shared-memory"),
        ("two", "eight", "shared-memory"),
        ("eight", "other", "shared-memory"),
    ],
)
def test_a_split_answer_is_that_of_one_engine(engines: Engines, decodes: str, prefills: str, transport: str) -> None:
    """Two ranks to two, one to two, two to one; stages to one rank, and tensor ranks to stages; large blocks of one
    rank to small ones of two, and back. What was answered alone is what a rank's own numbers give."""
    d, p = getattr(engines, decodes), getattr(engines, prefills)
    before, tries = d.outcomes()["split"], iter(range(1000))

    def is_split() -> bool:
        number = next(tries)
        body: dict[str, Any] = {"prompt": [3 + (7 + number) * place % 290 for place in range(90)]}
        assert texts(d.ask(p.endpoint, **body)) == texts(engines.one.ask(**body))
        return bool(d.outcomes()["split"] > before)

    wait_for(is_split, "a split request", START_S)  # on a busy machine P may not answer in time at first
    for served in (d, p):
        wait_for(lambda served=served: served.status()["transfer"]["free_slots"] == 8, "free slots")  # type: ignore[misc]
        wait_for(lambda served=served: served.status()["free_blocks"] == 200, "free blocks")  # type: ignore[misc]
    wait_for(lambda: p.status()["transfer"]["bytes_per_s"].get(transport, 0) > 0, "the measured speed")
    assert d.status()["transfer"]["fallbacks"].get("damaged", 0) == 0


def test_a_killed_rank_ends_its_engine_and_the_other_side_finishes_alone(engines: Engines) -> None:
    """A further rank of P is stopped while it should send blocks, then killed. The last test: P is gone."""
    d, p = engines.two, engines.other
    body: dict[str, Any] = {"prompt": [5 + 19 * place % 290 for place in range(90)]}
    whole = texts(engines.one.ask(**body))
    rank, endpoint = p.status()["ranks"][1]["pid"], p.endpoint
    os.kill(rank, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(d.ask, endpoint, **body)
        wait_for(lambda: d.status()["transfer"]["receiving"] == 1 or asked.done(), "the request at P")
        os.kill(rank, signal.SIGKILL)
        assert texts(asked.result()) == whole
    wait_for(lambda: p.process.poll() is not None or not reachable(p), "the end of P")
    wait_for(lambda: d.status()["transfer"]["free_slots"] == 8, "free slots")
    wait_for(lambda: d.status()["free_blocks"] == 200, "free blocks")
    assert texts(d.ask(**BODY)) == texts(engines.one.ask(**BODY))


def reachable(served: Served) -> bool:
    try:
        return httpx.get(f"{served.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False
