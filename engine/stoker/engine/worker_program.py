"""`python -m stoker.engine.worker_main`: a further rank as a process of its own. Imports torch.

Started by `ranks.workers` in the leader's pod, with a socket to rank 0; by `member` in another pod of the replica,
where it connects to the leader.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stoker.engine.config import EngineConfig
from stoker.engine.core.fetched_model import with_fetched_model
from stoker.engine.core.kernel_warmup import warm_up_beside_weights
from stoker.engine.core.rank_mover import RankMover
from stoker.engine.execution.load import LoadRunner, load_runner
from stoker.engine.execution.runner import Runner
from stoker.engine.key_file import read_key
from stoker.engine.plan import EnginePlan, choose_device
from stoker.engine.ranks.block_calls import OpenBlocks
from stoker.engine.ranks.handshake import reach_leader
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.pod_place import find_place
from stoker.engine.ranks.wire import Join, pack
from stoker.engine.ranks.worker import PodRank, Worker
from stoker.pod.collection import spare_from_collection
from stoker.pod.config_file import load
from stoker.pod.installed_version import installed_version


def main() -> None:
    """Compute rank 0's steps until it closes the link."""
    parser = argparse.ArgumentParser(prog="python -m stoker.engine.worker_main", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--link", type=int, metavar="FD", help="open socket to rank 0")
    place.add_argument("--config", metavar="FILE", help="EngineConfig of a pod that is not the leader's")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="needed with --link")
    parser.add_argument("--told", type=int, metavar="FD", help="pipe for the rank's phases, with --config")
    parser.add_argument("--parent", type=int, metavar="PID", help="ends when this process has, with --config")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends its ranks by closing their links
    shown = f"%(asctime)s %(levelname)s %(name)s rank {arguments.rank}: %(message)s"
    logging.basicConfig(level=arguments.log_level, format=shown)
    if arguments.config is not None:
        config, folder = load(EngineConfig, arguments.config), Path(arguments.config).parent
        run_in_other_pod(arguments.rank, config, folder, arguments.told, arguments.parent)
        return
    link = Link(socket.socket(fileno=arguments.link))
    Worker(arguments.rank, arguments.device, link, load_and_spare, make_mover=RankMover).run(warm_up_beside_weights)


def run_in_other_pod(rank: int, config: EngineConfig, folder: Path, told: int, parent: int) -> None:
    """Fetch the model if it is elsewhere, connect to the leader, and compute its steps.

    `folder`: of this pod, for the rank's sockets.

    Raises:
        ValueError: the model or the configuration cannot be used.
    """

    def tell(phase: str) -> None:
        os.write(told, f"{phase}\n".encode())

    def alive() -> bool:
        return os.getppid() == parent

    place = find_place(config, os.environ)
    assert place is not None, "the member's program has checked it"
    device = choose_device(config.device)
    fetched, digest = with_fetched_model(config, tell)

    def localise(plan: EnginePlan) -> EnginePlan:
        if digest != plan.source_digest:
            raise ValueError(f"{config.model.path} has digest {digest} here and {plan.source_digest} at the leader")
        return replace(plan, model_path=fetched.model.path)

    tell("Joining")
    try:
        link = reach_leader(place.leader, place.key, alive)
        link.send(pack(Join(rank, os.getpid(), place.name, installed_version())))
    except LinkClosed:
        os._exit(0)  # as in `worker`
    tell("Loading")
    pod = PodRank(rank - place.ranks.start, localise, tell, alive)

    def localised(call: OpenBlocks) -> OpenBlocks:
        assert config.transfer.key_file is not None, "the plan has checked it"
        return call._replace(folder=str(folder / f"rank-{rank}"), key=read_key(config.transfer.key_file))

    mover = partial(RankMover, localised=localised)
    Worker(rank, device, link, load_and_spare, pod=pod, make_mover=mover).run(warm_up_beside_weights)


def load_and_spare(plan: EnginePlan, *arguments: Any, load: LoadRunner = load_runner, **others: Any) -> Runner:
    """Load the rank's part of the model; later collections of garbage, for which all ranks would wait, leave it out."""
    runner = load(plan, *arguments, **others)
    spare_from_collection()
    return runner
