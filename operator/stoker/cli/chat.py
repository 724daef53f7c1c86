"""Talk to an OpenAI server in the terminal.

stoker chat http://127.0.0.1:8000
stoker chat http://127.0.0.1:8000 --once "What is the capital of France?"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser, run_program
from stoker.pod.whole_lines import lines_of

CONTENT, REASONING = "content", ("reasoning", "reasoning_content")
"""Fields of a delta; servers have one of reasoning's names, or both."""
SHOWN_CHARACTERS = 80
"""Of an event that cannot be read."""
HELP = "/new begins a new conversation, /quit or Ctrl-D ends"


class ChatError(Exception):
    """The server cannot be reached or refused the request; the message is for people."""


@dataclass
class ChatConversation:
    """The messages so far, and the options of the next request."""

    http: httpx.Client
    model: str | None = None
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    shows_reasoning: bool = False
    """Whether reasoning is streamed before the answer; it is no part of the conversation."""

    def ask(self, question: str) -> Iterator[str]:
        """Stream the answer; only a complete one becomes part of the conversation.

        Raises:
            ChatError: there is no answer, or it broke off.
        """
        messages = [*self._system(), *self.messages, {"role": "user", "content": question}]
        answer, reasons = "", False
        for kind, text in self._stream({"messages": messages, "stream": True, **self._named(), **self.options}):
            if kind == CONTENT:
                answer += text
            elif not self.shows_reasoning:
                continue
            if reasons and kind == CONTENT:
                yield "\n\n"
            reasons = kind != CONTENT
            yield text
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def find_model(self) -> str:
        """Ask the server, before the first question, which model will answer; empty when it does not list any.

        Raises:
            ChatError: the server cannot be reached, or the API key is missing or wrong.
        """
        try:
            response = self.http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatError(f"{self.http.base_url}: {error}{_way_to(self.http.base_url.host)}") from error
        if response.status_code == 401:
            raise ChatError(_reason(response))
        return self.model or _first_model(response)

    def forget(self) -> None:
        self.messages.clear()

    def _system(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _named(self) -> dict[str, str]:
        return {} if self.model is None else {"model": self.model}

    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_reason(response))
                yield from _texts(lines_of(response.iter_bytes()))
        except httpx.HTTPError as error:
            raise ChatError(f"{self.http.base_url}: {error}{_way_to(self.http.base_url.host)}") from error


def _way_to(host: str) -> str:
    """A hint for a word without dots, which may be the name of a deployment."""
    if "." in host or ":" in host or host == "localhost":
        return ""
    return (
        f"; a deployment of a cluster is reached by `kubectl port-forward service/{host} 8000`, one of `stoker local` "
        "at the address that `stoker local get infd` shows"
    )


def _texts(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Extract the texts from the events of a stream, each with its field: the answer's, or that of reasoning.

    Raises:
        ChatError: an event carries an error, or the stream broke off.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk = _chunk(data)
        if chunk.get("error"):
            raise ChatError(_message(chunk["error"]))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            named = ((name, delta.get(name)) for name in (*REASONING, CONTENT))
            found = ((name, text) for name, text in named if isinstance(text, str) and text)
            if (first := next(found, None)) is not None:
                yield first
    raise ChatError("the answer broke off")


def _chunk(data: str) -> dict[str, Any]:
    """Read an event of a stream. Raises ChatError: it is no JSON object."""
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ChatError(f"an event of the stream is no JSON object: {data[:SHOWN_CHARACTERS]}")
    return chunk


def _message(error: object) -> str:
    """The text of an error, which some servers send without an object around it."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _first_model(response: httpx.Response) -> str:
    """The first model; where a server lists those that it could load, too, the first that is ready."""
    try:
        cards = response.json()["data"]
        ready = [card for card in cards if card.get("status", "ready") == "ready"]
        return str((ready or cards)[0]["id"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""


def _reason(response: httpx.Response) -> str:
    try:
        return _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0 after a conversation, else a code of docs/exit-codes.md."""
    arguments = _parser().parse_args(argv)
    try:
        headers = _headers(arguments.api_key_file)
        timeout = httpx.Timeout(arguments.timeout_s, connect=5)
        with httpx.Client(base_url=_base(arguments.url), headers=headers, timeout=timeout) as http:
            conversation = ChatConversation(http, arguments.model, arguments.system, _options(arguments))
            if arguments.once is not None:
                _say(conversation.ask(arguments.once), sys.stdout.write)
            else:
                conversation.shows_reasoning = True
                _converse(conversation, conversation.find_model())
    except (OSError, ValueError, httpx.InvalidURL) as error:
        sys.stderr.write(f"stoker chat: {error}\n")
        return EXIT_CODES[Cause.CONFIG_INVALID]
    except ChatError as error:
        sys.stderr.write(f"stoker chat: {error}\n")
        return EXIT_CODES[Cause.PEER_LOST]
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


def _say(answer: Iterator[str], write: Callable[[str], object]) -> None:
    written = False
    try:
        for text in answer:
            write(text)
            sys.stdout.flush()
            written = True
    except ChatError:
        if written:
            write("\n")  # the error gets a line of its own
        raise
    write("\n")


def _converse(conversation: ChatConversation, model: str) -> None:
    """Ask for questions until the end of the input; a failed answer does not end the conversation."""
    from rich.console import Console  # only a conversation needs it, and it takes 50 ms to import

    console = Console(highlight=False)
    name = f"{model} at " if model else ""
    console.print(f"{name}{conversation.http.base_url} · {HELP}", style="bold", markup=False)
    while True:
        try:
            question = console.input("[bold cyan]you >[/] ").strip()
        except EOFError:
            console.print()
            return
        if question in ("/quit", "/exit"):
            return
        if question == "/new":
            conversation.forget()
        elif question:
            _answer(console, conversation, question)


def _answer(console: Any, conversation: ChatConversation, question: str) -> None:
    console.print("[bold green]model >[/] ", end="")
    try:
        _say(conversation.ask(question), lambda text: console.print(text, end="", markup=False, soft_wrap=True))
    except ChatError as error:
        console.print(f"[red]{error}[/]")
    except KeyboardInterrupt:  # Ctrl-C ends the answer, not the conversation
        console.print("[dim] (interrupted)[/]")


def _base(url: str) -> str:
    """Parse the server's address, to which `/v1/...` is appended.

    Raises:
        ValueError: it is not an HTTP address.
    """
    url = url if "://" in url else f"http://{url}"
    parts = httpx.URL(url)
    port = 80 if parts.port is None else parts.port
    if parts.scheme not in ("http", "https") or not parts.host or not 0 < port < 65536:
        raise ValueError(f"url: http://HOST:PORT is needed, with a port from 1 to 65535 (got {url})")
    return url.rstrip("/").removesuffix("/v1")


def _headers(api_key_file: str | None) -> dict[str, str]:
    where = api_key_file or "OPENAI_API_KEY"
    key = Path(api_key_file).read_text().strip() if api_key_file else os.environ.get("OPENAI_API_KEY", "")
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{where}: one API key of plain letters is needed, on one line")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    named = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens, "seed": arguments.seed}
    return {name: value for name, value in named.items() if value is not None}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 and below 1,000,000 is needed (got {text})")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="stoker chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="address of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--once", metavar="QUESTION", help="ask one question, print the answer and end")
    parser.add_argument("--model", help="name of the model; default: the server's first")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    parser.add_argument("--max-tokens", type=int, help="longest answer; default: what the context has left")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key (default: the variable OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--timeout-s", type=_seconds, default=600, help="longest silence of the server in seconds (default 600)"
    )
    return parser


if __name__ == "__main__":
    run_program(main, "stoker chat")
