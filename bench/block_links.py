"""Links between two processes: gigabytes per second of cache blocks, and how soon a killed peer is noticed.

A writer in a process of its own writes blocks into the landing zone of this process:
  link      bytes in the zone, acknowledged
  verified  the same, and the receiver copies each block into its cache and compares its checksum
Run: python bench/block_links.py [--block-mib 9] [--blocks 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.intake import Announcement, Intake, host_copy
from stoker.engine.transfer.landing_zone import Grant, Owner
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.nixl_port import NixlPort
from stoker.engine.transfer.port import Move, PortInfo
from stoker.engine.transfer.shared_memory import SharedMemoryPort
from stoker.engine.transfer.tcp import TcpPort
from stoker.engine.transfer.zone_memory import SharedZone

SLOTS = 16
KEY = b"k" * 32
FINGERPRINT = b"f" * 32


def main() -> None:
    options = arguments()
    layout = layout_of(options.block_mib)
    facts: dict[str, Any] = {"bench": "block_links", "cpus": os.cpu_count(), "block_bytes": layout.block_bytes}
    blocks = np.random.default_rng(0).integers(0, 256, (SLOTS, layout.block_bytes), dtype=np.uint8)
    facts["checksum_gb_s"] = round(best(lambda: len(raw_sums(blocks)) * layout.block_bytes, 3) / 1e9, 2)
    print(f"checksum alone: {facts['checksum_gb_s']} GB/s on one core")
    for transport, goal in (("shared-memory", 2.0), ("tcp", 0.5), ("nixl", None)):
        result = measure(transport, layout, options.blocks, options.rounds)
        facts[transport] = result
        print(
            f"{transport}: link {result['link']:.2f} GB/s (goal {goal or 'none'}), "
            f"verified {result['verified']:.2f} GB/s; killed writer noticed after {result['noticed_ms']:.1f} ms"
        )
    print(json.dumps(facts))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-mib", type=int, default=9, help="size of a block; Qwen3-8B with 64 tokens has 9 MiB")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median is reported")
    return parser.parse_args()


def layout_of(mib: int) -> BlockLayout:
    return BlockLayout(0, mib, 64, 0, 8, 512, "bfloat16")


def best(work: Any, rounds: int) -> float:
    """The highest rate of `work`, which returns its bytes, in bytes/s."""
    rates = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        rates.append(work() / (time.perf_counter() - begun_s))
    return max(rates)


def make_port(transport: str, name: str, layout: BlockLayout, local_BN: np.ndarray, folder: Path) -> Any:
    zone = SharedZone(SLOTS, layout.block_bytes, named=transport == "shared-memory")
    if transport == "nixl":
        return NixlPort(name, 1, FINGERPRINT, layout, local_BN, zone, key=KEY, host="127.0.0.1")
    if transport == "tcp":
        return TcpPort(name, 1, FINGERPRINT, layout, local_BN, zone, key=KEY, host="127.0.0.1")
    (folder / name).mkdir(exist_ok=True)
    return SharedMemoryPort(name, 1, FINGERPRINT, layout, local_BN, zone, folder / name)


def measure(transport: str, layout: BlockLayout, num_blocks: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="block-links-") as path:
        folder = Path(path)
        receiver = make_port(transport, "receiver", layout, np.zeros((1, layout.block_bytes), dtype=np.uint8), folder)
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        writer = context.Process(target=write, args=(transport, layout, folder, receiver.describe(), theirs))
        writer.start()
        sums = pipe.recv()
        cache_BN = np.zeros((SLOTS, layout.block_bytes), dtype=np.uint8)
        rates: dict[str, list[float]] = {"link": [], "verified": []}
        for kind in ("link", "verified") * (rounds + 1):
            begun_s = time.perf_counter()
            for _ in range(0, num_blocks, SLOTS):
                receive(receiver, pipe, sums, cache_BN if kind == "verified" else None)
            size = -(-num_blocks // SLOTS) * SLOTS * layout.block_bytes
            rates[kind].append(size / (time.perf_counter() - begun_s) / 1e9)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        while not receiver.lost_peers():
            time.sleep(0.0001)
        noticed_ms = 1000 * (time.perf_counter() - killed_s)
        writer.join()
        receiver.close()
    warm = {kind: statistics.median(values[1:]) for kind, values in rates.items()}
    return {**warm, "noticed_ms": noticed_ms}


def receive(receiver: Any, pipe: Connection, sums: list[int], cache_BN: np.ndarray | None) -> None:
    """Grant all slots, let the writer fill them, and take them."""
    zone, owner = receiver.zone.zone, Owner("writer/1", "request")
    with receiver.zone.lock:
        grants = zone.grant(owner, SLOTS, receiver.zone.clock(), 60.0)
    pipe.send([tuple(grant) for grant in grants])
    pipe.recv()
    if cache_BN is None:
        with receiver.zone.lock:
            zone.bury("writer/1")
        return
    copy = host_copy(receiver.zone.memory_SN, cache_BN)
    intake = Intake(zone, owner, copy, target=lambda place: place, seed=lambda _: 0)
    announced = [Announcement(place, grant, sums[place]) for place, grant in enumerate(grants)]
    assert len(intake.take(announced, receiver.zone.clock()).sound) == SLOTS


def write(transport: str, layout: BlockLayout, folder: Path, peer: PortInfo, pipe: Connection) -> None:
    """The writer: fills the slots it is told."""
    blocks = np.random.default_rng(1).integers(0, 256, (SLOTS, layout.block_bytes), dtype=np.uint8)
    link = make_port(transport, "writer", layout, blocks, folder).connect(peer)
    pipe.send(raw_sums(blocks).tolist())
    while True:
        grants = [Grant(*grant) for grant in pipe.recv()]
        ticket = link.write([Move(place, *grant) for place, grant in enumerate(grants)], b"")
        ticket.wait()
        assert ticket.error() is None, ticket.error()
        pipe.send("written")


if __name__ == "__main__":
    main()
