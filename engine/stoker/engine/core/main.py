"""`python -m stoker.engine.core.main`: the core as a process of its own, started by `program`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_in_pod
from stoker.engine.core.core import QUIET, Core
from stoker.engine.core.step_pace import QuietLimits
from stoker.pod.causes import EXIT_CODES
from stoker.pod.config_file import load


def main() -> None:
    """Run the core until it ends; the exit code is the cause's."""
    parser = argparse.ArgumentParser(prog="python -m stoker.engine.core.main", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--address", required=True, help="what the core's socket binds, ipc://PATH")
    parser.add_argument("--work-dir", required=True, metavar="FOLDER", help="for files that fronts read")
    parser.add_argument("--parent", type=int, metavar="PID", help="ends when this process has; default: its parent")
    parser.add_argument(
        "--quiet-s", type=float, default=QUIET.floor_s, help="longest healthy silence at rest (default %(default)s)"
    )
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = load(EngineConfig, arguments.config)
    quiet = replace(QUIET, floor_s=arguments.quiet_s)
    run_core(config, arguments.address, arguments.work_dir, arguments.parent, quiet)


def run_core(
    config: EngineConfig,
    address: str,
    work_dir: str,
    parent: int | None = None,
    quiet: QuietLimits = QUIET,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Serve until `Stop`, a failure or the parent's death, then exit with the code of the cause.

    `address`: what the ROUTER socket binds, `ipc://...`; `work_dir`: an existing folder for files that fronts read;
    `parent`: pid of the process that started this one. It is passed in, because the parent may die while torch is being
    imported, and `getppid()` would then name another process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent drains and stops its core by messages
    parent = os.getppid() if parent is None else parent
    alive = lambda: os.getppid() == parent  # noqa: E731
    build = partial(build_in_pod, environment)
    core = Core(config, address, Path(work_dir), build=build, parent_alive=alive, quiet=quiet)
    cause = core.serve()
    logging.shutdown()
    sys.exit(EXIT_CODES[cause])


if __name__ == "__main__":
    main()
