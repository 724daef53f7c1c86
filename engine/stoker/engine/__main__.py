"""`python -m stoker.engine --config FILE`: one engine replica, or one of its pods.

Imports little until the core runs, which imports at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_processes import CoreProcesses
from stoker.engine.core_start import core_starts, scratch
from stoker.engine.ranks.pod_place import find_place
from stoker.engine.ranks.pod_share import share_of_pod
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.collection import imports, spare_from_collection
from stoker.pod.command_line import CommandParser, run_program
from stoker.pod.config_file import load
from stoker.pod.termination_message import TerminationMessage
from stoker.pod.tracing import NoTracer, Tracer, tracer_of

log = logging.getLogger("stoker.engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or until the core ends; the exit code is one of docs/exit-codes.md."""
    parser = CommandParser(prog="python -m stoker.engine", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="EngineConfig as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config: EngineConfig | None = None
    tracer: Tracer = NoTracer()
    try:
        tracer = tracer_of("stoker-engine", os.environ)
        config = load(EngineConfig, arguments.config)
        message = run_pod(share_of_pod(config), os.environ, tracer)
    except ValueError as error:
        message = TerminationMessage(cause=Cause.CONFIG_INVALID, detail=str(error))
    except OSError as error:
        message = TerminationMessage(cause=Cause.INTERNAL, detail=str(error))
    tracer.close()
    log.log(
        logging.INFO if message.cause is Cause.INTERRUPTED else logging.ERROR, "%s: %s", message.cause, message.detail
    )
    if config is not None and config.termination_log is not None:
        message.write(config.termination_log)
    return EXIT_CODES[message.cause]


def run_pod(config: EngineConfig, environment: Mapping[str, str], tracer: Tracer) -> TerminationMessage:
    """Run this pod's part of the replica: the engine, or further ranks of another pod's."""
    place, uid = find_place(config, environment), environment.get("STOKER_POD_UID", "")
    if place is not None and place.number > 0:
        from stoker.engine.member import run_member  # this pod alone imports it

        return run_member(config, place, uid)
    with scratch(config.work_dir) as folder:
        return asyncio.run(_run_engine(config, uid, tracer, folder))


async def _run_engine(config: EngineConfig, pod_uid: str, tracer: Tracer, folder: Path) -> TerminationMessage:
    """Run an engine to its end. Its cores start first; whatever fails behind that ends them."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)  # until the engine has its own
    processes = CoreProcesses()
    try:
        await processes.start(core_starts(config, folder))
        with imports():  # most of this process's, beside the cores'
            from stoker.engine.program import Engine, Environment

        environment = Environment(pod_uid=pod_uid, tracer=tracer, on_serving=spare_from_collection)
        engine = Engine(config, environment, folder, processes)
        if stopped.is_set():
            engine.stop.set()
        return await engine.run()
    finally:
        await processes.end(0)


if __name__ == "__main__":
    run_program(main, "python -m stoker.engine")
