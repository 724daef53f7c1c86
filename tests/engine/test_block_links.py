"""Links carry blocks whole into granted slots, and nothing else: in one process, over shared memory, over TCP,
by NIXL, and over a stand-in for the memory of GPUs."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.engine.transfer.checksum import raw_sums, seeded
from stoker.engine.transfer.intake import Announcement, Intake, host_copy
from stoker.engine.transfer.landing_zone import Grant, Owner, SlotState
from stoker.engine.transfer.port import BlockPort, LayoutMismatch, Link, Move, TransportRefused, connect_best
from stoker.engine.transfer.tcp import TcpPort
from stoker.engine.transfer.ticket import PeerLost, TransferError
from testing.engine.transfers import FINGERPRINT, KEY, LAYOUT, WAIT_S, Port, Ports, random_blocks, slots_of, wait_for
from testing.forked import forked

SECONDS = 600.0
MAPPED = ("shared-memory", "cuda-ipc", "nixl")
"""Here a writer can write anything: the checksum finds it."""


@pytest.fixture(params=["in-process", "shared-memory", "tcp", "cuda-ipc", "nixl"])
def ports(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ports]:
    made = Ports(request.param, tmp_path)
    yield made
    made.close()


def owner_of(writer: Port, request: str = "one") -> Owner:
    return Owner(writer.describe().peer, request)


def grants_for(receiver: Port, writer: Port, count: int, request: str = "one") -> list[Grant]:
    with receiver.zone.lock:
        return receiver.zone.zone.grant(owner_of(writer, request), count, receiver.zone.clock(), SECONDS)


def write(link: Link, blocks: list[int], grants: list[Grant], tag: bytes = b"") -> TransferError | None:
    moves = [Move(block, grant.slot, grant.generation) for block, grant in zip(blocks, grants, strict=True)]
    ticket = link.write(moves, tag)
    assert ticket.wait(WAIT_S)
    assert ticket.seconds >= 0
    return ticket.error()


def all_free(port: Port) -> bool:
    with port.zone.lock:
        port.zone.zone.expire(port.zone.clock())
        return port.zone.zone.credits == port.zone.num_slots


def test_blocks_arrive_with_their_tag_and_pass_the_intake(ports: Ports) -> None:
    blocks = random_blocks(6)
    writer, receiver = ports.make("writer", blocks), ports.make("receiver", random_blocks(1), slots=3)
    link = writer.connect(receiver.describe())
    assert link.transport == ports.transport
    cache_BN = np.zeros((5, LAYOUT.block_bytes), dtype=np.uint8)
    intake = Intake(
        receiver.zone.zone, owner_of(writer), host_copy(slots_of(receiver), cache_BN),
        target=lambda place: place + 1, seed=lambda place: 77 + place,
    )  # fmt: skip
    sums = [seeded(int(raw), 77 + place) for place, raw in enumerate(raw_sums(blocks[[4, 0, 5]]))]
    grants = grants_for(receiver, writer, 3)
    assert write(link, [4, 0, 5], grants, b"three") is None
    ((peer, tag, slots),) = receiver.arrivals()
    assert (peer, tag, slots) == (writer.describe().peer, b"three", tuple(grants))
    taken = intake.take([Announcement(i, grant, sums[i]) for i, grant in enumerate(grants)], receiver.zone.clock())
    assert (taken.sound, taken.again, taken.refused) == ([0, 1, 2], [], [])
    assert np.array_equal(cache_BN[1:4], blocks[[4, 0, 5]])
    assert receiver.zone.zone.credits == 3
    assert link.meter.bytes == 3 * LAYOUT.block_bytes
    assert link.meter.bytes_per_s
    assert link.lost is None


def test_a_block_of_another_generation_request_or_peer_is_refused(ports: Ports) -> None:
    blocks = random_blocks(2)
    writer, other = ports.make("writer", blocks), ports.make("other", random_blocks(2, seed=1))
    receiver = ports.make("receiver", random_blocks(1), slots=2)
    link, foreign = writer.connect(receiver.describe()), other.connect(receiver.describe())
    mine, late = grants_for(receiver, writer, 2)
    assert write(link, [0], [mine]) is None
    with receiver.zone.lock:
        receiver.zone.zone.revoke(owner_of(writer), receiver.zone.clock())
    refused_before = receiver.zone.zone.refused.total()
    for used, grant in ((link, late), (link, mine._replace(generation=9)), (foreign, mine)):
        assert "1 block" in str(write(used, [1], [grant])) or "0 of 1" in str(write(used, [1], [grant]))
    assert receiver.zone.zone.refused.total() > refused_before
    assert [arrival.slots for arrival in receiver.arrivals() if arrival.slots] == [((mine.slot, mine.generation),)]
    if ports.transport not in MAPPED:
        assert np.array_equal(slots_of(receiver)[mine.slot], blocks[0])


def test_a_damaged_block_is_asked_for_again_once_and_then_given_up(ports: Ports) -> None:
    blocks = random_blocks(1)
    writer, receiver = ports.make("writer", blocks), ports.make("receiver", random_blocks(1), slots=2)
    link = writer.connect(receiver.describe())
    cache_BN = np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8)
    total = int(raw_sums(blocks)[0])
    for heals in (True, False):
        intake = Intake(
            receiver.zone.zone, owner_of(writer), host_copy(slots_of(receiver), cache_BN),
            target=lambda place: place, seed=lambda place: 5,
        )  # fmt: skip
        (grant,) = grants_for(receiver, writer, 1)
        assert write(link, [0], [grant]) is None
        slots_of(receiver)[grant.slot, 3] ^= 1
        taken = intake.take([Announcement(0, grant, seeded(total, 5))], receiver.zone.clock())
        ((place, again),) = taken.again
        assert (place, taken.sound, again.slot) == (0, [], grant.slot)
        assert write(link, [0], [again]) is None
        if not heals:
            slots_of(receiver)[again.slot, 9] ^= 128
        second = intake.take([Announcement(0, again, seeded(total, 5))], receiver.zone.clock())
        assert (second.sound, second.lost, second.again) == (([0], [], []) if heals else ([], [0], []))
        assert receiver.zone.zone.credits == 2
    assert receiver.zone.zone.refused["damaged"] == 3


def test_a_pair_with_other_weights_is_refused_by_name(ports: Ports) -> None:
    writer = ports.make("writer", random_blocks(1))
    receiver = ports.make("receiver", random_blocks(1), fingerprint=FINGERPRINT[::-1])
    with pytest.raises(LayoutMismatch, match="fingerprint"):
        writer.connect(receiver.describe())
    claimed = receiver.describe()
    if ports.transport != "in-process":  # a snapshot that is out of date: the peer itself refuses
        stale = type(claimed)(**(claimed.__dict__ | {"fingerprint": FINGERPRINT}))
        with pytest.raises(LayoutMismatch, match="fingerprint"):
            writer.connect(stale)


def test_a_closed_peer_is_noticed_and_its_slots_are_free(ports: Ports) -> None:
    writer, receiver = ports.make("writer", random_blocks(1)), ports.make("receiver", random_blocks(1))
    link = writer.connect(receiver.describe())
    (grant,) = grants_for(receiver, writer, 1)
    receiver.close()
    wait_for(lambda: link.lost is not None, "the end of the link")
    assert isinstance(write(link, [0], [grant]), PeerLost)
    link.close()
    link.close()
    again = ports.make("receiver", random_blocks(1), epoch=2)
    link = writer.connect(again.describe())
    assert write(link, [0], grants_for(again, writer, 1)) is None
    with pytest.raises(TransportRefused):
        writer.connect(receiver.describe())
    writer.close()
    if ports.transport != "in-process":
        wait_for(lambda: all_free(again), "the slots of the writer that has gone")


def test_the_transport_is_named_and_a_demand_that_is_not_met_is_refused(ports: Ports) -> None:
    writer, receiver = ports.make("writer", random_blocks(1)), ports.make("receiver", random_blocks(1))
    mine: list[tuple[str, BlockPort]] = [("tcp", writer), (ports.transport, writer)]
    link = connect_best(mine[ports.transport == "tcp" :], receiver.describe())
    assert link.transport == ports.transport
    if ports.transport == "cuda-ipc":
        assert connect_best(mine, receiver.describe(), "nvlink").transport == "cuda-ipc"
        return
    with pytest.raises(TransportRefused, match=f"require: nvlink .*{ports.transport}: is not nvlink"):
        connect_best(mine[1:], receiver.describe(), "nvlink")


def test_another_key_or_garbage_gets_no_connection(tmp_path: Path) -> None:
    import socket

    ports = Ports("tcp", tmp_path)
    try:
        receiver = ports.make("receiver", random_blocks(1))
        assert isinstance(receiver, TcpPort)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(32) + b"\xff\xff\xff\x7f" + bytes(40)):
            with socket.create_connection(receiver.address, timeout=WAIT_S) as sock:
                sock.sendall(garbage)
        other = ports.make("other", random_blocks(1), key=KEY[::-1])
        with pytest.raises(TransportRefused):
            other.connect(receiver.describe())
        writer = ports.make("writer", random_blocks(1))
        assert write(writer.connect(receiver.describe()), [0], grants_for(receiver, writer, 1)) is None
        with pytest.raises(ValueError, match="32 secret bytes"):
            ports.make("open", random_blocks(1), key=bytes(32))
    finally:
        ports.close()


def write_for_ever(transport: str, folder: Path, peer: object, ready: object) -> None:
    """A writer that is killed."""
    from stoker.engine.transfer.port import PortInfo

    assert isinstance(peer, PortInfo)
    writer = Ports(transport, folder).make("doomed", random_blocks(1))
    link = writer.connect(peer)
    while True:
        assert link.write([Move(0, 0, 1)], b"again").wait(WAIT_S)
        ready.set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", ["shared-memory", "tcp", "cuda-ipc", "nixl"])
def test_a_killed_writer_frees_its_slots_and_the_receiver_goes_on(transport: str, tmp_path: Path) -> None:
    ports = Ports(transport, tmp_path)
    try:
        receiver = ports.make("receiver", random_blocks(1), slots=2)
        owner = Owner("doomed/1", "one")
        with receiver.zone.lock:
            receiver.zone.zone.grant(owner, 2, receiver.zone.clock(), SECONDS)
        context = forked()
        ready = context.Event()
        process = context.Process(target=write_for_ever, args=(transport, tmp_path, receiver.describe(), ready))
        process.start()
        assert ready.wait(WAIT_S)
        assert receiver.zone.zone.state(1) is SlotState.GRANTED
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        wait_for(lambda: all_free(receiver), "the slots of the killed writer")
        writer = ports.make("next", random_blocks(1))
        assert write(writer.connect(receiver.describe()), [0], grants_for(receiver, writer, 1)) is None
    finally:
        ports.close()


def test_a_port_without_descriptors_for_a_moment_takes_connections_afterwards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ports = Ports("tcp", tmp_path)
    receiver = ports.make("receiver", random_blocks(1))
    assert isinstance(receiver, TcpPort)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket() as waiting, caplog.at_level(logging.WARNING, "stoker.engine"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            waiting.connect(receiver.address)
            wait_for(lambda: "no connection can be taken" in caplog.text, "a refused connection")
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer = ports.make("writer", random_blocks(1))
        assert write(writer.connect(receiver.describe()), [0], grants_for(receiver, writer, 1)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ports.close()


def test_a_write_that_fails_by_a_defect_ends_its_link_and_not_its_thread_alone(tmp_path: Path) -> None:
    ports = Ports("cuda-ipc", tmp_path)
    receiver, writer = ports.make("receiver", random_blocks(1)), ports.make("writer", random_blocks(2))
    defects = [RuntimeError("not foreseen")]

    def fails(call: str) -> bool:
        if call == "wait" and defects:
            raise defects.pop()
        return False

    try:
        link = writer.connect(receiver.describe())
        ports.devices["writer"].fails = fails
        error = write(link, [0, 1], grants_for(receiver, writer, 2))
        assert isinstance(error, PeerLost)
        assert "RuntimeError: not foreseen" in str(error)
        assert link.lost is not None
        wait_for(lambda: all_free(receiver), "free slots")
    finally:
        ports.close()
