"""Measure a server that speaks OpenAI's API: requests are sent when they are due, whatever the server does.

stoker bench serve http://127.0.0.1:8000 --rate 16 --input-tokens 512 --output-tokens 128
stoker bench serve http://127.0.0.1:8000 --rate 4 --goodput ttft:200 --goodput tpot:30 --json
stoker bench serve http://127.0.0.1:8000 --trace mooncake_conversation.jsonl --trace-speed 0.5 --requests 500
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from stoker.cli.load.workload import FIRST_ID, TRACE_BLOCK
from stoker.pod.command_line import CommandParser
from stoker.pod.token_lengths import TokenLengths, count, count_above_zero, token_lengths

DEFAULT_REQUESTS = 200


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = CommandParser(prog="stoker bench", description="Measure throughput and latency.")
    serve = parser.add_subparsers(dest="verb", required=True, metavar="serve").add_parser(
        "serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="measure a server over HTTP",
    )
    _add_server(serve)
    _add_times(serve.add_argument_group("when requests are sent"))
    _add_lengths(serve.add_argument_group("what is sent"))
    _add_files(serve.add_argument_group("prompts of a file"))
    _add_report(serve.add_argument_group("what is measured"))
    return parser


def _add_server(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("url", help="address of the server, such as http://127.0.0.1:8000")
    add("--model", help="name of the model (default: the server's first)")
    add("--endpoint", choices=["completions", "chat"], default="completions", help="default: completions")
    key = "file with the API key (default: the variable OPENAI_API_KEY)"
    add("--api-key-file", type=Path, metavar="FILE", help=key)
    add("--timeout-s", type=_above_zero, default=600.0, metavar="S", help="longest time of one request (default 600)")


def _add_times(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    number = f"number of requests (default {DEFAULT_REQUESTS}; of a trace all)"
    add("--requests", type=count_above_zero, metavar="N", help=number)
    rate = "requests per second, at random times (default inf: all at once)"
    add("--rate", type=_rate, default=math.inf, metavar="PER_S", help=rate)
    shape = "of the pauses: 1 is a Poisson process, less comes in bursts, more is more even (default 1)"
    add("--burstiness", type=_above_zero, default=1.0, metavar="SHAPE", help=shape)
    most = "most requests at once; others wait (default: no limit)"
    add("--concurrency", type=count_above_zero, metavar="N", help=most)


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    own, answer = TokenLengths(512, 512), TokenLengths(128, 128)
    help_own = "tokens of a prompt that are its own (default 512)"
    add("--input-tokens", type=token_lengths, default=own, metavar="N|MIN:MAX", help=help_own)
    add("--output-tokens", type=token_lengths, default=answer, metavar="N|MIN:MAX", help="default 128")
    shared = "tokens before them that all prompts have in common (default 0)"
    add("--shared-tokens", type=count, default=0, metavar="N", help=shared)
    form = "random prompts as token ids, or as words for servers without them (default: ids; with chat words)"
    add("--prompts", choices=["ids", "words"], help=form)
    below = "token ids are drawn below it (default 10000)"
    add("--vocabulary", type=_vocabulary, default=10_000, metavar="N", help=below)
    add("--stop-at-eos", action="store_true", help="let answers end early, and leave ignore_eos out of requests")
    add("--temperature", type=float, default=0.0, help="default 0")
    add("--body", default="{}", metavar="JSON", help="further fields of each request")
    add("--seed", type=int, default=0, help="the same seed makes the same requests (default 0)")


def _add_files(group: argparse._ArgumentGroup) -> None:
    files = group.add_mutually_exclusive_group()
    prompts = "prompts of a JSONL file: prompt or messages, and max_tokens where it differs from --output-tokens"
    files.add_argument("--dataset", type=Path, metavar="FILE", help=prompts)
    trace = "times and lengths of a JSONL trace in Mooncake's form: timestamp, input_length, output_length, and "
    trace += f"hash_ids of {TRACE_BLOCK} tokens each"
    files.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    faster = "2 is twice as fast (default 1)"
    group.add_argument("--trace-speed", type=_above_zero, default=1.0, metavar="FACTOR", help=faster)


def _add_report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    goal = "also count requests within a goal: ttft, tpot, gap (the longest) or e2el; may be repeated"
    add("--goodput", action="append", default=[], metavar="NAME:MS", help=goal)
    add("--warmup", type=count, default=0, metavar="N", help="random requests before, not counted (default 0)")
    add("--records", type=Path, metavar="FILE", help="write every answer's times and counts, one JSON object a line")
    add("--json", action="store_true", help="print one JSON object")


def _rate(text: str) -> float:
    return math.inf if text == "inf" else _above_zero(text)


def _above_zero(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed (got {text!r})")
    return found


def _vocabulary(text: str) -> int:
    found = count_above_zero(text)
    if found <= FIRST_ID:
        raise argparse.ArgumentTypeError(f"more than {FIRST_ID} is needed, as ids below are often special (got {text})")
    return found
