"""The link between GPUs on a stand-in for their memory: order, faults of every call, deaths, and memory given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.core.handover.open_desk import TRANSPORTS, unmet
from stoker.engine.transfer.cuda_ipc import CudaIpcLink, CudaIpcPort
from stoker.engine.transfer.device_memory import Copy, DeviceError, merged
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.landing_zone import Grant, LandingZone, Owner, SlotState
from stoker.engine.transfer.part_plan import WHOLE
from stoker.engine.transfer.port import Arrival, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import LATE_S
from stoker.engine.transfer.ticket import PeerLost, ThreadTicket, TransferError
from testing.engine.fake_device import FakeBlocks, FakeDevice
from testing.engine.transfers import FINGERPRINT, KEY, LAYOUT, WAIT_S, Ports, random_blocks, slots_of, wait_for

SIZE = LAYOUT.block_bytes


class Pair:
    """A writer and a receiver, each with a device of its own."""

    def __init__(self, folder: Path) -> None:
        self.ports = Ports("cuda-ipc", folder)
        self.blocks = random_blocks(6)
        self.writer, self.receiver = self._make("writer", self.blocks), self._make("receiver", random_blocks(1))

    def _make(self, name: str, blocks: np.ndarray) -> CudaIpcPort:
        port = self.ports.make(name, blocks, slots=6)
        assert isinstance(port, CudaIpcPort)
        return port

    def device(self, name: str) -> FakeDevice:
        return self.ports.devices[name]

    def connect(self) -> CudaIpcLink:
        return self.writer.connect(self.receiver.describe())

    def post(self, link: CudaIpcLink, blocks: list[int]) -> tuple[ThreadTicket, list[Grant]]:
        with self.receiver.zone.lock:
            grants = self.receiver.zone.zone.grant(
                Owner("writer/1", "r"), len(blocks), self.receiver.zone.clock(), 600.0
            )
        moves = [Move(block, grant.slot, grant.generation) for block, grant in zip(blocks, grants, strict=True)]
        return link.write(moves, b""), grants


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.ports.close()
    assert [device.num_mapped for device in made.ports.devices.values()] == [0, 0], "memory is left"
    assert [device.pinned for device in made.ports.devices.values()] == [set(), set()]


def ended(ticket: ThreadTicket) -> TransferError | None:
    assert ticket.wait(WAIT_S)
    return ticket.error()


def test_writes_that_wait_together_end_in_order_and_whole(pair: Pair) -> None:
    link = pair.connect()
    posted = [pair.post(link, blocks) for blocks in ([0, 1, 2], [5], [3, 4])]
    assert [ended(ticket) for ticket, _ in posted] == [None] * 3
    found = slots_of(pair.receiver)
    for (_, grants), blocks in zip(posted, ([0, 1, 2], [5], [3, 4]), strict=True):
        assert np.array_equal(found[[grant.slot for grant in grants]], pair.blocks[blocks])
    assert [copy.num_bytes // SIZE for copy in pair.device("writer").copied] == [1] * 6
    assert link.meter.bytes == 6 * SIZE


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30, unique_by=lambda one: one[1]))
def test_joined_copies_move_the_same_bytes(moves: list[tuple[int, int]]) -> None:
    copies = [Copy(source * 8, 1000 + target * 8, 8) for source, target in moves]

    def places(some: list[Copy]) -> list[tuple[int, int]]:
        return [(one.source + at, one.target + at) for one in some for at in range(one.num_bytes)]

    assert places(merged(copies)) == places(copies)
    assert all(
        (one.source + one.num_bytes, one.target + one.num_bytes) != (two.source, two.target)
        for one, two in zip(merged(copies), merged(copies)[1:], strict=False)
    )


@pytest.mark.parametrize("call", ["post", "wait"])
def test_a_copy_that_fails_ends_the_link_and_all_that_waits(pair: Pair, call: str) -> None:
    link = pair.connect()
    assert ended(pair.post(link, [0])[0]) is None
    pair.device("writer").fails = lambda now: now == call
    tickets = [pair.post(link, [block])[0] for block in (1, 2, 3)]
    errors = [ended(ticket) for ticket in tickets]
    assert all(isinstance(error, PeerLost) for error in errors), errors
    assert f"{call}: made to fail" in str(errors[0])
    assert link.lost is not None
    pair.device("writer").fails = lambda _: False
    link.close()
    wait_for(lambda: "writer/1" in pair.receiver.lost_peers(), "the end at the receiver")
    assert pair.connect().lost is None  # not before: an engine that is connected anew is not lost


def test_grants_are_checked_while_the_copies_run(pair: Pair) -> None:
    """Nothing but the copies is waited for at their end."""
    link = pair.connect()
    taken: list[Arrival] = []

    def held_up(call: str) -> bool:
        def checked() -> bool:
            taken.extend(pair.receiver.arrivals())
            return bool(taken)

        if call == "wait":
            wait_for(checked, "the receiver's check")
        return False

    pair.device("writer").fails = held_up
    ticket, (grant,) = pair.post(link, [3])
    assert ended(ticket) is None
    assert [one.slots for one in taken] == [((grant.slot, grant.generation),)]
    assert np.array_equal(slots_of(pair.receiver)[grant.slot], pair.blocks[3])


EVENTS = ("write", "write", "write", "fail post", "fail wait", "heal", "receiver ends", "close", "connect")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=14))
def test_every_write_ends_and_all_memory_comes_back(
    events: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = Pair(tmp_path_factory.mktemp("events"))
    link, fails, alive = pair.connect(), set[str](), True
    pair.device("writer").fails = lambda call: call in fails
    posted: list[tuple[ThreadTicket, Grant, int]] = []
    for number, event in enumerate(events):
        if event == "write" and pair.receiver.zone.zone.credits:
            ticket, (grant,) = pair.post(link, [number % len(pair.blocks)])
            posted.append((ticket, grant, number % len(pair.blocks)))
        elif event.startswith("fail"):
            fails.add(event.removeprefix("fail "))
        elif event == "heal":
            fails.clear()
        elif event == "receiver ends" and alive:
            alive = False
            check_written(pair, posted)
            pair.receiver.close()
        elif event == "close":
            link.close()
        elif event == "connect" and alive and link.lost is not None:
            link.close()
            link = pair.connect()
    if alive:
        check_written(pair, posted)
    link.close()
    assert all(ticket.wait(WAIT_S) for ticket, _, _ in posted)
    pair.ports.close()
    assert [device.num_mapped for device in pair.ports.devices.values()] == [0, 0]


def check_written(pair: Pair, posted: list[tuple[ThreadTicket, Grant, int]]) -> None:
    """A write that has ended well is in its slot, whole."""
    for ticket, grant, block in posted:
        if ended(ticket) is None:
            assert np.array_equal(slots_of(pair.receiver)[grant.slot], pair.blocks[block])


def test_a_zone_that_cannot_be_mapped_is_refused_with_the_drivers_word(pair: Pair) -> None:
    pair.device("writer").fails = lambda call: call == "open"
    with pytest.raises(TransportRefused, match="cuda-ipc: open: made to fail"):
        pair.connect()
    pair.device("writer").fails = lambda _: False
    assert ended(pair.post(pair.connect(), [0])[0]) is None


def test_a_peer_of_another_host_is_refused(pair: Pair) -> None:
    pair.device("receiver").host_id = "elsewhere"
    with pytest.raises(TransportRefused, match="another host"):
        pair.connect()


def test_a_dead_receiver_gets_its_memory_back_when_the_link_is_closed(pair: Pair) -> None:
    link = pair.connect()
    assert ended(pair.post(link, [0, 1])[0]) is None
    late, _ = pair.post(link, [2])
    pair.receiver.close()
    wait_for(lambda: link.lost is not None, "the end of the link")
    ended(late)
    assert isinstance(ended(pair_write(link)), PeerLost)
    assert pair.device("writer").num_mapped == 2  # its own zone and the dead one's
    link.close()
    link.close()
    assert pair.device("writer").num_mapped == 1


def pair_write(link: CudaIpcLink) -> ThreadTicket:
    return link.write([Move(0, 0, 1)], b"")


def test_slots_of_a_lost_writer_rest_until_its_copies_cannot_arrive() -> None:
    zone, owner, other = LandingZone(4), Owner("gone/1", "r"), Owner("here/1", "r")
    grants, kept = zone.grant(owner, 3, 0.0, 5.0), zone.grant(other, 1, 0.0, 5.0)
    zone.announce(grants[0], owner, 1.0)
    zone.announce(grants[1], owner, 1.0)
    zone.begin_copy(grants[1])
    zone.detach("gone/1", 1.0 + LATE_S)
    assert zone.state(grants[0].slot) is SlotState.FREE
    assert zone.credits == 1, "the copied slot is in use, the unwritten one may still be written"
    zone.end_copy(grants[1])
    assert zone.credits == 2
    zone.expire(1.0 + LATE_S / 2)
    assert zone.state(grants[2].slot) is SlotState.QUARANTINED
    zone.expire(1.0 + LATE_S)
    assert zone.credits == 3
    assert zone.state(kept[0].slot) is SlotState.GRANTED
    assert zone.audit().faults == ()


@pytest.mark.parametrize("call", ["allocate", "export"])
def test_a_zone_without_memory_is_an_error_and_leaves_nothing(tmp_path: Path, call: str) -> None:
    device = FakeDevice(tmp_path)
    device.fails = lambda now: now == call
    with pytest.raises(DeviceError, match=call):
        DeviceZone(4, SIZE, device)
    assert device.num_mapped == 0
    assert list(tmp_path.iterdir()) == []


class Engine:
    """The ports of an engine on a device, by rule."""

    def __init__(self, folder: Path, name: str, blocks: np.ndarray, host_id: str = "host") -> None:
        (folder / name).mkdir()
        self.device = FakeDevice(folder, host_id)
        self.zone = DeviceZone(4, SIZE, self.device)
        self.blocks = blocks
        self.ports = HostPorts(
            FINGERPRINT, LAYOUT, FakeBlocks(blocks), self.zone, pod_uid=name, folder=folder / name,
            host="127.0.0.1", port=0, key=KEY, require="any", transports=TRANSPORTS["cuda"],
        )  # fmt: skip


def without(info: PortInfo, *transports: str) -> PortInfo:
    kept = tuple(one for one in info.endpoints if one[0] not in transports)
    return PortInfo(**(info.__dict__ | {"endpoints": kept}))


def test_the_fastest_way_that_works_is_used_and_every_way_ends_in_the_devices_zone(tmp_path: Path) -> None:
    blocks = random_blocks(9)
    d, p = Engine(tmp_path, "d", random_blocks(1)), Engine(tmp_path, "p", blocks)
    try:
        info = d.ports.info
        assert [name for name, _ in info.endpoints] == ["cuda-ipc", "shared-memory", "tcp"]
        for missing, expected in (
            ((), "cuda-ipc"),
            (("cuda-ipc",), "shared-memory"),
            (("cuda-ipc", "shared-memory"), "tcp"),
        ):
            link = p.ports.connect((without(info, *missing),), WHOLE).result(WAIT_S)
            assert link.transport == expected
            with d.zone.lock:
                grants = d.zone.zone.grant(Owner(p.ports.info.peer, expected), 2, d.zone.clock(), 600.0)
            ticket = link.write([Move(7 + n, grant.slot, grant.generation) for n, grant in enumerate(grants)], b"")
            assert ticket.wait(WAIT_S)
            assert ticket.error() is None
            found = d.device.bytes_at(d.zone.address, 4, SIZE)[[grant.slot for grant in grants]]
            assert np.array_equal(found, blocks[7:9]), expected
            with d.zone.lock:
                d.zone.zone.bury(p.ports.info.peer)
        assert {name for name, (sent, _) in p.ports.meters().items() if sent} == {"cuda-ipc", "shared-memory", "tcp"}
        p.device.fails = lambda call: call == "open"  # such as between containers that may not map each other's memory
        assert p.ports.connect((info,), WHOLE).result(WAIT_S).transport == "shared-memory"
    finally:
        p.ports.close()
        d.ports.close()
    assert (d.device.num_mapped, p.device.num_mapped) == (0, 0)


def test_nvlink_is_met_by_a_gpu_with_links_alone() -> None:
    ways = TRANSPORTS["cuda"]
    assert unmet("nvlink", ways, 18) == unmet("any", ways, 0) == ""
    assert unmet("nvlink", ways, 0) == "transfer.require is nvlink; this GPU has no active NVLink"
    assert unmet("nvlink", ("tcp",), 18) == "transfer.require is nvlink; this engine offers tcp"
    assert unmet("rdma", ways, 18) == "transfer.require is rdma; this engine offers cuda-ipc, shared-memory, tcp"
    assert unmet("rdma", ("nixl",), 0, 2) == ""
    assert unmet("rdma", ("nixl",), 18, 0) == "transfer.require is rdma; this host shows no active RDMA port"
