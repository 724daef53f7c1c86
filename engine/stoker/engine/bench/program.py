"""The command: checks its options, measures, and prints figures. torch is imported after the checks."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stoker.checkpoint.remote.model_uri import is_model_uri, parse_model_uri
from stoker.engine.bench.options import options, workload_of
from stoker.engine.bench.progress import BenchProgress
from stoker.engine.bench.report import engine_line, latency_end, round_line, throughput_end
from stoker.engine.config import EngineConfig
from stoker.engine.engine_options import engine_sections, given
from stoker.engine.model_path import check_model
from stoker.pod.causes import EXIT_CODES, Cause, is_explained
from stoker.pod.command_line import INTERRUPTED
from stoker.pod.config_file import parse
from stoker.pod.standard_streams import OutputLost


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0, or a code of docs/exit-codes.md, or 130 after Ctrl-C.

    Raises:
        OutputLost: standard output takes no more figures.
    """
    arguments = options().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        config = _config(arguments)
    except (ValueError, OSError) as error:
        return _end(arguments, Cause.CONFIG_INVALID, error)
    progress = BenchProgress(sys.stderr)
    measure = _throughput if arguments.verb == "throughput" else _latency
    try:
        found = measure(arguments, config, progress)
        if arguments.json:
            _say([json.dumps(found, indent=1)])
    except KeyboardInterrupt:
        progress.clear()
        return INTERRUPTED
    except OutputLost:  # no fault of the model
        progress.clear()
        raise
    except Exception as error:  # noqa: BLE001 - the engine has a cause for each, with its exit code
        from stoker.engine.core.loaded_model import cause_of_loading  # imports torch

        progress.clear()
        return _end(arguments, cause_of_loading(error), error)
    return 0


def _throughput(arguments: argparse.Namespace, config: EngineConfig, progress: BenchProgress) -> dict[str, Any]:
    from stoker.engine.bench.measure import measure_throughput  # torch: seconds, which a refusal need not take

    rounds: list[dict[str, Any]] = []
    with closing(measure_throughput(config, workload_of(arguments), arguments.rounds, progress)) as results:
        about = {"model": arguments.path, **next(results)}
        _show(arguments, progress, [engine_line(about)])
        for figures in results:
            rounds.append(figures)
            _show(arguments, progress, [round_line(len(rounds), figures)])
    _show(arguments, progress, throughput_end(rounds[-1], len(rounds)))
    return {**about, **rounds[-1], "rounds": rounds}


def _latency(arguments: argparse.Namespace, config: EngineConfig, progress: BenchProgress) -> dict[str, Any]:
    from stoker.engine.bench.measure import measure_latency  # as above

    with closing(measure_latency(config, workload_of(arguments), arguments.rounds, progress)) as results:
        about = {"model": arguments.path, **next(results)}
        _show(arguments, progress, [engine_line(about)])
        found = next(results)
    _show(arguments, progress, latency_end(found))
    return {**about, **found}


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration of the engine. Raises ValueError and OSError for what cannot be used."""
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


def _end(arguments: argparse.Namespace, cause: Cause, error: Exception) -> int:
    """Print why the bench ends early, with a stack where the message does not explain it. Return the exit code."""
    if not is_explained(cause):
        traceback.print_exception(error)
    name = f"stoker bench {arguments.verb}"
    sys.stderr.write(f"{name}: {str(error).removeprefix(f'{name}: ') or type(error).__name__}\n")
    return EXIT_CODES[cause]


def _show(arguments: argparse.Namespace, progress: BenchProgress, lines: Iterable[str]) -> None:
    """Print figures as they come, unless JSON is asked for."""
    progress.clear()
    if not arguments.json:
        _say(lines)


def _say(lines: Iterable[str]) -> None:
    """Print lines. Raises OutputLost."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
