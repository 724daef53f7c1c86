"""The run of a core inside a process of its own: from its configuration to its exit code. Imports torch.

Called by `main` once it has begun what goes on beside these imports.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stoker.engine.config import EngineConfig
from stoker.engine.core.build import build_in_pod
from stoker.engine.core.core import QUIET, Core
from stoker.engine.core.step_pace import QuietLimits
from stoker.pod.causes import EXIT_CODES
from stoker.pod.collection import spare_from_collection


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
    core = Core(
        config, address, Path(work_dir), build=build, parent_alive=alive, quiet=quiet, on_loaded=spare_from_collection
    )
    cause = core.serve()
    gc.unfreeze()  # else modules in C report their objects as leaked at the process's end
    logging.shutdown()
    sys.exit(EXIT_CODES[cause])
