"""The supervisor as a program: `python -m stoker.operator.service.local.run_supervisor --state DIR --addresses loopback|ports [--leash FD]`.

Started by the command line; its output is `supervisor.log` in the state folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.service.local.supervisor import Options, StateFolderTaken, Supervisor
from stoker.operator.service.reconcilers import RECONCILERS


def main(arguments: list[str] | None = None) -> int:
    """0 after an orderly end, 75 when the state folder is taken."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = Options(state=given.state, addresses=given.addresses, leash=given.leash)
    admission = Admission(definition(info) for info in KIND_INFOS)
    try:
        asyncio.run(Supervisor(options, RECONCILERS, admission.admit, dict(os.environ)).run())
    except StateFolderTaken as taken:
        logging.getLogger(__name__).error("%s", taken)
        return 75
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker-supervisor", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--addresses", choices=["loopback", "ports"], required=True)
    parser.add_argument("--leash", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
