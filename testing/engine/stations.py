"""Engines that hand requests over to each other in one process: real engines and desks, made-up network and clock.

A `Mail` carries messages in order, and does to them what a test asks for: hold, drop, repeat, delay. Blocks travel over
`Network`, which can hold writes, too.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import CALLER, Desk
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.messages import PeerHello, PeerMessage, pack_peer, unpack_peer
from stoker.engine.core.handover.office import BlockStore, Front, Gone, Letter, LocalPort, Office, Post
from stoker.engine.core.messages import AddRequest, Delta, Outputs
from stoker.engine.errors import RequestRefused
from stoker.engine.execution.executor import InProcess, OnDevice
from stoker.engine.execution.runner import Runner
from stoker.engine.transfer.fingerprint import Fingerprint
from stoker.engine.transfer.in_process import InProcessPort, Network
from stoker.engine.transfer.joint_link import JointLink
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import Link, PortInfo
from stoker.engine.transfer.socket_port import LATE_S
from stoker.engine.transfer.ticket import TransferError
from stoker.engine.transfer.zone_memory import LockedZone, SharedZone
from testing.engine.digest_runner import DigestRunner
from testing.engine.late_store import LateStore

FACTS = Fingerprint("weights", "1", "model", "float32", 2, 2, 16)


class Clock:
    """Time that passes when a test lets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Mail:
    """Messages between stations, each way of each pair in order."""

    def __init__(self) -> None:
        self.boxes: dict[str, deque[Letter]] = defaultdict(deque)
        """Delivered and not yet read, by endpoint."""
        self.under_way: list[tuple[str, Letter]] = []
        """(endpoint, letter) in the order of sending."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of endpoints between which nothing is delivered."""
        self.alive: set[str] = set()
        self.tamper: Callable[[PeerMessage], PeerMessage | None] = lambda message: message
        """What becomes of a message on its way; None: it is lost."""
        self.holds = False

    def send(self, source: str, target: str, as_name: str, message: PeerMessage) -> None:
        sent = self.tamper(unpack_peer(pack_peer(message)))
        if sent is not None and frozenset((source, target)) not in self.cut:
            self.under_way.append((target, Letter(as_name, sent)))
        if not self.holds:
            self.deliver(len(self.under_way))

    def deliver(self, count: int) -> None:
        for target, letter in self.under_way[:count]:
            if target in self.alive:
                self.boxes[target].append(letter)
        del self.under_way[:count]

    def repeat(self, chooser: random.Random) -> None:
        """Deliver a message that is under way once more, later."""
        if self.under_way:
            self.under_way.append(chooser.choice(self.under_way))

    def swap(self, chooser: random.Random) -> None:
        """Let two neighbours change places."""
        if len(self.under_way) > 1:
            place = chooser.randrange(len(self.under_way) - 1)
            self.under_way[place : place + 2] = reversed(self.under_way[place : place + 2])

    def kill(self, endpoint: str) -> None:
        """The process is gone: its connections end, as the system sees to."""
        self.alive.discard(endpoint)
        self.boxes.pop(endpoint, None)
        self.under_way = [(target, one) for target, one in self.under_way if target != endpoint]
        for other in self.alive:
            if frozenset((endpoint, other)) not in self.cut:
                self.boxes[other] += [Letter(endpoint, Gone("closed")), Letter(CALLER + endpoint, Gone("closed"))]


class Postman:
    """One station's end of the mail."""

    wakers = ()

    def __init__(self, mail: Mail, endpoint: str) -> None:
        self.mail, self.endpoint = mail, endpoint
        mail.alive.add(endpoint)

    def call(self, endpoint: str, message: PeerMessage) -> None:
        self.mail.send(self.endpoint, endpoint, CALLER + self.endpoint, message)

    def answer(self, caller: str, message: PeerMessage) -> None:
        self.mail.send(self.endpoint, caller.removeprefix(CALLER), self.endpoint, message)

    def letters(self) -> list[Letter]:
        box = self.mail.boxes[self.endpoint]
        letters = list(box)
        box.clear()
        return letters

    def hang_up(self, endpoint: str) -> None:
        if endpoint in self.mail.alive and frozenset((self.endpoint, endpoint)) not in self.mail.cut:
            self.mail.under_way.append((endpoint, Letter(CALLER + self.endpoint, Gone("hung up"))))
            if not self.mail.holds:
                self.mail.deliver(len(self.mail.under_way))

    def close(self) -> None:
        self.mail.kill(self.endpoint)


class OnePort:
    """An in-process port whose links open at once."""

    def __init__(self, port: InProcessPort) -> None:
        self.port = port
        self.lost: list[str] = []

    def describe(self) -> tuple[PortInfo]:
        return (self.port.describe(),)

    def connect(self, peer: Sequence[PortInfo], plan: PartPlan) -> Future[Link]:
        opened: Future[Link] = Future()
        try:
            link = self.port.connect(peer[0], plan.cells((0, 0)))
            opened.set_result(JointLink(plan, {(0, 0): link}) if plan.repacks else link)
        except TransferError as error:
            opened.set_exception(error)
        return opened

    def lost_peers(self) -> Sequence[str]:
        lost, self.lost = self.lost, []
        return lost

    def meters(self) -> dict[str, tuple[int, float]]:
        return {}

    def close(self) -> None:
        self.port.close()


@dataclass
class Answer:
    """What a client has got of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[str, int | None]] = field(default_factory=list)


class Station:
    """One engine with its desk, as a core has them."""

    def __init__(
        self, name: str, engine: LLMEngine, mail: Mail, network: Network, clock: Clock, *, slots: int = 8,
        facts: Fingerprint = FACTS, epoch: int = 1, late: random.Random | None = None,
        hello: Callable[..., PeerHello] = PeerHello,
    ) -> None:  # fmt: skip
        """`late`: blocks are copied as a device does it, with delays by this chance. `hello`: how it introduces itself,
        from the fields of `PeerHello`."""
        self.mail, self.network = mail, network
        engine.clock = clock
        cache_BN, layout = memory_of(engine)
        zone = SharedZone(slots, layout.block_bytes, clock=clock)
        self.port = OnePort(InProcessPort(network, name, epoch, facts.digest, layout, cache_BN, zone))
        host = HostStore(zone.memory_SN, cache_BN, layout)
        self.device = LateStore(host, late) if late is not None else None
        self._open(name, engine, zone, Postman(mail, name), self.port, facts, self.device or host, hello)

    @classmethod
    def over(
        cls, name: str, engine: LLMEngine, zone: LockedZone, post: Post, port: LocalPort, store: BlockStore
    ) -> Station:
        """A station with a post, ports and blocks of its own; its clock is the engine's."""
        station = cls.__new__(cls)
        station.device = None
        station._open(name, engine, zone, post, port, FACTS, store)
        return station

    def _open(
        self, name: str, engine: LLMEngine, zone: LockedZone, post: Post, port: LocalPort, facts: Fingerprint,
        store: BlockStore, hello: Callable[..., PeerHello] = PeerHello,
    ) -> None:  # fmt: skip
        self.name, self.engine, self.zone = name, engine, zone
        first, *others = port.describe()
        front = Front(self.add, self.withdraw, self.send)
        office = Office(
            engine, hello(first, facts, "host", tuple(others)), zone, store, port, post, front, engine.clock
        )
        self.desk = Desk(office, endpoint=name)
        self.tally = office.tally
        self.answers: dict[str, list[Answer]] = {}
        self.refusals: dict[str, RequestRefused] = {}
        self.alive = True

    # What the core does.

    def add(self, front: str, request: AddRequest) -> None:
        try:
            if request.prefill and self.desk.take(front, request):
                return
            self.engine.add_request(
                request.request_id, request.prompt_tokens, request.params, priority=request.priority,
                place=request.place, arrival_s=request.arrival_s, front=front, resumed=request.resumed,
            )  # fmt: skip
        except RequestRefused as refused:
            if Desk.is_peer(front):
                self.desk.prefill.refused(front, request.request_id, str(refused))
            else:
                self.refusals[request.request_id] = refused

    def withdraw(self, front: str, request_id: str) -> None:
        self.engine.withdraw(request_id, front=front)

    def send(self, front: str, outputs: Outputs) -> None:
        if Desk.is_peer(front):
            self.desk.deliver(front, outputs)
            return
        for delta in outputs.deltas:
            self._note(delta)

    def _note(self, delta: Delta) -> None:
        answer = self.answers[delta.request_id][delta.choice]
        answer.tokens += delta.tokens
        answer.logprobs += [one.logprob for one in delta.logprobs or ()]
        if delta.finish_reason is not None:
            answer.ends.append((delta.finish_reason, delta.stop_token))

    def ask(self, request: AddRequest) -> None:
        self.answers[request.request_id] = [Answer() for _ in range(request.params.n)]
        self.add("f0", request)

    def abort(self, request_id: str) -> None:
        deltas = self.desk.abort("f0", request_id) or self.engine.abort_request(request_id, front="f0")
        self.send_all(deltas)

    def turn(self) -> None:
        if self.device is not None:
            self.device.pass_time()
        self.desk.turn()
        if self.device is not None:
            self.device.begin_step()
        if self.engine.has_unfinished:
            self.send_all(self.engine.step())

    def send_all(self, addressed: Sequence[tuple[str, Delta]]) -> None:
        by_front = defaultdict(list)
        for front, delta in addressed:
            by_front[front].append(delta)
        for front, deltas in by_front.items():
            self.send(front, Outputs(tuple(deltas)))

    @property
    def idle(self) -> bool:
        return not self.engine.has_unfinished and not self.desk.num_open

    def kill(self) -> None:
        self.alive = False
        self.mail.kill(self.name)
        self.network.ports.pop(self.port.describe()[0].peer, None)

    def notice_death(self, other: Station) -> None:
        """What sockets do when a process ends: its slots are free, and the desk is told."""
        peer = other.port.describe()[0].peer
        if self.network.mapped:
            self.zone.detach(peer, LATE_S)
        else:
            self.zone.bury(peer)
        self.port.lost.append(peer)


def memory_of(engine: LLMEngine) -> tuple[np.ndarray, BlockLayout]:
    """The cache as [blocks, block_bytes] uint8, and the layout of a block."""
    assert isinstance(engine.executor, InProcess | OnDevice)
    runner = engine.executor.runner
    if isinstance(runner, DigestRunner):
        (cache_BN,) = runner.caches
        return cache_BN, runner.layout
    assert isinstance(runner, Runner)
    data = runner.cache.data
    layers, _, size, heads, dim = data.shape[1:]
    cache_BN = data.view(data.shape[0], -1).view(torch.uint8).numpy()
    return cache_BN, BlockLayout(0, layers, size, 0, heads, dim, "float32")
