"""`python -m stoker.gateway --config FILE`: the REST API of one cluster."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

from stoker.gateway.config import GatewayConfig
from stoker.gateway.program import run
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import load

log = logging.getLogger("stoker.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM (exit code 0); others are those of docs/exit-codes.md."""
    parser = CommandParser(prog="python -m stoker.gateway", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="GatewayConfig as JSON (docs/gateway.md)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request otherwise
    try:
        config = load(GatewayConfig, arguments.config)
        logging.getLogger("stoker").setLevel(config.log_level.upper())
        asyncio.run(_run(config))
    except ValueError as error:
        log.error("%s: %s", Cause.CONFIG_INVALID, error)
        return EXIT_CODES[Cause.CONFIG_INVALID]
    except OSError as error:
        log.error("%s: %s", Cause.INTERNAL, error)
        return EXIT_CODES[Cause.INTERNAL]
    return 0


async def _run(config: GatewayConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run(config, stop)
