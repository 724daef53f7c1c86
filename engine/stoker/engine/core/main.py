"""`python -m stoker.engine.core.main`: the core as a process of its own, started by `program`.

Imports take most of a start. So this file imports little: a GPU is opened and Triton's digest computed beside the
others, and until the model is loaded no garbage is collected, of which there is next to none.
"""

from __future__ import annotations

import argparse
import gc
import logging

from stoker.engine.config import EngineConfig
from stoker.engine.core.compiler_digest import digest_compiler_beside
from stoker.engine.core.device_opening import open_device_beside
from stoker.engine.core.step_pace import QuietLimits
from stoker.pod.config_file import load


def main() -> None:
    """Run the core until it ends; the exit code is the cause's."""
    gc.disable()
    parser = argparse.ArgumentParser(prog="python -m stoker.engine.core.main", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--address", required=True, help="what the core's socket binds, ipc://PATH")
    parser.add_argument("--work-dir", required=True, metavar="FOLDER", help="for files that fronts read")
    parser.add_argument("--parent", type=int, metavar="PID", help="ends when this process has; default: its parent")
    parser.add_argument(
        "--quiet-s",
        type=float,
        default=QuietLimits().floor_s,
        help="longest healthy silence at rest (default %(default)s)",
    )
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = load(EngineConfig, arguments.config)
    open_device_beside(config.device)
    digest_compiler_beside(config.device)
    from stoker.engine.core.run import run_core  # imports torch, beside these threads

    quiet = QuietLimits(floor_s=arguments.quiet_s)
    run_core(config, arguments.address, arguments.work_dir, arguments.parent, quiet)


if __name__ == "__main__":
    main()
