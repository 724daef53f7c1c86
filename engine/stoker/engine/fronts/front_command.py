"""The command line of a front's process. Given to `pool` by `program`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def front_command(
    config_file: Path, epoch: str, number: int, identity: bytes, link: int, connections: int
) -> list[str]:
    """Start `front_program`; `epoch` names this run of the engine, the last two are descriptors that it inherits."""
    level = logging.getLevelName(logging.getLogger().level)
    return [
        *(sys.executable, "-m", "stoker.engine.fronts.front_program", "--config", str(config_file), "--epoch", epoch),
        *("--number", str(number), "--identity", identity.decode(), "--link", str(link)),
        *("--connections", str(connections), "--log-level", level),
    ]
