"""Blocks between engines of several ranks: which cells travel where, their bytes, and the sum over all parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.prefill_desk import moves_of
from stoker.engine.ranks.block_calls import (
    BLOCK_CLASSES,
    BlocksOpened,
    CallEnded,
    ConnectRank,
    CopyCells,
    OpenFiles,
    ReadPart,
    SumCells,
    TierOpened,
    WriteCells,
    WritePart,
)
from stoker.engine.ranks.wire import pack, unpack
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.cells import CellBlocks, cell_rows, place_of
from stoker.engine.transfer.cuda_ipc import CudaIpcPort
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.joint_link import JointLink, JointTicket, Pair, pairs_of
from stoker.engine.transfer.landing_zone import Grant, Owner
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.local_blocks import HostBlocks
from stoker.engine.transfer.part_plan import WHOLE, Part, PartPlan, joined_sum, plan_parts
from stoker.engine.transfer.port import Cells, LayoutMismatch, Move, PortInfo
from stoker.engine.transfer.rank_zone import RankZone, SeenGenerations
from stoker.engine.transfer.repack import repack
from stoker.engine.transfer.shared_memory import SharedMemoryPort
from stoker.engine.transfer.tcp import TcpPort
from stoker.engine.transfer.ticket import LinkMeter, ThreadTicket, TransferError
from stoker.engine.transfer.zone_memory import SharedZone
from testing.engine.fake_device import FakeBlocks, FakeDevice
from testing.engine.transfers import FINGERPRINT, KEY, random_blocks, wait_for

HEADS = 4


def ranks_of(count: int, heads: int = HEADS, layers: Sequence[int] = (2,), block_size: int = 4) -> list[BlockLayout]:
    """The layouts of so many ranks of each stage. With more ranks than heads, neighbours hold the same one.

    `layers`: of each stage. Ranks are numbered from the last stage, as those of a replica.
    """
    each, copies = max(heads // count, 1), max(count // heads, 1)
    firsts = [rank // copies * each for rank in range(count)]
    stages = [(end - own, end) for own, end in zip(layers, itertools.accumulate(layers), strict=True)]
    return [
        BlockLayout(begin, end, block_size, first, first + each, 8, "bfloat16")
        for begin, end in reversed(stages)
        for first in firsts
    ]


@pytest.mark.parametrize(
    ("senders", "receivers", "plan"),
    [
        (1, 1, WHOLE),
        (2, 2, PartPlan((Part(0, 0, 0, 0), Part(1, 0, 1, 0)), (ONE_CELL,) * 2, (ONE_CELL,) * 2)),
        (1, 2, PartPlan((Part(0, 0, 0, 0), Part(0, 1, 1, 0)), (Grid(1, 2),), (ONE_CELL,) * 2)),
        (2, 1, PartPlan((Part(0, 0, 0, 0), Part(1, 0, 0, 1)), (ONE_CELL,) * 2, (Grid(1, 2),))),
    ],
)  # fmt: skip
def test_the_plan_of_parts(senders: int, receivers: int, plan: PartPlan) -> None:
    assert plan_parts(ranks_of(senders), ranks_of(receivers)) == plan


def test_ranks_with_copies_of_a_head_get_it_from_their_own_number() -> None:
    plan = plan_parts(ranks_of(4, heads=2), ranks_of(4, heads=2))
    assert [(part.sender, part.receiver) for part in plan.parts] == [(rank, rank) for rank in range(4)]
    fewer = plan_parts(ranks_of(4, heads=2), ranks_of(2, heads=2))
    assert [part.sender for part in fewer.parts] == [0, 3], "each of the copies sends"


def test_stages_that_are_alike_need_no_cut_and_others_as_few_as_they_can() -> None:
    uneven = ranks_of(2, layers=(3, 2))
    plan = plan_parts(uneven, uneven)
    assert not plan.repacks
    assert [(part.sender, part.receiver) for part in plan.parts] == [(rank, rank) for rank in range(4)]
    halves = plan_parts(ranks_of(1, layers=(4, 4)), ranks_of(1, layers=(8,)))
    assert (halves.cuts, halves.joins) == ((ONE_CELL, ONE_CELL), (Grid(2, 1),))
    assert [(part.sender, part.receiver_cell) for part in halves.parts] == [(1, 0), (0, 1)], (
        "rank 0 has the last layers"
    )
    both = plan_parts(ranks_of(2, layers=(6,)), ranks_of(1, layers=(2, 4)))
    assert (both.cuts, both.joins) == ((Grid(3, 1),) * 2, (Grid(2, 2), Grid(1, 2)))


def changed(layout: BlockLayout, **fields: int) -> BlockLayout:
    return BlockLayout(**{**layout.__dict__, **fields})


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ([changed(ranks_of(1)[0], head_dim=4)], "head_dim"),
        ([ranks_of(2)[0], changed(ranks_of(2)[1], block_size=8)], "block_size"),
        ([changed(ranks_of(1)[0], end_layer=1)], "ranks with layers 1 to 1 and heads 0 to 3"),
        ([changed(ranks_of(1)[0], end_head=3)], "heads of a rank"),
        ([changed(ranks_of(2)[0], first_head=1, end_head=3)] * 2, "ranks with layers 0 to 1 and heads 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(theirs: list[BlockLayout], field: str) -> None:
    with pytest.raises(LayoutMismatch) as refused:
        plan_parts(theirs, ranks_of(len(theirs)))
    assert refused.value.field == field


class Copied:
    """A link between two ranks whose bytes are there at once."""

    transport = "copied"
    lost: str | None = None

    def __init__(self, blocks: np.ndarray, zone: RankZone, layout: BlockLayout, cells: Cells) -> None:
        self.blocks, self.zone, self.joins = CellBlocks(HostBlocks(blocks), layout, cells.cuts), zone, cells.joins
        self.meter = LinkMeter()

    def write(self, moves: Sequence[Move], tag: bytes) -> ThreadTicket:
        ticket = ThreadTicket(len(moves) * self.blocks.block_bytes)
        for move, cell in zip(moves, self.blocks.read([move.local for move in moves]), strict=True):
            slot, number = divmod(move.remote, self.joins)
            assert self.zone.begin_write(Grant(slot, move.generation), "p", number)
            self.zone.cell_memory(slot, number, self.joins)[:] = cell.data
            self.zone.end_write(slot, number)
        ticket.complete()
        return ticket

    def close(self) -> None:
        pass


TOKENS = 24


@settings(max_examples=60, deadline=None)
@given(
    senders=st.sampled_from([1, 2, 4, 8]),
    receivers=st.sampled_from([1, 2, 4, 8]),
    stages=st.lists(st.sampled_from([(6,), (3, 3), (4, 2), (1, 3, 2), (2, 2, 2)]), min_size=2, max_size=2),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 12])] * 2),
    seed=st.integers(0, 999),
)
@example(senders=1, receivers=1, stages=[(6,), (6,)], sizes=(4, 4), seed=0)
@example(senders=2, receivers=1, stages=[(6,), (6,)], sizes=(4, 8), seed=1)
@example(senders=1, receivers=2, stages=[(3, 3), (6,)], sizes=(12, 3), seed=2)
@example(senders=1, receivers=1, stages=[(6,), (6,)], sizes=(6, 4), seed=3)
def test_joint_writes_give_what_repacking_gives_and_one_sum_tells(
    senders: int, receivers: int, stages: list[tuple[int, ...]], sizes: tuple[int, int], seed: int
) -> None:
    """Any widths and any sizes of blocks; the slow twin is `repack`."""
    sent, received = (
        ranks_of(count, layers=layers, block_size=size)
        for count, layers, size in zip((senders, receivers), stages, sizes, strict=True)
    )
    plan = plan_parts(sent, received)
    num_sent, num_received = (TOKENS // size for size in sizes)
    whole = ranks_of(1, layers=(6,), block_size=sizes[0])[0]
    blocks = random_blocks(num_sent, seed, whole)
    table = [(3 * block + seed) % num_sent for block in range(num_sent)] if num_sent % 3 else [*range(num_sent)]
    held = [random_blocks(num_sent, 0, one) for one in sent]
    for layout, own in zip(sent, held, strict=True):
        repack([(whole, dict(enumerate(blocks)))], layout, {index: own[table[index]] for index in range(num_sent)})
    zones = [RankZone(num_received, one.block_bytes) for one in received]
    caches = [random_blocks(num_received, 1, one) for one in received]
    link = JointLink(plan, {pair: linked(pair, held, zones, sent, plan) for pair in pairs_of(plan)})
    runs = [plan.runs(place, table) for place in range(num_received)]
    grants = [Grant(num_received - 1 - place, 1) for place in range(num_received)]
    ticket = link.write(list(moves_of(runs, grants)), b"r")
    assert ticket.done()
    assert ticket.error() is None
    stores = [HostStore(zone.memory_SN, cache, one) for zone, cache, one in zip(zones, caches, received, strict=True)]
    slots = [grant.slot for grant in grants]
    stored = [
        list(store.copy_cells(slots, range(num_received), grid)) for store, grid in zip(stores, plan.joins, strict=True)
    ]
    for layout, cache in zip(received, caches, strict=True):
        expected = random_blocks(num_received, 2, layout)
        repack([(whole, dict(enumerate(blocks)))], layout, dict(enumerate(expected)))
        assert (cache == expected).all()
    some = runs[seed % num_received :]
    sums = [
        HostStore(own[:0], own, one).cell_sums(plan.sources(some), grid)
        for own, one, grid in zip(held, sent, plan.cuts, strict=True)
    ]
    at_sender = plan.sent_sums(some, sums)
    assert plan.received_sums(stored)[seed % num_received :] == at_sender
    stored[-1][-1] ^= 1 << (seed % 64)
    assert plan.received_sums(stored)[-1] != at_sender[-1], "one damaged part is noticed"
    for zone in zones:
        zone.close()


def linked(
    pair: Pair, held: list[np.ndarray], zones: list[RankZone], sent: list[BlockLayout], plan: PartPlan
) -> Copied:
    return Copied(held[pair[0]], zones[pair[1]], sent[pair[0]], plan.cells(pair))


def test_a_sum_of_one_part_is_its_own_and_parts_do_not_change_places() -> None:
    assert joined_sum([7]) == 7
    assert joined_sum([7, 9]) != joined_sum([9, 7])


def test_a_joint_ticket_ends_with_its_last_part() -> None:
    first, last = ThreadTicket(10), ThreadTicket(20)
    both = JointTicket([first, last])
    first.complete(TransferError("lost"))
    assert (both.bytes, both.done(), both.error()) == (30, False, None), "a rank may still read its blocks"
    last.complete()
    assert both.done()
    assert str(both.error()) == "lost"


def test_a_rank_refuses_writes_that_are_older_than_what_it_has_seen() -> None:
    seen = SeenGenerations(2)
    assert seen.begin(Grant(0, 5), 0)
    assert seen.begin(Grant(0, 5), 1), "another rank's cell"
    assert not seen.begin(Grant(0, 5), 1), "twice at once"
    seen.end(0, 0)
    assert not seen.begin(Grant(0, 4), 0), "stale"
    assert seen.begin(Grant(0, 6), 0)
    assert not seen.begin(Grant(2, 1), 0), "no such slot"


Listening = SharedMemoryPort | TcpPort | CudaIpcPort


@pytest.mark.parametrize(
    "transport", ["shared-memory", "tcp", "cuda-ipc", "tcp to a device", "shared-memory to a device"]
)
@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (ranks_of(1), ranks_of(2)),
        (ranks_of(2), ranks_of(1)),
        (ranks_of(1, layers=(1, 1)), ranks_of(2)),
    ],
)
def test_cells_travel_by_sockets_into_one_zone(
    transport: str, sent: list[BlockLayout], received: list[BlockLayout], tmp_path: Path
) -> None:
    """Two writers fill the cells of one slot; one writer fills slots of two receivers."""
    plan = plan_parts(sent, received)
    ports: list[Listening] = []

    def port(name: str, layout: BlockLayout, blocks: np.ndarray) -> Listening:
        common = name, 1, FINGERPRINT, layout
        if "device" in transport or transport == "cuda-ipc":
            zone: SharedZone = DeviceZone(4, layout.block_bytes, FakeDevice(tmp_path))
        else:
            zone = SharedZone(4, layout.block_bytes, named=True)
        if transport == "cuda-ipc":
            assert isinstance(zone, DeviceZone)
            ports.append(CudaIpcPort(*common, FakeBlocks(blocks), zone, key=KEY, host="127.0.0.1"))
        elif transport.startswith("tcp"):
            ports.append(TcpPort(*common, blocks, zone, key=KEY, host="127.0.0.1"))
        else:
            (tmp_path / name).mkdir()
            ports.append(SharedMemoryPort(*common, blocks, zone, tmp_path / name))
        return ports[-1]

    def cell_in(zone: SharedZone, slot: int, cell: int, cells: int) -> bytes:
        """What the receiver copies from."""
        if not isinstance(zone, DeviceZone):
            return bytes(zone.cell_memory(slot, cell, cells))
        assert isinstance(zone.device, FakeDevice)
        slots_SN = zone.device.bytes_at(zone.address, zone.num_slots, zone.slot_bytes)
        return bytes(slots_SN[slot].reshape(cells, -1)[cell])

    whole = ranks_of(1)[0]
    blocks = random_blocks(2, 3, whole)
    held = [random_blocks(2, 0, one) for one in sent]
    for layout, own in zip(sent, held, strict=True):
        repack([(whole, dict(enumerate(blocks)))], layout, dict(enumerate(own)))
    writers = [port(f"p{rank}", one, own) for rank, (one, own) in enumerate(zip(sent, held, strict=True))]
    readers = [port(f"d{rank}", one, random_blocks(2, 1, one)) for rank, one in enumerate(received)]
    try:
        links = {
            pair: writers[pair[0]].connect(readers[pair[1]].describe(), plan.cells(pair)._replace(ranks=len(sent)))
            for pair in pairs_of(plan)
        }
        for reader in readers:
            for writer in {f"p{rank}/1" for rank in range(len(sent))}:
                with reader.zone.lock:
                    reader.zone.zone.grant(owner_of(writer), 1, reader.zone.clock(), 60.0)
        slots = {pair: grant_of(readers[pair[1]], f"p{pair[0]}/1") for pair in links}
        for pair, link in links.items():
            way = [part for part in plan.parts if (part.sender, part.receiver) == pair]
            grant = slots[pair]
            moves = [
                Move(
                    plan.cuts[pair[0]].cells + part.sender_cell,
                    grant.slot * plan.joins[pair[1]].cells + part.receiver_cell,
                    grant.generation,
                )
                for part in way
            ]
            ticket = link.write(moves, b"r")
            wait_for(ticket.done, "the write")
            assert ticket.error() is None
        for number, (reader, layout) in enumerate(zip(readers, received, strict=True)):
            expected = random_blocks(1, 9, layout)
            repack([(whole, {0: blocks[1]})], layout, {0: expected[0]})
            for part in (part for part in plan.parts if part.receiver == number):
                slot = slots[part.sender, number].slot
                grid = plan.joins[number]
                found = cell_in(reader.zone, slot, part.receiver_cell, grid.cells)
                rows = cell_rows(layout, expected[0], grid)[place_of(part.receiver_cell, grid)]
                assert found == np.ascontiguousarray(rows).tobytes()
    finally:
        for one in ports:
            one.close()


def owner_of(peer: str) -> Owner:
    return Owner(peer, "r")


def grant_of(port: Listening, peer: str) -> Grant:
    (slot,) = port.zone.zone.held(owner_of(peer))
    return Grant(slot, 1)


def test_calls_and_reports_of_blocks_are_packed() -> None:
    info = PortInfo("pod", 4, FINGERPRINT, ranks_of(2)[1], 8, (("tcp", b"h 1"),))
    for message in (
        ConnectRank(1, info, Cells(Grid(3, 2), 2, 2)),
        SumCells(1, (4, 5), Grid(3, 2)),
        CopyCells(1, (4,), (5,), ONE_CELL),
        WriteCells(2, 1, (Move(3, 4, 5),), b"tag"),
        BlocksOpened(info, 2, ""),
        BlocksOpened(None, 0, "taken"),
        CallEnded(3, (2**64 - 1, 0), 10, 0.5, ""),
        CallEnded(4, (), 0, 0.5, "TransferError: cut off", "damaged"),
        OpenFiles(FINGERPRINT, "tenant", ranks_of(1)[0]),
        WritePart(5, "/blocks", 6, b"d" * 32, b"p" * 32, (1, 2, 3)),
        ReadPart(6, "/blocks", 6, b"d" * 32, b"p" * 32, (1, 2, 3), tuple(map(part_of, ranks_of(2)))),
        TierOpened(ranks_of(2)[1], "host-memory", ""),
        TierOpened(None, "", "MemoryError: none is left"),
    ):
        found = unpack(pack(message))
        assert found == message
        assert [type(value) for value in found] == [type(value) for value in message]
        assert type(message) in BLOCK_CLASSES
