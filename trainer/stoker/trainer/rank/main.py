"""`python -m stoker.trainer.rank.main`: one rank's process, from its command line to its exit code. Its agent starts it (see `beacon.py`)."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from stoker.checkpoint.errors import CheckpointError, CheckpointLocked
from stoker.checkpoint.store import CheckpointRoot
from stoker.model.memory import keep_freed_memory
from stoker.pod.config_file import ConfigError, load
from stoker.pod.exit_code import EXIT_CODES, Cause
from stoker.trainer.agent.outcome import GOOD
from stoker.trainer.protocol.channel import Beacon, EndEvent, StopCommand
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.parallel_dims import check_supported
from stoker.trainer.rank.build import Team, open_loop
from stoker.trainer.rank.communicator import make_communicator
from stoker.trainer.rank.data.error import DataError
from stoker.trainer.rank.initial_weights import ModelUnusable
from stoker.trainer.rank.loop import Loop
from stoker.trainer.rank.process_group import (
    RankPlace,
    choose_device,
    collective_timeout,
    find_rank_place,
    process_group,
    set_threads,
)
from stoker.trainer.rank.resume import choose_resume
from stoker.trainer.rank.run_inputs import check_agreement, collect_materials
from stoker.trainer.rank.save_group import make_save_group
from stoker.trainer.rank.saver import StorageFailed
from stoker.trainer.rank.snapshot import OtherModel
from stoker.trainer.rank.train_step import NonFinite

MAX_DETAIL = 2000
CAUSES: tuple[tuple[type[BaseException], Cause], ...] = (
    (ConfigError, Cause.CONFIG_INVALID),
    (DataError, Cause.DATA_ERROR),
    (ModelUnusable, Cause.MODEL_ERROR),
    (OtherModel, Cause.MODEL_ERROR),  # not CheckpointCorrupt: an older one would not fit either
    (CheckpointLocked, Cause.CONFIG_INVALID),  # another run without an operator writes there
    (CheckpointError, Cause.CHECKPOINT_CORRUPT),
    (StorageFailed, Cause.STORAGE_ERROR),
    (NonFinite, Cause.NON_FINITE),
    (torch.OutOfMemoryError, Cause.OUT_OF_MEMORY),
    (MemoryError, Cause.OUT_OF_MEMORY),
    (torch.distributed.DistError, Cause.PEER_LOST),
)
"""What an exception means; anything else is RankFailed."""
EXPLAINED = (
    Cause.CONFIG_INVALID,
    Cause.DATA_ERROR,
    Cause.MODEL_ERROR,
    Cause.CHECKPOINT_CORRUPT,
    Cause.STORAGE_ERROR,
    Cause.NON_FINITE,
    Cause.PEER_LOST,
)
"""Causes whose message says it all: no traceback in the log."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The rank's exit code: that of the cause in its `end` event."""
    options = _parse(arguments)
    if options.stacks is not None:
        faulthandler.register(signal.SIGUSR1, file=options.stacks.open("w"), all_threads=True)
    beacon = open_beacon(options.beacon_fd)
    watch_signals(beacon)
    loop: list[Loop] = []
    try:
        cause, detail = run(options, environment, beacon, loop), ""
    except Exception as error:  # noqa: BLE001  # whatever it was, the agent is told why this rank ends
        cause = cause_of(error)
        if cause in EXPLAINED:
            detail = explanation(error)[:MAX_DETAIL]
            if options.beacon_fd is None:  # else the agent says it, once for all ranks
                sys.stderr.write(f"{cause.value}: {detail}\n")
        else:
            detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
            traceback.print_exc()
    beacon.phase("Exited")
    beacon.send(EndEvent(cause=cause.value, step=loop[0].progress.step if loop else None, detail=detail))
    beacon.close()
    return EXIT_CODES[cause]


def run(options: argparse.Namespace, environment: Mapping[str, str], beacon: Beacon, opened: list[Loop]) -> Cause:
    """Train. `opened` receives the loop, so that the caller can tell how far it came."""
    beacon.phase("Loading", "Starting")
    config = load(TrainerConfig, options.config)
    check_supported(config)
    place = find_rank_place(config, environment)
    device = choose_device(config)
    set_threads(config)
    keep_freed_memory()
    listener = socket.socket(fileno=options.master_listen_fd) if options.master_listen_fd is not None else None
    beacon.phase("Loading", f"WaitingForRanks {place.world_size}")
    root = CheckpointRoot(Path(config.checkpoint.root))
    with process_group(config, place, device, listener), hold_root(config, place, root):
        team = make_team(place, device, beacon, collective_timeout(config))
        resume = choose_resume(config, root, team.save_group, lambda message: beacon.phase("Loading", message))
        materials = collect_materials(
            config, device, resume is not None, lambda message: beacon.phase("Loading", message)
        )
        check_agreement(materials, team.save_group)
        with open_loop(config, root, team, materials, resume) as loop:
            opened.append(loop)
            return loop.train()


def make_team(place: RankPlace, device: torch.device, beacon: Beacon, timeout: timedelta) -> Team:
    """Communicators of this rank (collective)."""
    ranks = range(place.world_size)
    communicator = make_communicator(ranks, device, timeout)
    save_group = make_save_group(ranks, timeout)
    assert communicator is not None
    assert save_group is not None
    return Team(communicator=communicator, save_group=save_group, beacon=beacon, device=device)


@contextlib.contextmanager
def hold_root(config: TrainerConfig, place: RankPlace, root: CheckpointRoot) -> Iterator[None]:
    """Rank 0 of a run without an operator keeps others away from its checkpoints, and clears what a killed save left."""
    if place.rank != 0:
        yield
    elif config.retention == "external":
        root.discard_unfinished([config.job.writer])
        yield
    else:
        with root.lock():
            root.discard_unfinished()
            yield


def open_beacon(descriptor: int | None) -> Beacon:
    """The line to the agent; without one (a rank started by hand) events go nowhere."""
    if descriptor is None:
        return Beacon(None)
    return Beacon(socket.socket(fileno=descriptor), on_orphaned=lambda: os._exit(EXIT_CODES[Cause.INTERRUPTED]))


def watch_signals(beacon: Beacon) -> None:
    """SIGTERM: save and stop at the step's end. SIGINT is the agent's business."""
    signal.signal(signal.SIGTERM, lambda *_: beacon.put(StopCommand(mode="interrupt")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def explanation(error: BaseException) -> str:
    """What the message of an explained cause says, with the file that it is about."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def cause_of(error: BaseException) -> Cause:
    """The cause that the agent and the operator act on."""
    for kind, cause in CAUSES:
        if isinstance(error, kind):
            return cause
    if isinstance(error, OSError) and error.filename is not None:
        return Cause.STORAGE_ERROR  # a cache, a log: full, read-only or not there
    if isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER):
        return Cause.PEER_LOST
    return Cause.RANK_FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stoker.trainer.rank.main",
        description="One rank of a training run. Takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.",
        epilog="example (one rank by hand): python -m stoker.trainer.rank.main --config config.json",
    )
    parser.add_argument("--config", type=Path, required=True, help="the trainer's configuration, JSON")
    parser.add_argument("--beacon-fd", type=int, help="descriptor of the line to the agent")
    parser.add_argument("--stacks", type=Path, help="file for the stacks of all threads on SIGUSR1")
    parser.add_argument("--master-listen-fd", type=int, help="descriptor of the rendezvous socket (global rank 0)")
    return parser.parse_args(arguments)


def leave(code: int) -> NoReturn:
    """End the process. After an error at once: what would still be taken down (communicators, threads of a save) may wait for ranks that wait for this one."""
    if code in [EXIT_CODES[cause] for cause in GOOD]:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
