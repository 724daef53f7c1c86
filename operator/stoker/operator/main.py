"""`python -m stoker.operator --config FILE`: one replica of the operator on a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from stoker.operator.service.config import OperatorConfig
from stoker.operator.service.program import OperatorProgram
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import load

log = logging.getLogger("stoker.operator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM (exit code 0); others are those of docs/exit-codes.md."""
    parser = CommandParser(prog="python -m stoker.operator", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="OperatorConfig as JSON (docs/operator.md)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = load(OperatorConfig, arguments.config)
        _set_up_logs(config)
        asyncio.run(run(config))
    except ValueError as error:  # ConfigError, NoCredentials and BadKeys are such
        log.error("%s: %s", Cause.CONFIG_INVALID, error)
        return EXIT_CODES[Cause.CONFIG_INVALID]
    except OSError as error:
        log.error("%s: %s", Cause.INTERNAL, error)
        return EXIT_CODES[Cause.INTERNAL]
    return 0


async def run(config: OperatorConfig) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await OperatorProgram(config).run(stop)


class JsonLogFormatter(logging.Formatter):
    """One JSON object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _set_up_logs(config: OperatorConfig) -> None:
    root = logging.getLogger()
    root.setLevel(config.log_level.upper())
    if config.log_format == "json":
        for handler in root.handlers:
            handler.setFormatter(JsonLogFormatter())
    logging.getLogger("kopf").setLevel(max(root.level, logging.WARNING))  # a line per event otherwise
