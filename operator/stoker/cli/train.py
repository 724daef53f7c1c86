"""`stoker train`: one TrainingJob on this machine without an operator. This process becomes the trainer.

Called by the table of `main`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import click

from stoker.cli.exit_status import WRONG_INPUT, code_of_file
from stoker.cli.manifest_options import claims_option, files_option
from stoker.cli.programs import become
from stoker.cli.targets import fail


@click.command(
    epilog="\b\nExample:\n  stoker train -f examples/pretrain/20-train.yaml --claim corpus=my-code/ --storage runs/"
)
@files_option("Manifest, folder of manifests, or -: one TrainingJob, and the ConfigMaps and Secrets that it mounts.")
@click.option(
    "--storage",
    type=click.Path(path_type=Path),
    default=Path("stoker-storage"),
    show_default=True,
    help="Folder for the data of claims; each claim gets a folder in it.",
)
@claims_option("Use DIR as the claim NAME. May be repeated.")
@click.option("--render", is_flag=True, help="Print the trainer's configuration and stop.")
def train(files: tuple[Path, ...], storage: Path, claims: tuple[str, ...], render: bool) -> None:
    """Run one training job on this machine, with all its ranks and without an operator.

    Checkpoints are written to the job's claim below --storage. A second run continues from the newest verified one.
    Ctrl-C saves and ends the run.
    """
    from stoker.cli.local_objects import parse_claims
    from stoker.cli.manifests import ManifestError, claim_manifest, read_manifests
    from stoker.operator.service.local.single_run import prepare_run

    folders = parse_claims(claims)
    try:
        manifests = [*read_manifests(files), *(claim_manifest(name, path, "default") for name, path in folders.items())]
        run = prepare_run(manifests, storage.expanduser().resolve(), folders, os.environ)
        file = run.folder / "config.json"
        file.write_text(json.dumps(run.config, indent=1))
    except (ManifestError, ValueError) as error:
        _refuse(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""  # a failed write names no file
        fail(f"--storage {storage}: {place}{error.strerror}", code_of_file(error))
    if render:
        shutil.rmtree(run.folder)
        click.echo(json.dumps(run.config, indent=1))
        return
    os.environ.update(run.environment)
    become("stoker.trainer", ["--config", str(file)])


def _refuse(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(WRONG_INPUT)
