"""`python -m stoker.engine.worker_main`: a further rank as a process of its own, started by `ranks.workers`."""

from __future__ import annotations

import argparse
import logging
import signal
import socket

from stoker.engine.core.kernel_warmup import warm_up_beside_weights
from stoker.engine.ranks.link import Link
from stoker.engine.ranks.worker import Worker


def main() -> None:
    """Compute rank 0's steps until it closes the link."""
    parser = argparse.ArgumentParser(prog="python -m stoker.engine.worker_main", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--link", type=int, required=True, metavar="FD", help="open socket to rank 0")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends its ranks by closing their links
    shown = f"%(asctime)s %(levelname)s %(name)s rank {arguments.rank}: %(message)s"
    logging.basicConfig(level=arguments.log_level, format=shown)
    worker = Worker(arguments.rank, arguments.device, Link(socket.socket(fileno=arguments.link)))
    worker.run(warm_up_beside_weights)


if __name__ == "__main__":
    main()
