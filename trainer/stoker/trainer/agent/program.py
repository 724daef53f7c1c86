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

from stoker.pod.causes import EXIT_CODES, Cause, cause_of_error, is_explained
from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import load
from stoker.pod.termination_message import TerminationMessage
from stoker.trainer.agent.agent import Agent
from stoker.trainer.agent.console import Console, run_output
from stoker.trainer.agent.pod_rank import find_pod_rank
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.error_causes import ERROR_CAUSES, describe_error
from stoker.trainer.protocol.parallel_dims import check_supported


def main(arguments: Sequence[str] | None = None, rank_module: Sequence[str] = ("-m", "stoker.trainer.rank")) -> int:
    """The exit code of the run (docs/exit-codes.md).

    `rank_module` are the interpreter's arguments that start a rank.
    """
    parser = CommandParser(
        prog="python -m stoker.trainer",
        description="Train a model: start this pod's ranks, serve their status, and write a termination message.",
        epilog="example: python -m stoker.trainer --config /etc/stoker/config.json",
    )
    parser.add_argument("--config", required=True, type=Path, help="the run's configuration, JSON")
    path: Path = parser.parse_args(arguments).config
    try:
        config = load(TrainerConfig, path)
        check_supported(config)
        message = asyncio.run(run_pod(config, [sys.executable, *rank_module, "--config", str(path)], os.environ))
    except Exception as error:  # noqa: BLE001  (the termination message must be written whatever happened)
        message = _failure(error)
    _write(message, path)
    return EXIT_CODES[message.cause]


async def run_pod(
    config: TrainerConfig, rank_command: Sequence[str], environment: Mapping[str, str]
) -> TerminationMessage:
    """Run this pod's part; SIGTERM, SIGHUP and Ctrl-C save within the grace period."""
    output = None if sys.stdout is None else run_output(sys.stdout, sys.stderr)
    console = Console(RichConsole(file=output, highlight=False), config.logging.every_steps)
    agent = Agent(
        config,
        find_pod_rank(config, environment),
        rank_command=rank_command,
        environment=environment,
        console=console,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, agent.interrupt, number.name)
    message: TerminationMessage | None = None
    try:
        message = await agent.run()
    finally:
        console.close(message)
    if config.retention == "own" and message.saves:
        console.line(f"newest checkpoint: {Path(config.checkpoint.root, message.saves[-1].folder)}")
    return message


def _failure(error: Exception) -> TerminationMessage:
    """The termination message of a run that did not start, and its line or stack in the log."""
    cause = cause_of_error(error, ERROR_CAUSES, Cause.INTERNAL)
    detail = describe_error(error, cause)
    if is_explained(cause):
        sys.stderr.write(f"{detail}\n")
    else:
        traceback.print_exc()
    return TerminationMessage(cause=cause, detail=detail)


def _write(message: TerminationMessage, config: Path) -> None:
    """Write the termination message to the configured path, also when the rest of the configuration is invalid."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message.write(json.loads(config.read_text())["termination_log"])
