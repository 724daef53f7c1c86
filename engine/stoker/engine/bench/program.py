"""Measure an engine in this process, without HTTP. MODEL is what `stoker serve` takes.

stoker bench throughput ~/models/SmolLM2-135M-Instruct --requests 64
stoker bench latency ~/models/SmolLM2-135M-Instruct --batch 4 --output-tokens 64 --json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.checkpoint.remote.model_uri import is_model_uri, parse_model_uri
from stoker.engine.bench.measure import check_length, latency_rounds, throughput_rounds
from stoker.engine.bench.workload import Workload
from stoker.engine.config import EngineConfig
from stoker.engine.engine_options import add_engine_options, engine_sections, given
from stoker.engine.llm import LLM
from stoker.engine.model_path import check_model
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import parse
from stoker.pod.token_lengths import TokenLengths, count_above_zero, token_lengths

TIMES = {"ttft_ms": "first token", "tpot_ms": "per output token", "e2el_ms": "whole request"}
COLUMNS = ("mean", "min", "p50", "p90", "p99", "max")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0, or a code of docs/exit-codes.md."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        with LLM(_config(arguments)) as llm:
            _throughput(llm, arguments) if arguments.verb == "throughput" else _latency(llm, arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"stoker bench {arguments.verb}: {error}\n")
        return EXIT_CODES[Cause.CONFIG_INVALID]
    except RuntimeError as error:
        sys.stderr.write(f"stoker bench {arguments.verb}: {error}\n")
        return EXIT_CODES[Cause.INTERNAL]
    return 0


def _throughput(llm: LLM, arguments: argparse.Namespace) -> None:
    workload = Workload(
        arguments.requests, arguments.input_tokens, arguments.output_tokens, arguments.shared_tokens, arguments.seed
    )
    check_length(llm, workload)
    found = []
    for number, figures in enumerate(throughput_rounds(llm, workload, arguments.rounds), 1):
        found.append(figures)
        if not arguments.json:
            _say(_round_line(number, figures))
    if arguments.json:
        _say(json.dumps({**_about(llm, arguments), **found[-1], "rounds": found}, indent=1))
    elif arguments.rounds > 1:
        _say(f"The figure is that of round {arguments.rounds}: kernels and graphs are made in the first.")


def _round_line(number: int, figures: Mapping[str, Any]) -> str:
    rates = f"{figures['output_tokens_per_s']:,g} output tokens/s, {figures['total_tokens_per_s']:,g} with input"
    done = f"{figures['requests']} requests in {figures['seconds']:g} s"
    return f"round {number}: {done}, {figures['requests_per_s']:g} requests/s, {rates}"


def _latency(llm: LLM, arguments: argparse.Namespace) -> None:
    own, output = (TokenLengths(count, count) for count in (arguments.input_tokens, arguments.output_tokens))
    workload = Workload(arguments.batch, own, output, seed=arguments.seed)
    check_length(llm, workload)
    found = latency_rounds(llm, workload, arguments.rounds)
    if arguments.json:
        _say(json.dumps({**_about(llm, arguments), **found}, indent=1))
        return
    _say(
        f"{found['requests']} requests in {arguments.rounds} rounds of {arguments.batch}, after one that does not count"
    )
    _say(" " * 18 + "".join(f"{column:>11}" for column in COLUMNS) + "   ms")
    for name, title in TIMES.items():
        if found[name]:
            _say(f"{title:<18}" + "".join(f"{found[name][column]:>11,.2f}" for column in COLUMNS))


def _about(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    plan = llm.plan
    dtype = str(plan.dtype).removeprefix("torch.")
    return {"model": arguments.path, "device": plan.device, "dtype": dtype, "attention": str(plan.attention)}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration of the engine. Raises ConfigError."""
    path = arguments.path if is_model_uri(arguments.path) else str(Path(arguments.path).expanduser())
    model = given({"path": path, "dtype": arguments.dtype})
    config = parse(
        EngineConfig, given({**engine_sections(arguments), "model": model}), f"stoker bench {arguments.verb}"
    )
    if is_model_uri(path):
        parse_model_uri(path)
    else:
        check_model(Path(path))
    return config


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="stoker bench", description="Measure throughput and latency.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="throughput|latency")
    _add_throughput(_verb(verbs, "throughput", "tokens per second of many requests at once"))
    _add_latency(_verb(verbs, "latency", "time of the first token and of each further one"))
    return parser


def _verb(verbs: Any, name: str, line: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=line, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verb.add_argument("path", metavar="MODEL", help="a folder, a checkpoint or a GGUF file; or hf://, s3://, oci://")
    return verb


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    drawn: dict[str, Any] = {"type": token_lengths, "default": TokenLengths(100, 1024), "metavar": "N|MIN:MAX"}
    parser.add_argument("--requests", type=count_above_zero, default=256, metavar="N", help="all at once (default 256)")
    parser.add_argument("--input-tokens", **drawn, help="of a prompt, beside the shared ones (default 100:1024)")
    parser.add_argument("--output-tokens", **drawn, help="default 100:1024")
    parser.add_argument(
        "--shared-tokens", type=_whole, default=0, metavar="N", help="first tokens of every prompt (default 0)"
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


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number is needed (got {text!r})")
    return int(text)
