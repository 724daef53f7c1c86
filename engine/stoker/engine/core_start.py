"""The start of an engine's cores: their folder, sockets, command lines and environments. Imports little.

A core needs most of its time for imports, so `__main__` starts it before this process imports what it serves with.

Called by `__main__` and `program`.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_processes import CoreStart, visible_gpus
from stoker.engine.ranks.data_place import data_environment

MAX_SOCKET_PATH = 100
"""Longest path of a Unix socket in bytes; Linux allows 107."""
CoreCommand = Callable[[Path, str], Sequence[str]]
"""(configuration file, address of the core's socket) -> command line."""


def core_command(config_file: Path, address: str) -> Sequence[str]:
    """The command line of a core. It is a process of its own, so that steps and HTTP never wait for each other."""
    work_dir, level = str(config_file.parent), logging.getLevelName(logging.getLogger().level)
    module = [sys.executable, "-m", "stoker.engine.core.main"]
    places = ["--config", str(config_file), "--address", address, "--work-dir", work_dir]
    return [*module, *places, "--parent", str(os.getpid()), "--log-level", level]


def core_addresses(folder: Path, config: EngineConfig) -> tuple[str, ...]:
    """What the sockets of the cores bind."""
    return tuple(f"ipc://{folder}/core{number}" for number in range(config.parallelism.data))


def core_starts(config: EngineConfig, folder: Path, command: CoreCommand = core_command) -> list[CoreStart]:
    """Command and environment of each core. Writes their configurations into `folder`."""
    addresses = core_addresses(folder, config)
    return [_core_start(config, folder, number, address, command) for number, address in enumerate(addresses)]


def _core_start(config: EngineConfig, folder: Path, number: int, address: str, command: CoreCommand) -> CoreStart:
    """Command and environment of a core; each of several has its own GPUs, its own time line and its own ports."""
    parallelism = config.parallelism
    environment: Mapping[str, str] = {**os.environ, **data_environment(config, number, folder, os.environ)}
    if parallelism.data > 1:
        timeline = f"{config.timeline}.{number}" if config.timeline is not None else None
        ranks = parallelism.tensor * parallelism.pipeline
        changes: dict[str, Any] = {"timeline": timeline, "transfer": config.transfer.of_copy(number, ranks)}
        if config.cache_events is not None:
            changes["cache_events"] = config.cache_events.of_rank(number)
        config = config.model_copy(update=changes)
        if config.device == "cuda":
            environment = visible_gpus(environment, number, ranks)
    config_file = folder / f"config{number}.json"
    config_file.write_text(config.model_dump_json())
    return CoreStart(command(config_file, address), environment)


@contextmanager
def scratch(work_dir: str | None) -> Iterator[Path]:
    """Make a fresh folder, in `work_dir` unless a socket's path would be too long there."""
    parent = work_dir if work_dir is not None and len(os.fsencode(work_dir)) + 30 <= MAX_SOCKET_PATH else None
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stoker-", dir=parent) as folder:
        yield Path(folder)
