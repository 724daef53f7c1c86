"""Serve one model with the OpenAI API, without an operator.

stoker serve ~/models/SmolLM2-135M-Instruct
stoker serve run/checkpoints/step-00000100.1a2b3c4d --port 8001 --served-name mine
stoker serve --models-dir ~/models
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from stoker.checkpoint.manifest_file import being_read
from stoker.checkpoint.remote.model_uri import is_model_uri, model_name, parse_model_uri
from stoker.engine.config import EngineConfig
from stoker.engine.core.messages import CoreState
from stoker.engine.engine_options import add_engine_options, engine_sections, given
from stoker.engine.model_path import check_model
from stoker.engine.program import Environment, run_engine
from stoker.engine.shelf.folders import ModelFolder, model_folders
from stoker.engine.shelf.program import run_shelf
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.collection import spare_from_collection
from stoker.pod.command_line import CommandParser, run_program
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.termination_message import TerminationMessage
from stoker.pod.tracing import tracer_of

WRONG_PLACE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.ENOENT, errno.EISDIR, socket.EAI_NONAME)
"""Errors of addresses and files that the command line named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM, then return 0; else a code of docs/exit-codes.md."""
    arguments = _parsed(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        word = _serve_directory(arguments) if arguments.models_dir is not None else _serve_model(arguments)
    except ValueError as error:
        word = TerminationMessage(cause=Cause.CONFIG_INVALID, detail=str(error))
    except OSError as error:
        cause = Cause.CONFIG_INVALID if error.errno in WRONG_PLACE else Cause.INTERNAL
        place = f"{error.filename}: " if error.filename else ""
        word = TerminationMessage(cause=cause, detail=f"{place}{error.strerror or error}")
    if word.cause is Cause.INTERRUPTED:
        return 0
    sys.stderr.write(f"stoker serve: {word.detail.removeprefix('stoker serve: ')}\n")
    return EXIT_CODES[word.cause]


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.path is None and arguments.models_dir is None:
        parser.error("the path of a model is needed, or --models-dir")
    return arguments


def _serve_model(arguments: argparse.Namespace) -> TerminationMessage:
    if arguments.max_models is not None:
        raise ConfigError("--max-models needs --models-dir")
    config = parse(EngineConfig, engine_config(arguments), "stoker serve")
    local = not is_model_uri(config.model.path)
    if local:
        check_model(Path(config.model.path))
    else:
        parse_model_uri(config.model.path)
    progress = _Progress(config)
    with being_read(Path(config.model.path)) if local else nullcontext():  # so that it can also be started anew
        return run_engine(
            config,
            Environment(
                on_state=progress.state,
                on_listen=progress.listening,
                on_serving=spare_from_collection,
                tracer=tracer_of("stoker-engine", os.environ),
            ),
        )


def _serve_directory(arguments: argparse.Namespace) -> TerminationMessage:
    """Serve the models of a directory, which clients load by request."""
    directory = Path(arguments.models_dir).expanduser()
    if arguments.path is not None or arguments.served_name:
        raise ConfigError("--models-dir takes neither a model's path nor --served-name: its folders have their names")
    if not directory.is_dir():
        raise ConfigError(f"--models-dir {directory} is not a folder")
    if arguments.fronts is not None and arguments.fronts != 1:
        raise ConfigError(
            f"--models-dir serves with one front, got --fronts {arguments.fronts}; use --fronts with a path"
        )
    if arguments.max_models is not None and arguments.max_models < 1:
        raise ConfigError(f"--max-models must be at least 1, got {arguments.max_models}")

    def config_of(model: ModelFolder) -> EngineConfig:
        values = engine_config(arguments, str(model.path))
        values["model"]["names"] = [model.name] if model.name else []
        return parse(EngineConfig, values, "stoker serve")

    def listening(port: int) -> None:
        found = model_folders(directory)
        names = ", ".join(found.models) or "no models yet"
        lines = [f"Serving {directory} on http://{arguments.host}:{port}/v1: {names}", *found.unreadable.values()]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()

    return run_shelf(directory, config_of, max_models=arguments.max_models, on_listen=listening)


def engine_config(arguments: argparse.Namespace, model: str | None = None) -> dict[str, Any]:
    """The flags as the configuration of a model's engine, as an operator would render it."""
    path = model if model is not None else str(arguments.path)
    path = path if is_model_uri(path) else str(Path(path).expanduser())
    return given(
        {
            "listen": {"host": arguments.host, "port": arguments.port},
            **engine_sections(arguments),
            "model": given({"path": path, "names": arguments.served_name or [_name(path)], "dtype": arguments.dtype}),
            "api": given(
                {
                    "api_key_file": arguments.api_key_file,
                    "allowed_origins": arguments.allowed_origins,
                    "tool_call_parser": arguments.tool_call_parser,
                    "reasoning_parser": arguments.reasoning_parser,
                    "fronts": arguments.fronts,
                }
            ),
            "cache_events": given(
                {"endpoint": arguments.cache_events, "replay_endpoint": arguments.cache_events_replay}
            )
            or None,
            "role": arguments.role,
            "transfer": given({"listen": arguments.transfer_listen, "key_file": arguments.transfer_key_file}),
        }
    )


def _origins(text: str) -> list[str]:
    """One origin, or a JSON list of them.

    Raises:
        ArgumentTypeError: a list that is not JSON, or holds anything but texts.
    """
    if not text.startswith("["):
        return [text]
    try:
        origins = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list: {error}") from error
    if not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(f"a list of texts is needed, got {text!r}")
    return list(origins)


def _name(path: str) -> str:
    if is_model_uri(path):
        return model_name(path)
    return Path(os.path.abspath(path)).name.removesuffix(".gguf")  # noqa: PTH100 - a link keeps the name it is called by


class _Progress:
    """Progress for people: one line that changes on a terminal, plain lines in a log."""

    def __init__(self, config: EngineConfig) -> None:
        self.host = f"[{config.listen.host}]" if ":" in config.listen.host else config.listen.host
        self.name = (*config.model.names, "")[0]
        self.port = 0
        self._shown = ""

    def listening(self, port: int) -> None:
        self.port = port

    def state(self, state: CoreState) -> None:
        if state.phase == "Serving":
            self._line(f"Serving {self.name} on http://{self.host}:{self.port}/v1", last=True)
            self._line(f"Talk to it:  stoker chat http://{self.host}:{self.port}", last=True)
        elif state.phase != "Failed":
            self._line(f"{state.phase} {state.message}", last=state.phase == "Drained")

    def _line(self, text: str, *, last: bool) -> None:
        terminal = sys.stderr.isatty()
        shown = text if terminal else re.sub(r"\d+ %", "", text)  # a log is not filled with percents
        if shown == self._shown:
            return
        self._shown = shown
        sys.stderr.write(f"\r\x1b[K{text}{chr(10) if last else ''}" if terminal else f"{text}\n")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="stoker serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "path",
        nargs="?",
        help="a Hugging Face folder, a Stoker checkpoint folder or a GGUF file; or hf://, s3://, oci://",
    )
    add(
        "--models-dir",
        metavar="DIR",
        help="instead of a path: list the models of a folder, and load them by POST /v1/models/NAME/load",
    )
    add(
        "--max-models",
        type=int,
        metavar="N",
        help="most models loaded at one time (default: as memory allows, 1 on a GPU)",
    )
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every interface (default 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    add(
        "--served-name",
        action="append",
        metavar="NAME",
        help="name in /v1/models; may be repeated (default: the folder's)",
    )
    add("--api-key-file", metavar="FILE", help="file with one key per line; without it requests need no key")
    add(
        "--allowed-origins",
        action="extend",
        type=_origins,
        metavar="ORIGIN",
        help="origin whose web pages may call the API (CORS), such as https://example.org; * is any; may be repeated, "
        "or be a JSON list as in vLLM: '[\"*\"]' (default: none)",
    )
    add(
        "--tool-call-parser",
        choices=["auto", "none", "hermes", "llama3_json", "mistral"],
        help="form in which the model writes tool calls (default: found in its chat template)",
    )
    add(
        "--reasoning-parser",
        choices=["auto", "none", "think"],
        help="think: text between <think> and </think> goes to the field reasoning (default: if the chat template has "
        "these marks)",
    )
    add(
        "--cache-events", metavar="ENDPOINT", help="publish what the prefix cache holds: tcp://*:5557 (default: do not)"
    )
    add("--cache-events-replay", metavar="ENDPOINT", help="where subscribers ask for what they missed: tcp://*:5657")
    add("--role", choices=["colocated", "prefill", "decode"], help="what routers should prefer this engine for")
    add(
        "--transfer-listen",
        metavar="HOST:PORT",
        help="compute prompts for other engines, and let them compute prompts for this one (default: off)",
    )
    add("--transfer-key-file", metavar="FILE", help="secret of these engines, 32 bytes; needed beyond this host")
    add(
        "--fronts",
        type=int,
        metavar="N",
        help="processes that serve HTTP and tokenise, behind one port (default 1)",
    )
    add_engine_options(parser)
    return parser


if __name__ == "__main__":
    run_program(main, "stoker serve")
