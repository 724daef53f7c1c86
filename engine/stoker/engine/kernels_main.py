"""`python -m stoker.engine.kernels_main`: compile kernels ahead of time; the program `stoker kernels`.

Each model or training run, and architecture, is compiled by a process of its own, a few beside one another, into one
folder. Those of the trainer are processes of its own program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from stoker.model.config import ModelConfig
from stoker.model.kernels.ahead.manifest import (
    MANIFEST,
    VARIABLE,
    KernelsManifest,
    default_folder,
    find_folder,
    read_manifest,
)
from stoker.model.known_shapes import SHAPES
from stoker.pod.command_line import run_click

ARCHITECTURES = ("80", "86", "89", "90", "100", "103", "120")
GIB_EACH = 3
"""Memory of one process, nearly all of it the compiler's."""


TRAINER = "stoker.trainer.kernels_main"
"""The trainer's program, which only its name is known of here."""


class Job(NamedTuple):
    """What one process compiles: an engine's kernels for a model, or those of a training run."""

    name: str
    architecture: int
    is_training: bool = False

    @property
    def label(self) -> str:
        """Its name in the manifest and in messages."""
        return f"trainer: {self.name}" if self.is_training else self.name

    @property
    def command(self) -> list[str]:
        module, option = (TRAINER, "--run") if self.is_training else ("stoker.engine.kernels_main", "--model")
        return [
            sys.executable,
            "-m",
            module,
            "compile-one",
            option,
            self.name,
            "--architecture",
            str(self.architecture),
        ]


class Compiled(NamedTuple):
    """What one process reports."""

    num_kernels: int
    num_compiled: int
    seconds: float


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compile GPU kernels ahead of time, on a machine that needs no GPU."""


@main.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    help=f"Engine: {', '.join(SHAPES)}, or a folder with config.json. Default: all named, unless --trainer is given.",
)
@click.option(
    "--trainer",
    "trainings",
    multiple=True,
    help="Trainer: the same names and folders (data-parallel runs), or a trainer's configuration (JSON; any layout).",
)
@click.option("--architecture", "architectures", multiple=True, type=click.Choice(ARCHITECTURES), default=("90",))
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Default: the installation's.")
@click.option("--processes", type=click.IntRange(min=1), help="Default: one per core, as memory allows.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def build(
    models: tuple[str, ...],
    trainings: tuple[str, ...],
    architectures: tuple[str, ...],
    folder: Path | None,
    processes: int | None,
    as_json: bool,
) -> None:
    """Compile every kernel that an engine or a training run launches, and write the folder's manifest.

    A folder that has kernels of this Triton version keeps them; those of another version are refused.

    \b
    Examples:
      stoker kernels build --model llama-3.1-8b --model models/my-model --architecture 90
      stoker kernels build --trainer llama-3.1-8b --trainer trainer.json
    """
    began_s, folder = time.monotonic(), (folder or default_folder()).resolve()
    models = models or (() if trainings else tuple(SHAPES))
    for model in models:
        load_shape(model)
    for training in trainings:
        check_training(training)
    asked = [(name, True) for name in trainings] + [(name, False) for name in models]
    jobs = [Job(name, int(one), is_training) for one in architectures for name, is_training in asked]
    import triton  # takes a second

    before = manifest_before(folder, triton.__version__)
    with ThreadPoolExecutor(processes or default_processes()) as pool:
        done = list(pool.map(lambda job: run_job(folder, job), jobs))
    manifest = KernelsManifest(
        triton=triton.__version__,
        architectures=tuple(sorted({*before.architectures, *(job.architecture for job in jobs)})),
        models=tuple(sorted({*before.models, *(job.label for job in jobs)})),
        num_kernels=count_kernels(folder),
    )
    manifest.write(folder)
    report(manifest, folder, as_json, time.monotonic() - began_s, sum(one.num_compiled for one in done))


@main.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Default: what an engine would use.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(folder: Path | None, as_json: bool) -> None:
    """Describe the kernels that this installation has.

    Example: stoker kernels show
    """
    found = folder or find_folder(os.environ, default_folder())
    if found is None:
        raise click.ClickException(f"no kernels: neither {VARIABLE} nor {default_folder()} has some")
    try:
        report(read_manifest(found), found, as_json)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


@main.command(hidden=True)
@click.option("--model", required=True)
@click.option("--architecture", required=True, type=int)
@click.option("--folder", required=True, type=click.Path(path_type=Path))
def compile_one(model: str, architecture: int, folder: Path) -> None:
    """Compile the kernels of one model for one architecture in this process, and print what was done as JSON."""
    import torch  # takes seconds, as do the imports below

    from stoker.engine.core.kernels_ahead import ServerSizes, launch_kernels
    from stoker.model.kernels.ahead.build import compiling_into

    torch.set_num_threads(1)
    with compiling_into(folder, architecture) as compiled:
        launch_kernels(load_shape(model), ServerSizes())
    done = Compiled(len(compiled.names), compiled.num_compiled, round(compiled.seconds, 1))
    click.echo(json.dumps(done._asdict()))


def load_shape(model: str) -> ModelConfig:
    """The shape of a named model, or of a folder's."""
    if model in SHAPES:
        return SHAPES[model]
    file = Path(model, "config.json")
    if not file.exists():
        raise click.BadParameter(f"{model!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    try:
        return ModelConfig.from_hugging_face(json.loads(file.read_text()))
    except ValueError as error:
        raise click.BadParameter(f"{file}: {error}") from error


def check_training(name: str) -> None:
    """Raises BadParameter where there is no such run; its own process checks the fields."""
    if name not in SHAPES and not Path(name).is_file() and not Path(name, "config.json").is_file():
        raise click.BadParameter(
            f"--trainer {name!r} is neither a trainer's configuration, nor a folder with config.json, nor one of "
            f"{', '.join(SHAPES)}"
        )


def manifest_before(folder: Path, installed: str) -> KernelsManifest:
    """The folder's manifest, or an empty one. Raises ClickException for kernels of another Triton."""
    if not (folder / MANIFEST).exists():
        return KernelsManifest(installed, (), (), 0)
    try:
        before = read_manifest(folder)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if before.triton != installed:
        raise click.ClickException(
            f"{folder} has kernels of Triton {before.triton}, and {installed} is installed: remove it or name another"
        )
    return before


def run_job(folder: Path, job: Job) -> Compiled:
    """Compile in a process of its own. Raises ClickException with the end of what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", VARIABLE)}
    done = subprocess.run([*job.command, "--folder", str(folder)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{job.label} for sm_{job.architecture}: {done.stderr[-2000:]}")
    compiled = Compiled(**json.loads(done.stdout.splitlines()[-1]))
    click.echo(
        f"{job.label} for sm_{job.architecture}: {compiled.num_kernels} kernels, {compiled.num_compiled} of them "
        f"compiled in {compiled.seconds} s",
        err=True,
    )
    return compiled


def default_processes() -> int:
    """One per core, as far as memory goes."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib // GIB_EACH)))


def count_kernels(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/__grp__*"))


def report(
    manifest: KernelsManifest,
    folder: Path,
    as_json: bool,
    seconds: float | None = None,
    num_compiled: int | None = None,
) -> None:
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    facts: dict[str, Any] = {"folder": str(folder), "bytes": num_bytes} | asdict(manifest)
    if seconds is not None:
        facts |= {"seconds": round(seconds, 1), "num_compiled": num_compiled}
    if as_json:
        click.echo(json.dumps(facts))
        return
    architectures = ", ".join(f"sm_{one}" for one in manifest.architectures)
    click.echo(f"{folder}: {manifest.num_kernels} kernels, {num_bytes / 1e6:.1f} MB, Triton {manifest.triton}")
    click.echo(f"for {architectures}: {', '.join(manifest.models)}")


if __name__ == "__main__":
    run_click(main, "stoker kernels")
