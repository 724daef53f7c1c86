"""The program: makes the requests that its options describe, sends them, and prints the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import httpx

from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT, code_of_file
from stoker.cli.load.exchange import Answer, Target
from stoker.cli.load.figures import figures, parse_goal
from stoker.cli.load.options import DEFAULT_REQUESTS, options
from stoker.cli.load.report import AT_ONCE, report
from stoker.cli.load.sending import send_all
from stoker.cli.load.workload import Kind, Request, Writer, arrivals, drawn, of_dataset, of_trace, parse_object
from stoker.cli.output_file import OutputFile, OutputFileError

WARMUP_AT_ONCE = 4
LINE_S = 10.0
"""Between two lines of progress in a log."""


class NoServer(Exception):
    """The server cannot be reached or refuses the first request; the message is for people."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench.

    0: all requests were answered; 1: one failed, or no server; 64: wrong input; 68: the records cannot be written; 130:
    Ctrl-C.
    """
    arguments = options().parse_args(argv)
    try:
        with nullcontext() if arguments.records is None else OutputFile(arguments.records) as records:
            found, answers = measure(arguments)
            _print_figures(found, as_json=arguments.json)  # first: a full disk shall not lose them, too
            if records is not None:
                records.write("".join(json.dumps(asdict(answer)) + "\n" for answer in answers).encode())
    except OutputFileError as error:
        sys.stderr.write(f"stoker bench serve: --records {error}\n")
        return code_of_file(error)
    except (ValueError, OSError, httpx.InvalidURL) as error:
        sys.stderr.write(f"stoker bench serve: {error}\n")
        return WRONG_INPUT
    except NoServer as error:
        sys.stderr.write(f"stoker bench serve: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED if found["failed"] else 0


def _print_figures(found: Mapping[str, Any], *, as_json: bool) -> None:
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if as_json else "\n".join(report(found)) + "\n")
    sys.stdout.flush()


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Answer]]:
    """Return figures and answers.

    Raises:
        ValueError: an option or a file cannot be used.
        OSError: a file cannot be read.
        NoServer: there is no server at the URL.
    """
    _refuse_idle_options(arguments)
    goals, extra = dict(map(parse_goal, arguments.goodput)), parse_object(arguments.body, "--body")
    planned = list(requests_of(arguments))
    target, model = find_server(arguments)
    bodies = [(one.due_s, one.max_tokens, _body(one, model, arguments, extra)) for one in planned]
    if arguments.warmup:
        warm = [(0.0, one.max_tokens, _body(one, model, arguments, extra)) for one in _warmup(arguments)]
        asyncio.run(send_all(target, warm, most_at_once=WARMUP_AT_ONCE, timeout_s=arguments.timeout_s))
    sending = send_all(
        target,
        bodies,
        most_at_once=arguments.concurrency,
        timeout_s=arguments.timeout_s,
        told=_progress(len(bodies)),
    )
    answers = asyncio.run(sending)
    about = {"url": arguments.url, "model": model, "endpoint": arguments.endpoint, "rate": _rate_of(arguments)}
    return {**about, **figures(answers, goals)}, answers


def _refuse_idle_options(arguments: argparse.Namespace) -> None:
    """Refuse options without effect. Raises ValueError."""
    if arguments.trace is None and arguments.trace_speed != 1.0:
        raise ValueError(f"--trace-speed {arguments.trace_speed:g} needs --trace")
    if arguments.trace is not None and not math.isinf(arguments.rate):
        raise ValueError(f"--rate {arguments.rate:g} is not allowed with --trace, which has its own times")
    if math.isinf(arguments.rate) and arguments.burstiness != 1.0:
        raise ValueError(f"--burstiness {arguments.burstiness:g} needs --rate")


def requests_of(arguments: argparse.Namespace) -> list[Request]:
    """Make the requests that the options describe. Raises ValueError."""
    writer = Writer(_kind(arguments), arguments.seed, arguments.vocabulary)
    count = arguments.requests or DEFAULT_REQUESTS
    due_s = arrivals(count, arguments.rate, arguments.burstiness, arguments.seed)
    file = arguments.trace or arguments.dataset
    if file is None:
        return list(drawn(writer, due_s, arguments.input_tokens, arguments.output_tokens, arguments.shared_tokens))
    with file.open(encoding="utf-8") as lines:
        found = (
            of_trace(writer, lines, arguments.requests, arguments.trace_speed)
            if arguments.trace is not None
            else of_dataset(lines, due_s, arguments.output_tokens, arguments.seed)
        )
        try:
            return [_checked(one, arguments) for one in found]
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def _warmup(arguments: argparse.Namespace) -> Iterator[Request]:
    """Random requests of `--input-tokens` and `--output-tokens`, which no measured one finds in a cache."""
    writer = Writer(_kind(arguments), -1 - arguments.seed, arguments.vocabulary)
    due_s = [0.0] * arguments.warmup
    return drawn(writer, due_s, arguments.input_tokens, arguments.output_tokens, arguments.shared_tokens)


def _kind(arguments: argparse.Namespace) -> Kind:
    kind: Kind = arguments.prompts or ("words" if arguments.endpoint == "chat" else "ids")
    if kind == "ids" and arguments.endpoint == "chat":
        raise ValueError("--prompts ids needs --endpoint completions: a chat's messages are text")
    return kind


def find_server(arguments: argparse.Namespace) -> tuple[Target, str]:
    """Return where requests go, and the model that answers. Raises ValueError and NoServer."""
    text = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
    url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    port = (443 if url.scheme == "https" else 80) if url.port is None else url.port
    if url.scheme not in ("http", "https") or not url.host or not 0 < port < 65536:
        raise ValueError(f"url: http://HOST:PORT is needed, with a port from 1 to 65535 (got {arguments.url})")
    headers, tls = _headers(arguments), ssl.create_default_context() if url.scheme == "https" else None
    path = f"{url.path.rstrip('/')}/v1/{'chat/completions' if arguments.endpoint == 'chat' else 'completions'}"
    target = Target(url.host, port, path, tls, headers)
    return target, arguments.model or _first_model(str(url).rstrip("/"), target)


def _first_model(base: str, target: Target) -> str:
    """Ask as the bench will: with its certificates, and through no proxy of the environment."""
    verify = target.tls if target.tls is not None else True
    try:
        response = httpx.get(f"{base}/v1/models", headers=target.headers, timeout=30, verify=verify, trust_env=False)
    except httpx.HTTPError as error:
        raise NoServer(f"{base}: {error}") from error
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError) as error:
        raise NoServer(f"{base}/v1/models names no model ({error}): give --model") from None


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    where = arguments.api_key_file
    key = where.read_text().strip() if where is not None else os.environ.get("OPENAI_API_KEY", "")
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{where or 'OPENAI_API_KEY'}: one API key of plain letters is needed, on one line")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _body(request: Request, model: str, arguments: argparse.Namespace, extra: dict[str, Any]) -> bytes:
    if arguments.endpoint == "chat":
        is_list = isinstance(request.prompt, list)
        content: dict[str, Any] = {
            "messages": request.prompt if is_list else [{"role": "user", "content": request.prompt}]
        }
    else:
        content = {"prompt": request.prompt}
    content |= {"model": model, "max_tokens": request.max_tokens, "stream": True, "temperature": arguments.temperature}
    content["stream_options"] = {"include_usage": True}
    if not arguments.stop_at_eos:
        content["ignore_eos"] = True
    return json.dumps({**content, **extra}).encode()


def _checked(request: Request, arguments: argparse.Namespace) -> Request:
    is_messages = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
    if is_messages != (arguments.endpoint == "chat") and (is_messages or isinstance(request.prompt, list)):
        fitting = "chat" if is_messages else "completions"
        raise ValueError(f"its prompts need --endpoint {fitting}")
    return request


def _rate_of(arguments: argparse.Namespace) -> float | str:
    if arguments.trace is not None:
        return f"the trace's x {arguments.trace_speed:g}"
    return AT_ONCE if math.isinf(arguments.rate) else float(arguments.rate)


def _progress(total: int) -> Callable[[int, int, int], None]:
    """Progress for people: one line that changes on a terminal, a line now and then in a log."""
    last = time.monotonic()

    def told(sent: int, answered: int, failed: int) -> None:
        nonlocal last
        text = f"{answered} of {total} answered, {sent - answered - failed} under way, {failed} failed"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}{chr(10) if answered + failed == total else ''}")
            sys.stderr.flush()
        elif time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            sys.stderr.write(f"{text}\n")

    return told
