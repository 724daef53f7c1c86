"""The supervisor as a program: `python -m stoker.operator.service.local.run_supervisor --state DIR --addresses
loopback|ports [--parent-pipe FD]`.

Started by the command line; its output is `supervisor.log` in the state folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.cluster.local.state_lock import StateFolderReplaced, StateFolderTaken
from stoker.operator.service.local.supervisor import Options, Supervisor
from stoker.operator.service.reconcilers import RECONCILERS
from stoker.pod.command_line import CommandParser

TAKEN, REPLACED = 75, 76


def main(arguments: list[str] | None = None) -> int:
    """Run the supervisor to its end.

    Returns:
        0 after an orderly end, 75 when another supervisor holds the state folder, 76 when the folder was replaced.
    """
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = Options(state=given.state, addresses=given.addresses, parent_pipe=given.parent_pipe)
    admission = Admission(definition(info) for info in KIND_INFOS)
    try:
        asyncio.run(Supervisor(options, RECONCILERS, admission.admit, dict(os.environ)).run())
    except StateFolderTaken as taken:
        logging.getLogger(__name__).error("%s", taken)
        return TAKEN
    except StateFolderReplaced:
        return REPLACED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="stoker-supervisor", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--addresses", choices=["loopback", "ports"], required=True)
    parser.add_argument("--parent-pipe", type=int)
    return parser
