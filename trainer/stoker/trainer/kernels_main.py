"""`python -m stoker.trainer.kernels_main`: compile a training run's kernels ahead of time.

`stoker kernels build --trainer` starts one such process for each run and architecture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.pod.command_line import run_click

if TYPE_CHECKING:
    from stoker.model.config import ModelConfig
    from stoker.trainer.protocol.config import TrainerConfig


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compile the kernels of training runs on a machine that needs no GPU."""


@main.command()
@click.option("--run", "name", required=True, help="A named model, a folder with config.json, or a configuration.")
@click.option("--architecture", required=True, type=int)
@click.option("--folder", required=True, type=click.Path(path_type=Path))
def compile_one(name: str, architecture: int, folder: Path) -> None:
    """Compile the kernels of one run for one architecture in this process, and print what was done as JSON."""
    import torch  # takes seconds, as do the imports below

    from stoker.model.kernels.ahead.build import compiling_into
    from stoker.trainer.rank.ahead.launch import launch_kernels

    torch.set_num_threads(1)
    model, runs = find_runs(name)
    with compiling_into(folder, architecture) as compiled:
        for run in runs:
            launch_kernels(run, model)
    found = {"num_kernels": len(compiled.names), "num_compiled": compiled.num_compiled}
    click.echo(json.dumps(found | {"seconds": round(compiled.seconds, 1)}))


def find_runs(name: str) -> tuple[ModelConfig, Sequence[TrainerConfig]]:
    """The model of a run, and the run; of a named model, or of a folder's, those that stand for it.

    Raises:
        BadParameter: it is none of these, or its fields are wrong; the message names the field.
    """
    from stoker.model.known_shapes import SHAPES
    from stoker.pod.config_file import ConfigError
    from stoker.trainer.rank.ahead.variants import variants_of

    try:
        if name in SHAPES:
            return SHAPES[name], list(variants_of(SHAPES[name]))
        if Path(name).is_dir():
            model = read_model(Path(name, "config.json"))
            return model, list(variants_of(model))
        return read_run(Path(name))
    except (OSError, ValueError, ConfigError) as error:
        kinds = "a trainer's configuration, a folder with config.json, or one of"
        raise click.BadParameter(f"{name!r}: {error} (allowed: {kinds} {', '.join(SHAPES)})") from error


def read_model(file: Path) -> ModelConfig:
    from stoker.model.config import ModelConfig

    return ModelConfig.from_hugging_face(json.loads(file.read_text()))


def read_run(file: Path) -> tuple[ModelConfig, Sequence[TrainerConfig]]:
    """The run of a trainer's configuration. A model that it starts from is opened, not loaded."""
    from stoker.pod.config_file import load
    from stoker.trainer.protocol.config import TrainerConfig
    from stoker.trainer.protocol.parallel_dims import check_supported
    from stoker.trainer.rank.run_inputs import open_source, parse_model

    run = load(TrainerConfig, file)
    check_supported(run)
    source, _ = open_source(run, lambda _: None)
    return parse_model(run.model or {}) if source is None else source.config, [run]


if __name__ == "__main__":
    run_click(main, "stoker kernels")
