"""The command line of `stoker bench throughput` and `stoker bench latency`."""

from __future__ import annotations

import argparse
from typing import Any

from stoker.engine.bench.workload import Workload
from stoker.engine.engine_options import add_engine_options
from stoker.pod.command_line import CommandParser
from stoker.pod.token_lengths import TokenLengths, count, count_above_zero, token_lengths

THROUGHPUT = """Measure how many tokens per second an engine makes when it has many requests at once.

stoker bench throughput ~/models/SmolLM2-135M-Instruct --requests 64
stoker bench throughput ~/models/SmolLM2-135M-Instruct --input-tokens 512 --output-tokens 64:256 --json

All requests come at once. Prompts are random tokens, answers are greedy and have their full length. Every round has
requests of the same lengths with other tokens, so the prefix cache serves only what --shared-tokens asks for. The last
round is the figure."""
LATENCY = """Measure how long an engine takes for the first token, for each further one, and for a whole request.

stoker bench latency ~/models/SmolLM2-135M-Instruct
stoker bench latency ~/models/SmolLM2-135M-Instruct --batch 4 --output-tokens 64 --rounds 100 --json

The requests of a round come at once and are computed together; the next round begins when all have ended. Prompts are
random tokens, answers are greedy and have their full length. A round before the others warms up and does not count."""


def options() -> argparse.ArgumentParser:
    """The command line of both verbs; `verb` is the name of the one that was given."""
    parser = CommandParser(prog="stoker bench", description="Measure throughput and latency.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="throughput|latency")
    _add_throughput(_verb(verbs, "throughput", THROUGHPUT, "tokens per second of many requests at once"))
    _add_latency(_verb(verbs, "latency", LATENCY, "time of the first token and of each further one"))
    return parser


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The requests that the command line asks for."""
    if arguments.verb == "latency":
        own, output = (TokenLengths(count, count) for count in (arguments.input_tokens, arguments.output_tokens))
        return Workload(arguments.batch, own, output, seed=arguments.seed)
    return Workload(
        arguments.requests, arguments.input_tokens, arguments.output_tokens, arguments.shared_tokens, arguments.seed
    )


def _verb(verbs: Any, name: str, description: str, line: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=line, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verb.add_argument("path", metavar="MODEL", help="a folder, a checkpoint or a GGUF file; or hf://, s3://, oci://")
    return verb


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    drawn: dict[str, Any] = {"type": token_lengths, "default": TokenLengths(100, 1024), "metavar": "N|MIN:MAX"}
    parser.add_argument("--requests", type=count_above_zero, default=256, metavar="N", help="all at once (default 256)")
    parser.add_argument("--input-tokens", **drawn, help="of a prompt, beside the shared ones (default 100:1024)")
    parser.add_argument("--output-tokens", **drawn, help="default 100:1024")
    parser.add_argument(
        "--shared-tokens", type=count, default=0, metavar="N", help="first tokens of every prompt (default 0)"
    )
    parser.add_argument(
        "--rounds", type=count_above_zero, default=2, metavar="N", help="the last one is the figure (default 2)"
    )
    _add_common(parser)


def _add_latency(parser: argparse.ArgumentParser) -> None:
    for name, default, line in (
        ("--batch", 1, "equal requests at once"),
        ("--input-tokens", 128, "of each prompt"),
        ("--output-tokens", 128, "of each answer"),
        ("--rounds", 5, "measured, after one that is not"),
    ):
        parser.add_argument(
            name, type=count_above_zero, default=default, metavar="N", help=f"{line} (default {default})"
        )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same prompts (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser.add_argument_group("engine"))
