"""Hand-over over real sockets: messages by ZeroMQ with keys, blocks by shared memory and by TCP, in one process."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq

from stoker.engine.config import EngineConfig, Transport
from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.messages import Beat
from stoker.engine.core.handover.office import Front, Gone, Letter, LocalPort
from stoker.engine.core.handover.open_desk import open_desk, unmet
from stoker.engine.core.handover.peer_post import PeerPost, curve_keys
from stoker.engine.core.messages import AddRequest
from stoker.engine.execution.executor import OnDevice
from stoker.engine.key_file import read_key
from stoker.engine.plan import EnginePlan
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.in_process import Network
from stoker.engine.transfer.landing_zone import Owner
from stoker.engine.transfer.part_plan import WHOLE, PartPlan
from stoker.engine.transfer.port import Link, Move, PortInfo
from stoker.engine.transfer.zone_memory import SharedZone
from stoker.pod.config_file import ConfigError, parse
from testing.engine.audits import assert_sound
from testing.engine.stations import FACTS, Clock, Mail, Station, memory_of
from testing.engine.transfers import LAYOUT, random_blocks, wait_for

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
PROMPT = tuple(range(40, 79))
PARAMS = SamplingParams(n=2, temperature=1.1, seed=5, max_tokens=14, logprobs=2)


def slow_clock() -> float:
    """A tenth of the time that passes, so that a busy machine runs into no limit."""
    return time.monotonic() / 10


class SlowDials:
    """Ports whose links may be open only when a test says so."""

    def __init__(self, ports: HostPorts) -> None:
        self._ports = ports
        self.slow = False
        self.dialled: list[tuple[Sequence[PortInfo], PartPlan, Future[Link]]] = []
        self.describe, self.lost_peers, self.meters, self.close = (
            ports.describe, ports.lost_peers, ports.meters, ports.close,
        )  # fmt: skip

    def connect(self, peer: Sequence[PortInfo], plan: PartPlan) -> Future[Link]:
        if not self.slow:
            return self._ports.connect(peer, plan)
        link: Future[Link] = Future()
        self.dialled.append((peer, plan, link))
        return link

    def open(self) -> None:
        for peer, plan, link in self.dialled:
            link.set_result(self._ports.connect(peer, plan).result())


class Wired:
    """Stations whose posts and ports are real."""

    def __init__(self, make_engine: Callable[..., Any], folder: Path) -> None:
        self.make_engine, self.folder = make_engine, folder
        self.execution: dict[str, Any] = {}
        """As `make_engine` takes it; default: a step is done when it is submitted."""
        self.stations: list[Station] = []
        self.clock: Callable[[], float] = slow_clock

    def station(
        self, name: str, *transports: Transport, key: bytes = KEY, wrap: Callable[[HostPorts], LocalPort] = lambda p: p
    ) -> Station:
        engine = self.make_engine(chunk=16, **self.execution)
        engine.clock = self.clock
        data = engine.executor.runner.cache.data
        cache_BN = data.view(data.shape[0], -1).view(torch.uint8).numpy()
        zone = SharedZone(4, cache_BN.shape[1], named=True, clock=self.clock)
        post = PeerPost("127.0.0.1", 0, curve_keys(key))
        (self.folder / name).mkdir()
        layout = memory_of(engine)[1]
        ports = HostPorts(
            FACTS.digest, layout, cache_BN, zone, pod_uid=name, folder=self.folder / name, host="127.0.0.1", port=0,
            key=key, require="any", transports=transports or ("shared-memory", "tcp"),
        )  # fmt: skip
        store = HostStore(zone.memory_SN, cache_BN, layout)
        made = Station.over(f"127.0.0.1:{post.port}", engine, zone, post, wrap(ports), store)
        self.stations.append(made)
        return made

    def run(self, done: Callable[[], bool], what: str) -> None:
        def turn() -> bool:
            for station in self.stations:
                station.turn()
            return done()

        wait_for(turn, what)


@pytest.fixture
def wired(make_engine: Callable[..., Any], tmp_path: Path) -> Iterator[Wired]:
    made = Wired(make_engine, tmp_path)
    yield made
    for station in made.stations:
        station.desk.close()


AS_ON_A_GPU: dict[str, Any] = {"execute": OnDevice, "overlap": True}


@pytest.mark.parametrize("execution", [{}, AS_ON_A_GPU], ids=["in process", "on device"])
@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_a_split_answer_is_that_of_one_engine(wired: Wired, transport: Transport, execution: dict[str, Any]) -> None:
    wired.execution = execution
    d, p = wired.station("d", transport), wired.station("p")
    d.ask(AddRequest("r", PROMPT, PARAMS, time.monotonic(), prefill=p.name))

    def turn() -> bool:
        d.turn()
        stats = p.desk.stats()
        if stats.helping > stats.helping_waiting:  # a first token is out: without more of them all blocks must come
            p.desk.turn()
        else:
            p.turn()
        return d.tally.outcomes["split"] == 1

    wait_for(turn, "the takeover")
    wired.run(lambda: d.idle, "the answer")
    wired.run(lambda: p.idle, "the end at the other engine")
    alone = Station("alone:1", wired.make_engine(), Mail(), Network(), Clock())
    alone.ask(AddRequest("r", PROMPT, PARAMS, 0.0))
    while not alone.idle:
        alone.turn()
    assert [(one.tokens, one.ends) for one in d.answers["r"]] == [(one.tokens, one.ends) for one in alone.answers["r"]]
    assert d.tally.outcomes.total() == 1, d.tally
    sent = 9 * memory_of(d.engine)[1].block_bytes
    wired.run(lambda: p.desk.stats().bytes[transport] == sent, "the count")  # by the link's thread, with the answer
    assert p.desk.stats().rates[transport] > 0
    for station in (d, p):
        assert_sound(station.engine.scheduler.audit())
        wired.run(lambda station=station: station.zone.zone.credits == 4, "free slots")  # type: ignore[misc]


@pytest.mark.parametrize("execution", [{}, AS_ON_A_GPU], ids=["in process", "on device"])
def test_a_desk_opens_on_every_executor_of_one_rank(
    make_engine: Callable[..., Any], tmp_path: Path, execution: dict[str, Any]
) -> None:
    engine = make_engine(**execution)
    config = parse(EngineConfig, {"model": {"path": "m"}, "transfer": {"listen": "127.0.0.1:0", "zone_blocks": 4}})
    plan = cast(EnginePlan, SimpleNamespace(digest="ab", device="cpu", kernels="reference"))
    front = Front(lambda *_: None, lambda *_: None, lambda *_: None)
    desk = open_desk(config, engine, plan, tmp_path, front, time.monotonic)
    assert desk is not None
    try:
        desk.turn()
        stats = desk.stats()
        assert (stats.transports, stats.zone_slots, stats.unmet) == (("shared-memory", "tcp"), 4, "")
    finally:
        desk.close()


def test_an_engine_with_another_key_is_not_let_in(wired: Wired) -> None:
    d, p = wired.station("d"), wired.station("p", key=OTHER_KEY)
    d.ask(AddRequest("r", PROMPT, PARAMS, time.monotonic(), prefill=p.name))
    wired.run(lambda: d.idle, "the answer")
    assert (d.tally.reasons["unreachable"], p.tally.helps.total()) == (1, 0)
    assert [one.ends for one in d.answers["r"]] != [[], []]


def test_an_engine_that_ends_is_noticed_at_once(wired: Wired) -> None:
    d, p = wired.station("d"), wired.station("p")
    d.ask(AddRequest("r", PROMPT, PARAMS, time.monotonic(), prefill=p.name))
    wired.run(lambda: d.idle, "the answer")
    p.desk.close()
    wired.stations.remove(p)
    wired.run(lambda: not d.desk.decode.peers, "the end of the peer")
    d.ask(AddRequest("again", tuple(range(90, 130)), PARAMS, time.monotonic(), prefill=p.name))
    wired.run(lambda: d.idle, "the answer without it")
    assert d.tally.reasons["unreachable"] + d.tally.reasons["lost"] == 1
    wired.run(lambda: d.zone.zone.credits == 4, "free slots")


class TestPeersThatComeAgain:
    """A prefill engine that was silent for a while, and whose old connections end after the new ones have begun."""

    @pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
    def test_the_end_of_an_old_connection_does_not_end_the_new_one(self, wired: Wired, transport: Transport) -> None:
        clock = wired.clock = Clock()
        d, p = wired.station("d", transport), wired.station("p")
        self.split(wired, d, p, "first", PROMPT)
        for _ in range(12):  # P stands still, until it is tried again
            clock.now_s += 1.0
            d.turn()
        assert not d.desk.decode.peers
        self.split(wired, d, p, "second", tuple(range(90, 129)))
        (peer,) = d.desk.decode.peers
        for _ in range(12):
            clock.now_s += 1.0
            wired.run(lambda: peer.heard_s == clock.now_s or peer not in d.desk.decode.peers, "a sign of life")
            assert peer in d.desk.decode.peers
        wired.run(lambda: len(p.desk.prefill.callers) == 1, "the end of the old connection")
        assert d.tally.reasons["lost"] == 0
        wired.run(lambda: d.zone.zone.credits == 4, "free slots")

    def test_an_old_connection_stays_until_the_new_one_is_open(self, wired: Wired) -> None:
        """Also where that takes longer than silence may: its end alone would be the prefill engine's."""
        clock = wired.clock = Clock()
        made: list[SlowDials] = []

        def wrap(ports: HostPorts) -> LocalPort:
            made.append(SlowDials(ports))
            return made[-1]

        d, p = wired.station("d", "shared-memory"), wired.station("p", wrap=wrap)
        self.split(wired, d, p, "first", PROMPT)
        for _ in range(12):
            clock.now_s += 1.0
            d.turn()
        unread = p.desk.office.post.wakers
        wait_for(lambda: any(cast(zmq.Socket[bytes], one).poll(0) for one in unread), "a beat")  # else d was silent
        made[0].slow = True
        self.split(wired, d, p, "second", tuple(range(90, 129)))
        (peer,) = d.desk.decode.peers
        for _ in range(12):
            clock.now_s += 1.0
            wired.run(lambda: peer.heard_s == clock.now_s or peer not in d.desk.decode.peers, "a sign of life")
        assert len(p.desk.prefill.callers) == 2
        made[0].open()
        wired.run(lambda: len(p.desk.prefill.callers) == 1, "the end of the old connection")
        assert peer in d.desk.decode.peers
        self.split(wired, d, p, "third", tuple(range(140, 179)))

    def split(self, wired: Wired, d: Station, p: Station, name: str, prompt: tuple[int, ...]) -> None:
        d.ask(AddRequest(name, prompt, PARAMS, 0.0, prefill=p.name))
        wired.run(lambda: d.idle and p.idle, "the answer")
        assert d.tally.outcomes["local"] == 0


def test_posts_keep_the_order_and_tell_of_the_end() -> None:
    listening, calling = PeerPost("127.0.0.1", 0, None), PeerPost("127.0.0.1", 0, None)
    try:
        endpoint = f"127.0.0.1:{listening.port}"
        for number in range(50):
            calling.call(endpoint, Beat(number))
        got: list[Letter] = []
        wait_for(lambda: _more(got, listening) == 50, "fifty messages")
        assert [letter.message for letter in got] == [Beat(number) for number in range(50)]
        listening.answer(got[0].peer, Beat(7))
        back: list[Letter] = []
        wait_for(lambda: _more(back, calling) == 1, "the answer")
        assert (back[0].peer, back[0].message) == (endpoint, Beat(7))
        listening.close()
        wait_for(lambda: _more(back, calling) == 2, "the end")
        assert isinstance(back[1].message, Gone)
    finally:
        calling.close()
        listening.close()


def _more(letters: list[Letter], post: PeerPost) -> int:
    letters += post.letters()
    return len(letters)


def test_a_taken_port_is_named() -> None:
    first = PeerPost("127.0.0.1", 0, None)
    try:
        with pytest.raises(OSError, match="Address already in use"):
            PeerPost("127.0.0.1", first.port, None)
    finally:
        first.close()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"short", "64 hexadecimal digits, are needed, got a file of 5 bytes"),
        (bytes(32), "not all zero, .*, got a file of 32 bytes"),
        (b"ab" * 31, "got a file of 62 bytes"),
        (b"\xff" * 64, "got a file of 64 bytes"),
    ],
)
def test_a_key_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_key(str(tmp_path / "key"))


def test_a_key_file_holds_bytes_or_digits(tmp_path: Path) -> None:
    for content in (KEY, KEY.hex().encode() + b"\n"):
        (tmp_path / "key").write_bytes(content)
        assert read_key(str(tmp_path / "key")) == KEY
    with pytest.raises(ConfigError, match=r"transfer\.key_file /gone: No such file or directory$"):
        read_key("/gone")


def test_a_demand_that_is_not_met_has_a_reason() -> None:
    assert unmet("any", ("tcp",)) == ""
    assert unmet("nvlink", ("shared-memory", "tcp")) == (
        "transfer.require is nvlink; this engine offers shared-memory, tcp"
    )


@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_of_a_link_that_has_ended_only_what_it_has_carried_is_kept(tmp_path: Path, transport: Transport) -> None:
    made: list[HostPorts] = []
    for name in ("writer", "receiver"):
        (tmp_path / name).mkdir()
        zone = SharedZone(2, LAYOUT.block_bytes, named=True)
        made.append(
            HostPorts(
                FACTS.digest, LAYOUT, random_blocks(1), zone, pod_uid=name, folder=tmp_path / name, host="127.0.0.1",
                port=0, key=KEY, require="any", transports=(transport,),
            )
        )  # fmt: skip
    writer, receiver = made
    try:
        link = writer.connect(receiver.describe(), WHOLE).result()
        with receiver.zone.lock:
            owner = Owner(writer.info.peer, "r")
            (grant,) = receiver.zone.zone.grant(owner, 1, receiver.zone.clock(), 600.0)
        ticket = link.write([Move(0, grant.slot, grant.generation)], b"")
        wait_for(ticket.done, "the write")
        link.close()
        ended = weakref.ref(link)
        del link, ticket
        other = writer.connect(receiver.describe(), WHOLE).result()
        gc.collect()
        assert ended() is None
        assert writer.meters()[transport][0] == LAYOUT.block_bytes
        assert other.lost is None
    finally:
        for ports in made:
            ports.close()
