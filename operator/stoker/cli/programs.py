"""Verbs that are programs of their own: `python -m stoker.<package>` replaces this process.

The verbs own no logic: they check that the installation has the program, and pass the arguments on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn

import click

from stoker.cli.exit_status import WRONG_INPUT

PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


EXTRAS = {"engine": "engine", "trainer": "trainer", "model": "engine"}
"""Package that computes with torch -> the extra of the distribution that installs what it needs."""


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module`: signals, terminal and exit code are the program's own."""
    missing = missing_part(module)
    if missing:
        click.echo(missing, err=True)
        sys.exit(WRONG_INPUT)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], program_environment(os.environ))


def program_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program that starts in the user's folder, and of those that it starts.

    `python -m` looks there first: a file such as `http.py` would stand for a module.
    """
    return {"PYTHONSAFEPATH": "1", **environment}


def missing_part(module: str, find: Callable[[str], object | None] = find_spec) -> str:
    """Explain why this installation cannot run a program (the control image has no torch); empty when it can."""
    package = ".".join(module.split(".")[:2])
    extra = EXTRAS.get(package.removeprefix("stoker."))
    needed = (package, "torch") if extra else (package,)
    absent = next((name for name in needed if find(name) is None), None)
    if absent is None:
        return ""
    cure = f"install stoker[{extra}] or use the runtime image" if extra else "install the whole distribution"
    return f"this installation has no {absent}, which `python -m {module}` needs: {cure}"


@click.command(context_settings=PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve a Hugging Face folder, a checkpoint folder or a GGUF file over the OpenAI API.

    Example: stoker serve ~/.cache/stoker/models/smollm2-135m-instruct --port 8000
    """
    become("stoker.engine.serve_main", arguments)


@click.command(context_settings=PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def chat(arguments: tuple[str, ...]) -> None:
    """Talk to an OpenAI server in the terminal.

    Example: stoker chat http://127.0.0.1:8000
    """
    become("stoker.cli.chat", arguments)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def model() -> None:
    """Convert and describe models.

    \b
    Examples:
      stoker model convert SmolLM2.Q4_1.gguf OUT/
      stoker model info OUT/
    """


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoint() -> None:
    """List, verify, show, compare, export, push and pull checkpoints.

    \b
    Examples:
      stoker checkpoint list checkpoints/
      stoker checkpoint verify checkpoints/step-00000400.1a2b3c4d
      stoker checkpoint export --format hf checkpoints/step-00000400.1a2b3c4d OUT/
    """


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure throughput and latency: of an engine in this process, or of any OpenAI server.

    \b
    Examples:
      stoker bench throughput ~/.cache/stoker/models/smollm2-135m-instruct
      stoker bench latency ~/.cache/stoker/models/smollm2-135m-instruct --output-tokens 64
      stoker bench serve http://127.0.0.1:8000 --rate 16
    """


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def kernels() -> None:
    """Compile GPU kernels ahead of time, on a machine that needs no GPU.

    \b
    Examples:
      stoker kernels build --model llama-3.1-8b --model models/my-model
      stoker kernels build --trainer llama-3.1-8b
      stoker kernels show
    """


def _passing(group: click.Group, module: str, verb: str, line: str) -> None:
    @group.command(verb, context_settings=PASS_THROUGH, add_help_option=False, short_help=line)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        become(module, [verb, *arguments])


for _verb, _line in (("convert", "Turn a GGUF file into a Hugging Face folder."), ("info", "Describe a model.")):
    _passing(model, "stoker.model", _verb, _line)

for _verb, _line in (
    ("list", "List the checkpoints in a folder, newest first."),
    ("verify", "Read every byte of a checkpoint and prove that it is whole."),
    ("show", "Describe a checkpoint."),
    ("diff", "Compare the values of two checkpoints."),
    ("export", "Write the weights as a Hugging Face folder."),
    ("push", "Send the weights to a hub, a bucket or a registry."),
    ("pull", "Fetch a model into a new folder."),
):
    _passing(checkpoint, "stoker.checkpoint", _verb, _line)


for _verb, _line in (
    ("build", "Compile the kernels of engines and training runs."),
    ("show", "Describe the kernels that this installation has."),
):
    _passing(kernels, "stoker.engine.kernels_main", _verb, _line)

for _module, _verb, _line in (
    ("stoker.engine.bench_main", "throughput", "Tokens per second of many requests at once."),
    ("stoker.engine.bench_main", "latency", "Time of the first token and of each further one."),
    ("stoker.cli.load", "serve", "First tokens, gaps and goodput of a server under load."),
):
    _passing(bench, _module, _verb, _line)
