"""Generated histories of hand-over under kills, cuts, delays, repeats, reordering, cancels and drains.

The full number: `python -m testing.engine.handover_histories 1000`; of processes `python -m
testing.engine.process_histories 20`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.listen_address import parse_listen
from stoker.engine.plan_checks import refuse_transfer
from stoker.pod.config_file import ConfigError, parse
from testing.engine.handover_histories import BLOCK, run_histories
from testing.engine.process_histories import ProcessHistory, run_process_histories

HISTORIES = 60
PROCESS_HISTORIES = 3


def test_histories_lose_nothing_double_nothing_and_leave_nothing() -> None:
    events, outcomes = run_histories(0, HISTORIES)
    happened = ("on devices", "kill p", "kill d", "cut", "repeat", "swap", "late block", "cancel", "drain p", "resume",
                "structured")  # fmt: skip
    assert all(events[name] for name in happened)
    assert all(outcomes[name] for name in ("split", "prefill_only", "local", "cancelled", "local lost", "local silent"))
    assert outcomes["refused late"] > 0
    assert outcomes["refused damaged"] + outcomes["refused stale"] > 0


def test_histories_of_processes_lose_nothing_double_nothing_and_leave_nothing() -> None:
    events, outcomes = run_process_histories(0, PROCESS_HISTORIES)
    assert all(events[name] for name in ("kill p", "kill d", "stop", "break", "cut", "cancel", "drain"))
    assert outcomes["split"] + outcomes["prefill_only"] > 0


def test_engines_of_two_ranks_find_each_other_again_after_every_loss(tmp_path: Path) -> None:
    """Links of one rank cut on either side, messages cut, and either engine started anew: each helps the other again,
    within the time that a peer that was lost rests."""
    history = ProcessHistory(5, str(tmp_path), shape=(2, BLOCK))
    losses: dict[str, Callable[[], None]] = {
        "links to d": lambda: history.d.send(("cut",)),
        "links to p": lambda: history.p.send(("cut",)),
        "messages": lambda: history.d.send(("break", history.p.endpoint)),
        "p": lambda: history.kill(history.p),
        "d": lambda: history.kill(history.d),
    }
    try:
        history.meet()
        for lose in losses.values():
            lose()
            history.meet()
        history.settle()
    finally:
        history.close()
    history.check()
    assert history.outcomes["split"] + history.outcomes["prefill_only"] > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert parse_listen(f"{host}:7000", keyed=False) == (host.strip("[]"), 7000)


@pytest.mark.parametrize(
    ("settings", "device", "problem"),
    [
        ({"transfer": {"listen": "0.0.0.0:7000"}}, "cpu", "needs transfer.key_file; without one only loopback"),
        ({"transfer": {"listen": "7000"}}, "cpu", "must be host:port with a port from 0 to 65533, got '7000'"),
        ({"transfer": {"listen": "127.0.0.1:65534"}}, "cpu", "must be host:port with a port from 0 to 65533"),
        ({"transfer": {"listen": "127.0.0.1:0", "transports": ["cuda-ipc"]}}, "cpu", "cuda-ipc needs device cuda"),
        (
            {"transfer": {"listen": "127.0.0.1:0", "transports": ["cuda-ipc", "nixl", "tcp"]}},
            "cuda",
            "transfer.transports: cuda-ipc, nixl and tcp need three ports, a rank has two: leave one out",
        ),
        ({"cache": {"prefix_cache": False}}, "cuda", "transfer.listen needs cache.prefix_cache, got false"),
        ({"cache": {"prefix_cache": False}}, "cpu", "transfer.listen needs cache.prefix_cache, got false"),
        (
            {"parallelism": {"tensor": 2}, "replica": {"pods": 2}},
            "cpu",
            "transfer.key_file is needed with replica.pods 2",
        ),
        (
            {"parallelism": {"tensor": 2}, "transfer": {"listen": "127.0.0.1:65533"}},
            "cpu",
            "with parallelism.tensor 2 and pipeline 1 its port must be at most 65531, got 65533",
        ),
        (
            {"parallelism": {"tensor": 2, "data": 3}, "transfer": {"listen": "127.0.0.1:65522"}},
            "cpu",
            "with parallelism.tensor 2 and pipeline 1 in 3 copies its port must be at most 65521, got 65522",
        ),
    ],
)
def test_what_hand_over_cannot_do_is_refused(settings: dict[str, object], device: str, problem: str) -> None:
    base = {"model": {"path": "m"}, "transfer": {"listen": "127.0.0.1:0"}}
    with pytest.raises(ConfigError) as refused:
        refuse_transfer(parse(EngineConfig, base | settings), device)
    assert problem in str(refused.value)
