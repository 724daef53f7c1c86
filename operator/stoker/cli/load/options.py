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
    add = serve.add_argument
    add("url", help="address of the server, such as http://127.0.0.1:8000")
    add("--model", help="name of the model (default: the server's first)")
    add("--endpoint", choices=["completions", "chat"], default="completions", help="default: completions")
    add(
        "--requests",
        type=count_above_zero,
        metavar="N",
        help=f"number of requests (default {DEFAULT_REQUESTS}; of a trace all)",
    )
    add(
        "--rate",
        type=_rate,
        default=math.inf,
        metavar="PER_S",
        help="requests per second, at random times (default inf: all at once)",
    )
    add(
        "--burstiness",
        type=_above_zero,
        default=1.0,
        metavar="SHAPE",
        help="of the pauses: 1 is a Poisson process, less comes in bursts, more is more even (default 1)",
    )
    add(
        "--concurrency",
        type=count_above_zero,
        metavar="N",
        help="most requests at once; others wait (default: no limit)",
    )
    add(
        "--input-tokens",
        type=token_lengths,
        default=TokenLengths(512, 512),
        metavar="N|MIN:MAX",
        help="tokens of a prompt that are its own (default 512)",
    )
    add("--output-tokens", type=token_lengths, default=TokenLengths(128, 128), metavar="N|MIN:MAX", help="default 128")
    add(
        "--shared-tokens",
        type=count,
        default=0,
        metavar="N",
        help="tokens before them that all prompts have in common (default 0)",
    )
    files = serve.add_mutually_exclusive_group()
    files.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="prompts of a JSONL file: prompt or messages, and max_tokens where it differs from --output-tokens",
    )
    files.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="times and lengths of a JSONL trace in Mooncake's form: timestamp, input_length, output_length, and "
        f"hash_ids of {TRACE_BLOCK} tokens each",
    )
    add("--trace-speed", type=_above_zero, default=1.0, metavar="FACTOR", help="2 is twice as fast (default 1)")
    add(
        "--prompts",
        choices=["ids", "words"],
        help="random prompts as token ids, or as words for servers without them (default: ids; with chat words)",
    )
    add(
        "--vocabulary",
        type=_vocabulary,
        default=10_000,
        metavar="N",
        help="token ids are drawn below it (default 10000)",
    )
    add("--stop-at-eos", action="store_true", help="let answers end early, and leave ignore_eos out of requests")
    add("--temperature", type=float, default=0.0, help="default 0")
    add("--body", default="{}", metavar="JSON", help="further fields of each request")
    add(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="also count requests within a goal: ttft, tpot, gap (the longest) or e2el; may be repeated",
    )
    add("--warmup", type=count, default=0, metavar="N", help="random requests before, not counted (default 0)")
    add("--seed", type=int, default=0, help="the same seed makes the same requests (default 0)")
    add("--timeout-s", type=_above_zero, default=600.0, metavar="S", help="longest time of one request (default 600)")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key (default: the variable OPENAI_API_KEY)",
    )
    add("--records", type=Path, metavar="FILE", help="write every answer's times and counts, one JSON object a line")
    add("--json", action="store_true", help="print one JSON object")
    return parser


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
