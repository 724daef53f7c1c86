"""`python -m stoker.trainer.rank`: one rank's process, from its command line to its exit code.

Its agent starts it (`protocol/channel.py`).
"""

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
from typing import TYPE_CHECKING, NoReturn

import torch

from stoker.checkpoint.store import CheckpointRoot
from stoker.model.kernels.ahead.look_up import look_up_shipped_kernels
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.memory import keep_freed_memory
from stoker.pod.causes import EXIT_CODES, Cause, CauseRule, cause_of_error, is_explained, mentions
from stoker.pod.config_file import ConfigError, load
from stoker.pod.writer import writers_until
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.error_causes import ERROR_CAUSES, describe_error
from stoker.trainer.protocol.messages import EndEvent, MomentEvent, StopCommand
from stoker.trainer.protocol.parallel_dims import ParallelDims, check_supported
from stoker.trainer.rank.build import RankContext, open_loop
from stoker.trainer.rank.loop import Loop
from stoker.trainer.rank.mesh import AxisGroups, open_mesh
from stoker.trainer.rank.metric_targets.open_targets import check_targets
from stoker.trainer.rank.process_group import (
    choose_device,
    collective_timeout,
    order_launches,
    process_group,
    set_threads,
)
from stoker.trainer.rank.rank_info import RankInfo, find_rank_info
from stoker.trainer.rank.resume import choose_resume
from stoker.trainer.rank.run_inputs import check_agreement, collect_run_inputs
from stoker.trainer.rank.save_group import make_save_group

if TYPE_CHECKING:
    from stoker.model.kernels.ahead.layered_cache import KernelLookups

MAX_DETAIL = 2000
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""Gloo's messages when another rank is gone."""
RANK_ERROR_CAUSES: tuple[CauseRule, ...] = (
    *ERROR_CAUSES,
    CauseRule(torch.OutOfMemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(torch.distributed.DistError, Cause.PEER_LOST),
    CauseRule(RuntimeError, Cause.PEER_LOST, mentions(*LOST_PEER)),
)
"""Causes of a rank's errors; any other error is RankFailed."""


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run one rank and return its exit code: that of the cause in its `end` event."""
    options = _parse(arguments)
    if options.stacks is not None:
        faulthandler.register(signal.SIGUSR1, file=options.stacks.open("w"), all_threads=True)
    channel = open_channel(options.channel_fd)
    watch_signals(channel)
    end = run(options, environment, channel)
    channel.phase("Exited")
    channel.send(end)
    channel.close()
    return EXIT_CODES[Cause(end.cause)]


def run(options: argparse.Namespace, environment: Mapping[str, str], channel: RankChannel) -> EndEvent:
    """Train, and report how that ended.

    No error leaves it: the agent gets the cause, the log what the cause does not explain.
    """
    step: int | None = None
    try:
        with open_rank(options, environment, channel) as loop:
            try:
                cause = loop.train()
            finally:
                step = loop.progress.step
        return EndEvent(cause=cause.value, step=step)
    except Exception as error:  # noqa: BLE001  # see the docstring
        cause = cause_of(error)
        detail = describe_error(error, cause)[:MAX_DETAIL]
        if not is_explained(cause):
            traceback.print_exc()
        elif options.channel_fd is None:  # else the agent prints it, once for all ranks
            sys.stderr.write(f"{cause.value}: {detail}\n")
        return EndEvent(cause=cause.value, step=step, detail=detail)


def cause_of(error: BaseException) -> Cause:
    """The cause that agent and operator act on."""
    return cause_of_error(error, RANK_ERROR_CAUSES, Cause.RANK_FAILED)


@contextlib.contextmanager
def open_rank(options: argparse.Namespace, environment: Mapping[str, str], channel: RankChannel) -> Iterator[Loop]:
    """Load the configuration, join the other ranks, and open the loop."""

    def report(message: str) -> None:
        channel.phase("Loading", message)

    report("Starting")
    channel.send(MomentEvent(moment="started"))
    config = load(TrainerConfig, options.config)
    dims = check_supported(config)
    check_targets(config.logging)
    info = find_rank_info(config, environment)
    order_launches(config, os.environ)
    device = choose_device(config)
    set_threads(config)
    keep_freed_memory()
    listener = socket.socket(fileno=options.master_listen_fd) if options.master_listen_fd is not None else None
    report(f"WaitingForRanks {dims.world_size}")
    root = CheckpointRoot(Path(config.checkpoint.root))
    with process_group(config, info, device, listener), hold_root(config, info, root):
        lookups = look_up_kernels(config, device)
        context = make_rank_context(
            dims,
            device,
            channel,
            collective_timeout(config),
            lookups,
            any_data_parallel=config.training.any_data_parallel,
        )
        channel.send(MomentEvent(moment="joined"))
        resume = choose_resume(config, root, context.save_group, report)
        inputs = collect_run_inputs(config, context.mesh, device, resume is not None, report)
        check_agreement(inputs, context.save_group)
        with open_loop(config, root, context, inputs, resume) as loop:
            yield loop


def look_up_kernels(config: TrainerConfig, device: torch.device) -> KernelLookups | None:
    """Look kernels up among those that were shipped, from now on.

    Raises:
        ConfigError: the folder that the environment names is none of them, or the kernels are not for this device.
    """
    try:
        return look_up_shipped_kernels(resolve_kernels(config.kernels, device.type), device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_rank_context(
    dims: ParallelDims,
    device: torch.device,
    channel: RankChannel,
    timeout: timedelta,
    lookups: KernelLookups | None = None,
    *,
    any_data_parallel: bool = False,
) -> RankContext:
    """Open this rank's communicators (collective: every rank of the gang calls it)."""
    mesh = open_mesh(dims, AxisGroups(device, timeout), any_data_parallel=any_data_parallel)
    save_group = make_save_group(range(dims.world_size), timeout)
    assert mesh is not None
    assert save_group is not None
    return RankContext(mesh=mesh, save_group=save_group, channel=channel, device=device, lookups=lookups)


@contextlib.contextmanager
def hold_root(config: TrainerConfig, info: RankInfo, root: CheckpointRoot) -> Iterator[None]:
    """Lock the checkpoints of a run without an operator, and remove what a killed save left (rank 0).

    An operator starts an attempt when the pods of those before it are gone; other jobs may write to the same root.
    No-op on other ranks.
    """
    if info.rank != 0:
        yield
    elif config.retention == "external":
        root.discard_unfinished([config.job.writer, *writers_until(config.job.uid, config.job.attempt)])
        yield
    else:
        with root.lock():  # without locks another run may be at the same root
            root.discard_unfinished(None if root.storage.has_locks else [config.job.writer])
            yield


def open_channel(descriptor: int | None) -> RankChannel:
    """The channel to the agent; without one (a rank started by hand) events are dropped."""
    if descriptor is None:
        return RankChannel(None)
    return RankChannel(socket.socket(fileno=descriptor), on_orphaned=lambda: os._exit(EXIT_CODES[Cause.INTERRUPTED]))


def watch_signals(channel: RankChannel) -> None:
    """Turn SIGTERM into a stop at the end of the step. SIGINT is left to the agent."""
    signal.signal(signal.SIGTERM, lambda *_: channel.put(StopCommand(mode="interrupt")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stoker.trainer.rank",
        description="One rank of a training run. "
        "Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment.",
        epilog="example (one rank by hand): python -m stoker.trainer.rank --config config.json",
    )
    parser.add_argument("--config", type=Path, required=True, help="the trainer's configuration, JSON")
    parser.add_argument("--channel-fd", type=int, help="descriptor of the channel to the agent")
    parser.add_argument("--stacks", type=Path, help="file for the stacks of all threads on SIGUSR1")
    parser.add_argument("--master-listen-fd", type=int, help="descriptor of the rendezvous socket (global rank 0)")
    return parser.parse_args(arguments)


def leave(code: int) -> NoReturn:
    """End the process at once; `open_rank` has closed all that an orderly end closes.

    After an error, communicators and the threads of a save may wait for ranks that wait for this one. After an orderly
    end, the interpreter's last steps would destroy Gloo's groups that modules and gradients still refer to, and Gloo
    then aborts now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
