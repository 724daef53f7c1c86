"""The link between two GPUs, without engines: milliseconds until blocks of Qwen3-8B's cache are verified at the other.

A writer (first GPU) and a receiver (second GPU) are processes that see one GPU each. 8,192 and 32,768 tokens are 128
and 512 blocks of 9 MiB; the landing zone has 256 slots. `verified`: from the first copy's posting until the last
block is in the receiver's cache and its checksum, of what was stored, equals the sender's. `copied`: the copies alone.
`cut`: each block in two cells of half of its heads, as between engines of other widths. Run by `bench.gpu.pd_gpu`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from stoker.engine.core.handover.device_store import DeviceStore
from stoker.engine.core.handover.pieces import pieces
from stoker.engine.transfer.cuda_ipc import CudaIpcPort
from stoker.engine.transfer.cuda_memory import CudaMemory, DeviceBlocks
from stoker.engine.transfer.device_zone import DeviceZone
from stoker.engine.transfer.intake import Announcement, Intake
from stoker.engine.transfer.joint_link import JointLink
from stoker.engine.transfer.landing_zone import Grant, Owner
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.part_plan import WHOLE, Part, PartPlan
from stoker.engine.transfer.port import Link, Move

LAYOUT = BlockLayout(0, 36, 64, 0, 8, 128, "bfloat16")
SLOTS, BLOCKS = 256, 512
KEY, FINGERPRINT = b"k" * 32, b"f" * 32
ROUNDS = 12
HALVES = Grid(heads=2)
PLANS = {"verified": WHOLE, "cut": PartPlan((Part(0, 0, 0, 0), Part(0, 1, 0, 1)), (HALVES,), (HALVES,))}


def measure_link(gpus: tuple[str, str]) -> dict[str, Any]:
    """All figures of the link; `gpus`: what writer and receiver see."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    control, of_writer = context.Pipe()
    receiver = context.Process(target=receive, args=(gpus[1], theirs, of_writer), daemon=True)
    writer = context.Process(target=write, args=(gpus[0], control), daemon=True)
    for process, gpu in ((receiver, gpus[1]), (writer, gpus[0])):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # a driver that has begun takes no other
        process.start()
    try:
        if not ours.poll(120):
            return {"failed": "no result in 120 s"}
        return dict(ours.recv())
    finally:
        writer.kill()
        receiver.kill()


class Side:
    """One process's memory and port."""

    def __init__(self, gpu: str, name: str, slots: int) -> None:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu, "set before the process began"
        device = torch.device("cuda", 0)
        self.cache_BN = torch.randint(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=torch.uint8, device=device)
        self.memory = CudaMemory(device, "host")
        self.zone = DeviceZone(slots, LAYOUT.block_bytes, self.memory)
        zone_SN = self.memory.tensor(self.zone.address, slots, LAYOUT.block_bytes)
        self.store = DeviceStore(zone_SN, self.cache_BN, LAYOUT, fused=True)
        blocks = DeviceBlocks(self.cache_BN, self.memory)
        self.port = CudaIpcPort(name, 1, FINGERPRINT, LAYOUT, blocks, self.zone, key=KEY, host="127.0.0.1")


def write(gpu: str, pipe: Connection) -> None:
    """The writer: fills the slots it is given, and announces them as their copies end."""
    side = Side(gpu, "writer", 1)
    peer = pipe.recv()
    pair = (0, 0)
    links: dict[str, Link] = {
        name: JointLink(plan, {pair: side.port.connect(peer, plan.cells(pair))}) for name, plan in PLANS.items()
    }
    pipe.send({"nvlinks": side.memory.nvlinks, "batch": side.memory.driver.batch})
    batch = side.memory.driver.batch
    flying: list[tuple[list[tuple[int, int, int]], Any, Any, int]] = []
    while True:
        if not flying or pipe.poll(0):
            kind, work = pipe.recv()
            if kind == "batch":
                side.memory.driver.batch = batch if work else None
                continue
            if kind == "copy":
                pipe.send(copied(links["verified"], work))
                continue
            work, ends, way = work
            posted_s = time.monotonic()
            places = list(pieces(len(work), LAYOUT.block_bytes, ends=ends))
            tickets = [links[way].write([Move(*one) for one in work[place]], b"") for place in places]
            sums = side.store.sums([[block] for block, _, _ in work], PLANS[way])
            flying += [
                (work[place], ticket, sums, place.start) for place, ticket in zip(places, tickets, strict=True)
            ]  # fmt: skip
            pipe.send(("posted", posted_s, time.monotonic() - posted_s))
        while flying and flying[0][1].done() and flying[0][2].done():
            piece, ticket, sums, first = flying.pop(0)
            assert ticket.error() is None, ticket.error()
            pipe.send(("ready", piece, sums.values()[first : first + len(piece)]))


def copied(link: Any, work: list[tuple[int, int, int]]) -> float:
    """Seconds of one write of all these blocks, without sums."""
    began_s = time.monotonic()
    ticket = link.write([Move(*one) for one in work], b"")
    ticket.wait()
    assert ticket.error() is None, ticket.error()
    return time.monotonic() - began_s


def receive(gpu: str, results: Connection, pipe: Connection) -> None:
    """The receiver: gives slots, takes what is announced, and measures."""
    side = Side(gpu, "receiver", SLOTS)
    pipe.send(side.port.describe())
    facts: dict[str, Any] = dict(pipe.recv())
    facts["sums_ms"], facts["copy_and_sum_ms"] = device_times(side)
    for batched in (True, False):
        pipe.send(("batch", batched))
        name = "batched" if batched else "one_by_one"
        facts[name] = {f"copied_{blocks * 64}_ms": copies(side, pipe, blocks) for blocks in (128, 256)}
    pipe.send(("batch", True))
    for way, blocks in itertools.product(PLANS, (128, 512)):
        rounds = [verified(side, pipe, blocks, way) for _ in range(ROUNDS)]
        warm = [one[0] for one in rounds[2:]]
        facts[f"{way}_{blocks * 64}_ms"] = {
            "p50": round(1000 * statistics.median(warm), 3), "max": round(1000 * max(warm), 3),
            "posting": round(1000 * statistics.median(one[1] for one in rounds[2:]), 3),
        }  # fmt: skip
    results.send(facts)


def device_times(side: Side) -> tuple[float, float]:
    """Milliseconds of the GPU for sums of 128 blocks, and for copies with sums."""
    rows = list(range(128))
    found = []
    for work in (lambda: side.store.cell_sums(rows, ONE_CELL), lambda: side.store.copy_cells(rows, rows, ONE_CELL)):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            began_s = time.monotonic()
            work().values()
            times.append(time.monotonic() - began_s)
        found.append(round(1000 * min(times), 3))
    return found[0], found[1]


def grants_of(side: Side, count: int) -> list[Grant]:
    with side.zone.lock:
        return side.zone.zone.grant(Owner("writer/1", "r"), count, side.zone.clock(), 600.0)


def copies(side: Side, pipe: Connection, blocks: int) -> dict[str, float]:
    times = []
    for _ in range(6):
        grants = grants_of(side, blocks)
        pipe.send(("copy", [(index, grant.slot, grant.generation) for index, grant in enumerate(grants)]))
        times.append(pipe.recv())
        with side.zone.lock:
            side.zone.zone.bury("writer/1")
    best = min(times)
    return {"ms": round(1000 * best, 3), "gb_s": round(blocks * LAYOUT.block_bytes / best / 1e9, 1)}


def verified(side: Side, pipe: Connection, blocks: int, way: str) -> tuple[float, float]:
    """(seconds from the first posting until the last block is verified, seconds of posting)."""
    intake = Intake(
        side.zone.zone, Owner("writer/1", "r"), side.store.copier(PLANS[way]), target=lambda place: place,
        seed=lambda _: 0,
    )  # fmt: skip
    begun_s, posting_s, given, sound = None, 0.0, 0, 0
    while sound < blocks:
        if given < blocks and (grants := grants_of(side, blocks - given)):
            work = [(given + i, grant.slot, grant.generation) for i, grant in enumerate(grants)]
            given += len(grants)
            pipe.send(("write", (work, given == blocks, way)))
        announced = []
        while pipe.poll(0):
            message = pipe.recv()
            if message[0] == "posted":
                begun_s = message[1] if begun_s is None else begun_s
                posting_s += message[2]
                continue
            ready = zip(message[1], message[2], strict=True)
            announced += [
                Announcement(block, Grant(slot, generation), total) for (block, slot, generation), total in ready
            ]
        if announced or intake.copying:
            taken = intake.take(announced, side.zone.clock())
            assert (taken.again, taken.lost, taken.refused) == ([], [], []), taken
            sound += len(taken.sound)
    assert begun_s is not None
    return time.monotonic() - begun_s, posting_s


# Namespaces.


def measure_namespaces(gpus: tuple[str, str]) -> dict[str, str]:
    """Whether a handle of a process in PID and IPC namespaces of its own can be opened here."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    memory = CudaMemory(torch.device("cuda", 0), "host")
    found = {}
    for name, before in (("shared", []), ("pid", ["unshare", "-p", "-f", "--mount-proc"]), ("ipc", ["unshare", "-i"]),
                         ("pid_ipc", ["unshare", "-p", "-i", "-f", "--mount-proc"])):  # fmt: skip
        found[name] = _opened(memory, before, gpus[1])
    return found


def _opened(memory: CudaMemory, before: list[str], gpu: str) -> str:
    command = [*before, sys.executable, "-m", "bench.gpu.pd_gpu_link"]
    holder = subprocess.Popen(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        line = holder.stdout.readline().strip()
        if not line:
            return f"not tried: {holder.stderr.read()[-120:] if holder.stderr else ''}"
        memory.close(memory.open(bytes.fromhex(line)))
        return "works"
    except Exception as error:  # noqa: BLE001 - the reason is the result
        return str(error)
    finally:
        holder.stdin.close()
        holder.wait(20)


def hold() -> None:
    """Hold exported memory until the input ends."""
    memory = CudaMemory(torch.device("cuda", 0), "host")
    address = memory.allocate(64 << 20)
    print(memory.export(address).hex(), flush=True)
    sys.stdin.read()
    memory.free(address)


if __name__ == "__main__":
    hold()
