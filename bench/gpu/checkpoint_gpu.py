"""T7: a checkpoint of the 8B run while it trains: GB/s with hashes, the longest stall of a step, and the read-back.

    python bench/gpu/checkpoint_gpu.py --gpus 4 --folder /mnt/fast  # 32 layers: 96 GB, 24 GB locked per rank
    python bench/gpu/checkpoint_gpu.py --gpus 4 --layers 8 --out DIR          # 33 GB; DIR/T7.json

Steps of row T1 go on while the product's own Snapshots and Saver copy, hash, write, publish and read back. GB/s counts
from the start of the save until it is committed (durable and visible); `disk` is the same storage without hashes or
snapshot, all ranks at once. A stall is how much longer a step took than the median of those before the save. What is
known is written after each of: the plain write, the steps before, a commit, the end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from trainer_gpu import ROWS, Run, add_site, spawn, tell, trainer_config

from stoker.checkpoint.storage import PosixSink
from stoker.checkpoint.store import CheckpointRoot
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.messages import Event, SaveEvent
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.communicator import make_communicator
from stoker.trainer.rank.piece_map import state_tensors
from stoker.trainer.rank.process_group import choose_device, process_group
from stoker.trainer.rank.rank_info import find_rank_info
from stoker.trainer.rank.save_group import make_save_group
from stoker.trainer.rank.saver import SavePlan, Saver
from stoker.trainer.rank.snapshot import Snapshots


class TimedChannel(RankChannel):
    """A channel that records the time of each message about a save and passes it on."""

    def __init__(self, heard: Callable[[], None]) -> None:
        super().__init__(None)
        self.saves: list[tuple[float, SaveEvent]] = []
        self.heard = heard

    def send(self, event: Event) -> None:
        if isinstance(event, SaveEvent):
            self.saves.append((time.perf_counter(), event))
            self.heard()


def measure(options: argparse.Namespace, device: torch.device, rank: int) -> None:
    ranks = range(options.gpus)
    communicator, group = make_communicator(ranks, device), make_save_group(ranks)
    assert communicator is not None
    assert group is not None
    folder = options.work / "root"
    facts: dict[str, Any] = {"run": "T7", "gpus": options.gpus}

    def note(**more: Any) -> None:
        facts.update(more)
        tell(facts, rank)

    note(disk_gb_per_s=write_plain(options, rank))
    run = Run(ROWS["T1"], [], options, device, communicator)
    parts = list(run.decoder.named_parts())
    snapshots = Snapshots(run.zero, parts)
    channel = TimedChannel(lambda: note(events=[described(at - begin, event) for at, event in channel.saves]))
    begin = time.perf_counter()
    snapshots.prepare()
    run.step()
    while run.wished(StepSignals(save=not snapshots.ready)):
        run.step()
    memory_s = time.perf_counter() - begin
    before = [run.step() for _ in range(options.steps)]
    usual = statistics.median(before)
    note(layers=run.model.num_layers, memory_s=round(memory_s, 2), usual_step_ms=round(1e3 * usual, 1))
    saver = Saver(CheckpointRoot(folder), "00000000", group, channel, {}, keep=None)
    saves = [save(run, saver, snapshots, channel, parts, number) for number in range(1, options.saves + 1)]
    saver.wait()
    found = [summary(channel, number, begun, steps, usual) for number, (begun, steps) in enumerate(saves, 1)]
    note(peak_gib=round(torch.cuda.max_memory_allocated(device) / 2**30, 2), saves=found)


def described(at_s: float, event: SaveEvent) -> dict[str, Any]:
    """Return a record of the event, for the file of a run that may be interrupted."""
    return {
        "at_s": round(at_s, 2),
        "save": event.step,
        "state": event.state,
        "bytes": event.bytes,
        "verified": event.verified,
    }


def save(
    run: Run, saver: Saver, snapshots: Snapshots, channel: TimedChannel, parts: Any, number: int
) -> tuple[float, list[float]]:
    """Save once; return the start time and the seconds of each step until every rank's save is over."""
    plan = SavePlan(
        step=number,
        tokens=0,
        loss=None,
        reason="interval",
        tensors=state_tensors(parts),
        meta={"layout": {"world_size": run.communicator.size}},
    )
    begun = time.perf_counter()
    saver.start(plan, snapshots.take)
    steps = [time.perf_counter() - begun + run.step()]
    while run.wished(StepSignals(save=saver.busy)):
        steps.append(run.step())
    assert channel.saves or run.communicator.rank > 0
    return begun, steps


def summary(channel: TimedChannel, number: int, begun: float, steps: list[float], usual: float) -> dict[str, Any]:
    mine = [(at, event) for at, event in channel.saves if event.step == number]
    if not mine:
        return {}
    committed = next(((at, event) for at, event in mine if event.state == "Committed"), None)
    if committed is None:
        return {"failed": mine[-1][1].detail}
    size = committed[1].bytes or 0
    return {
        "bytes": size,
        "save_s": round(committed[0] - begun, 2),
        "gb_per_s": round(size / (committed[0] - begun) / 1e9, 3),
        "read_back_s": round(mine[-1][0] - committed[0], 2),
        "verified": mine[-1][1].verified,
        "longest_stall_ms": round(1e3 * (max(steps) - usual), 1),
        "first_step_ms": round(1e3 * steps[0], 1),
        "median_step_ms": round(1e3 * statistics.median(steps), 1),
        "steps": len(steps),
    }


def write_plain(options: argparse.Namespace, rank: int) -> float:
    """Return GB/s of all ranks together, written and durable, through the storage of the format."""
    data = np.random.default_rng(rank).integers(0, 256, 2**26, dtype=np.uint8).data
    path = options.work / f"plain-{rank}"
    if options.gpus > 1:
        dist.barrier()
    begin = time.perf_counter()
    sink = PosixSink(path)
    for _ in range(options.plain_gib * 16):
        sink.write(data)
    sink.sync()
    if options.gpus > 1:
        dist.barrier()
    elapsed = time.perf_counter() - begin
    sink.close()
    path.unlink()
    return round(options.gpus * options.plain_gib * 2**30 / elapsed / 1e9, 3)


def work(options: argparse.Namespace) -> None:
    config = trainer_config(ROWS["T1"], [], options.gpus)
    info = find_rank_info(config, os.environ)
    device = choose_device(config)
    torch.cuda.set_device(device)
    with process_group(config, info, device, None):
        measure(options, device, info.rank)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has")
    parser.add_argument("--steps", type=int, default=6, help="steps before the save")
    parser.add_argument("--saves", type=int, default=1)
    parser.add_argument("--plain-gib", type=int, default=2, help="plain write of each rank")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=None, help="folder for T7.json")
    parser.add_argument(
        "--limit-s", type=float, default=240.0, help="until each piece of news, the ranks' start included"
    )
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    add_site()
    if options.rank:
        work(options)
        return
    facts: dict[str, Any] = {"bench": "checkpoint_gpu", "torch": torch.__version__, "results": []}

    def keep(found: dict[str, Any]) -> None:
        facts["results"] = [found]
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "T7.json").write_text(json.dumps(facts, indent=1))

    folder = Path(tempfile.mkdtemp(prefix="checkpoint-gpu-", dir=options.folder))
    try:
        spawn([__file__, *sys.argv[1:], "--work", str(folder)], options.gpus, options.limit_s, keep)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
