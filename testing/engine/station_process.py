"""One engine that hands requests over, as a process: real desk, sockets and block writes; a made-up model.

The parent sends commands over a pipe and gets what clients would get. It may kill or stop the process at any moment.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from stoker.engine.config import Transport
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.host_ports import HostPorts, new_epoch
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.office import BlockStore, LocalPort
from stoker.engine.core.handover.peer_post import PeerPost, curve_keys
from stoker.engine.core.messages import AddRequest, Delta
from stoker.engine.execution.executor import InProcess
from stoker.engine.ranks.block_calls import OpenBlocks
from stoker.engine.transfer.zone_memory import LockedZone, SharedZone
from testing.engine.audits import assert_sound
from testing.engine.digest_runner import DigestRunner
from testing.engine.handover_histories import BLOCK, make_engine
from testing.engine.ranks_here import RanksHere, head_layouts
from testing.engine.stations import FACTS, Station, memory_of

KEY = bytes(range(32))
IDLE_S = 0.001


@dataclass(frozen=True)
class StationFacts:
    """What a station is started with."""

    name: str
    """Its pod's uid; never used twice."""
    folder: str
    blocks: int
    chunk: int
    slots: int
    transports: tuple[Transport, ...]
    ranks: int = 1
    block_size: int = BLOCK


@dataclass(frozen=True)
class Started:
    endpoint: str


@dataclass(frozen=True)
class Refused:
    request_id: str
    problem: str


@dataclass(frozen=True)
class Audited:
    """What an idle station holds, once nothing of it is under way."""

    owned: int
    faults: tuple[str, ...]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    """Of what was computed without its peer."""


Told = Started | Refused | Audited | Delta


class StationClock:
    """The time of the machine, or a later one."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class ProcessStation(Station):
    """A station that passes on what its clients get."""

    news: list[Told]
    clock: StationClock
    ports: list[HostPorts]
    """Of each rank."""

    def _note(self, delta: Delta) -> None:
        super()._note(delta)
        self.news.append(delta)


def open_station(facts: StationFacts) -> ProcessStation:
    """Listen on ports of its own."""
    engine = make_engine(facts.blocks, facts.chunk, facts.block_size, facts.ranks)
    clock = engine.clock = StationClock()
    post = PeerPost("127.0.0.1", 0, curve_keys(KEY))
    (Path(facts.folder) / facts.name).mkdir()
    zone, port, store, ports = (open_one if facts.ranks == 1 else open_ranks)(facts, engine, clock)
    station = ProcessStation.over(f"127.0.0.1:{post.port}", engine, zone, post, port, store)
    assert isinstance(station, ProcessStation)
    station.clock, station.ports = clock, ports
    station.news = [Started(station.name)]
    return station


Opened = tuple[LockedZone, LocalPort, BlockStore, list[HostPorts]]


def open_one(facts: StationFacts, engine: LLMEngine, clock: StationClock) -> Opened:
    """The zone, the ports and the blocks of an engine of one rank."""
    cache_BN, layout = memory_of(engine)
    zone = SharedZone(facts.slots, layout.block_bytes, named=True, clock=clock)
    ports = HostPorts(
        FACTS.digest, layout, cache_BN, zone, pod_uid=facts.name, folder=Path(facts.folder) / facts.name,
        host="127.0.0.1", port=0, key=KEY, require="any", transports=facts.transports,
    )  # fmt: skip
    return zone, ports, HostStore(zone.memory_SN, cache_BN, layout), [ports]


def open_ranks(facts: StationFacts, engine: LLMEngine, clock: StationClock) -> Opened:
    """The same of several ranks."""
    assert isinstance(engine.executor, InProcess)
    runner = engine.executor.runner
    assert isinstance(runner, DigestRunner)
    here = RanksHere(runner.caches, head_layouts(runner.layout, facts.ranks))
    folder = str(Path(facts.folder) / facts.name)
    group = here.open(
        OpenBlocks(
            FACTS.digest, facts.name, new_epoch(), facts.slots, folder, "127.0.0.1", 0, KEY, "any", facts.transports
        ),
        clock,
    )
    return group.zone, group, group, here.ports


def cut_links(station: ProcessStation) -> None:
    """Break all connections over which peers write blocks to one rank, as a network does; messages go on."""
    for port in station.ports[-1]._ports:
        with port._lock:
            for one in port._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def run_station(facts: StationFacts, parent: Connection) -> None:
    """Serve until the parent ends it."""
    station = open_station(facts)
    audits = 0
    while True:
        while parent.poll(IDLE_S if station.idle and not station.news else 0):
            match parent.recv():
                case AddRequest() as request:
                    station.ask(request)
                case ("abort", str(request_id)):
                    station.abort(request_id)
                case ("drain",):
                    station.send_all(list(_given_up(station)))
                case ("break", str(endpoint)):
                    station.desk.office.post.hang_up(endpoint)
                case ("cut",):
                    cut_links(station)
                case ("pass", float(seconds)):
                    station.clock.ahead_s += seconds
                case ("audit",):
                    audits += 1
        station.turn()
        for request_id, refusal in list(station.refusals.items()):
            station.news.append(Refused(request_id, str(refusal)))
            del station.refusals[request_id]
        if audits and _holds_nothing(station):
            audits -= 1
            station.news.append(_audited(station))
        for one in station.news:
            parent.send(one)
        station.news.clear()


def _given_up(station: Station) -> Iterator[tuple[str, Delta]]:
    """End everything that the engine computes for others."""
    for front, name in list(station.engine.requests):
        if front.startswith("peer "):
            yield from station.engine.abort_request(name, front=front)


def _holds_nothing(station: Station) -> bool:
    """Whether nothing of its own or of its peers is under way, also no write of a prompt whose owner has gone on."""
    callers = station.desk.prefill.callers.values()
    helping = any(caller.helps or caller.closing for caller in callers)
    return station.idle and not helping and station.zone.zone.credits == station.zone.num_slots


def _audited(station: Station) -> Audited:
    audit = station.engine.scheduler.audit()
    assert_sound(audit)
    return Audited(
        audit.owned, tuple(map(str, station.desk.faults())), dict(station.tally.outcomes), dict(station.tally.reasons)
    )
