"""`python -m stoker.trainer --config FILE`: one pod of a run, from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console as RichConsole

from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import ConfigError, load
from stoker.pod.exit_code import EXIT_CODES, Cause
from stoker.pod.termination_message import TerminationMessage
from stoker.trainer.agent.agent import Agent
from stoker.trainer.agent.console import Console
from stoker.trainer.agent.rank_info import find_place
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.parallel_dims import check_supported


def main(
    arguments: Sequence[str] | None = None, rank_module: Sequence[str] = ("-m", "stoker.trainer.rank.main")
) -> int:
    """The exit code of the run (docs/exit-codes.md). `rank_module` are the interpreter's arguments that start a rank."""
    parser = CommandParser(
        prog="python -m stoker.trainer",
        description="Train a model: start this pod's ranks, answer for them, and leave a last word.",
        epilog="example: python -m stoker.trainer --config /etc/stoker/config.json",
    )
    parser.add_argument("--config", required=True, type=Path, help="the run's configuration, JSON")
    path: Path = parser.parse_args(arguments).config
    try:
        config = load(TrainerConfig, path)
        check_supported(config)
        word = asyncio.run(run_pod(config, [sys.executable, *rank_module, "--config", str(path)], os.environ))
    except ConfigError as error:
        word = TerminationMessage(cause=Cause.CONFIG_INVALID, detail=str(error))
        sys.stderr.write(f"{error}\n")
    except OSError as error:  # the work folder, a socket: full, read-only, not there
        word = TerminationMessage(cause=Cause.STORAGE_ERROR, detail=f"{error.filename}: {error.strerror}")
        sys.stderr.write(f"{word.detail}\n")
    except Exception as error:  # noqa: BLE001  (the last word must go out whatever happened)
        word = TerminationMessage(cause=Cause.INTERNAL, detail=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    _leave(word, path)
    return EXIT_CODES[word.cause]


async def run_pod(
    config: TrainerConfig, rank_command: Sequence[str], environment: Mapping[str, str]
) -> TerminationMessage:
    """Run this pod's part; SIGTERM, SIGHUP and Ctrl-C save within the grace period."""
    console = Console(RichConsole(highlight=False), config.logging.every_steps)
    agent = Agent(
        config,
        find_place(config, environment),
        rank_command=rank_command,
        environment=environment,
        console=console,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, agent.interrupt, number.name)
    word: TerminationMessage | None = None
    try:
        word = await agent.run()
    finally:
        console.close(word)
    if config.retention == "own" and word.saves:
        console.line(f"newest checkpoint: {Path(config.checkpoint.root, word.saves[-1].folder)}")
    return word


def _leave(word: TerminationMessage, config: Path) -> None:
    """Write the last word where the configuration says, even if the rest of it is wrong."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        word.write(json.loads(config.read_text())["termination_log"])
