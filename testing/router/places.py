"""Engines as the choice of a pair sees them, without connections, and strategies that draw fleets of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from stoker.router.load import Load, Peer
from stoker.router.snapshot import Role
from stoker.router.standing import Standing, standing_of


def report(**fields: Any) -> Load:
    return Load(**{"epoch": "e", "seq": 0, "requests": 0, "waiting": 0, "waiting_tokens": 0, **fields})


def peer(**fields: Any) -> Peer:
    known: dict[str, Any] = {
        "endpoint": "h:1", "epoch": "e", "fingerprint": "fp", "block_size": 16, "block_bytes": 1 << 20,
        "transports": ("shared-memory", "tcp"), "host_id": "one", "handover_s": 0.02,
    }  # fmt: skip
    return Peer(**{**known, **fields})


@dataclass(eq=False)
class Engine:
    """One engine."""

    name: str
    role: Role = "colocated"
    load: Load | None = None
    pending: int = 0
    unstarted: tuple[int, ...] = ()
    silent: bool = False
    revision: str = "r1"

    @property
    def identity(self) -> tuple[str, str]:
        return self.name, "e"

    @property
    def standing(self) -> Standing:
        return standing_of(self)


PROMPTS = st.lists(st.integers(0, 200) | st.integers(0, 20_000), max_size=8).map(tuple)
PEERS = st.none() | st.builds(
    peer,
    fingerprint=st.sampled_from(["fp", "fp", "fp", "other"]),
    host_id=st.sampled_from(["", "one", "two"]),
    transports=st.sampled_from([(), ("tcp",), ("shared-memory",), ("cuda-ipc", "tcp")]),
    block_bytes=st.none() | st.integers(1, 1 << 24),
    handover_s=st.none() | st.floats(0, 1),
    link_bytes_per_s=st.none() | st.floats(1e6, 1e12),
)
REPORTS = st.builds(
    report,
    requests=st.integers(0, 80),
    waiting=st.integers(0, 20),
    waiting_tokens=st.integers(0, 50_000),
    prompts=PROMPTS,
    step_tokens=st.sampled_from([0, 512, 2048]),
    mixed_tokens=st.none() | st.integers(1, 512),
    prefill_tokens_per_s=st.none() | st.floats(100, 50_000),
    gap_s=st.none() | st.floats(0.001, 0.2),
    peer=PEERS,
)
LOADS = st.none() | REPORTS
FLEETS = st.lists(
    st.builds(
        Engine,
        st.just(""),
        st.sampled_from(["colocated", "prefill", "decode"]),
        LOADS,
        st.integers(0, 40),
        PROMPTS,
        st.booleans(),
        st.sampled_from(["r1", "r1", "r2"]),
    ),
    min_size=1,
    max_size=8,
)


def named(fleet: list[Engine]) -> list[Engine]:
    """Give each engine its own name; one with a young report is not silent."""
    for number, engine in enumerate(fleet):
        engine.name, engine.silent = str(number), engine.silent and engine.load is None
    return fleet
