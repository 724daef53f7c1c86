"""Options of the verbs that read manifests: the files, the folders behind claims."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

MANIFESTS = "Manifest (YAML or JSON), folder of manifests, or - for standard input. May be repeated."


def files_option(help_text: str = MANIFESTS, *, required: bool = True) -> Callable[[F], F]:
    """Return the decorator for `-f FILE`, which may be repeated; the command receives `files`."""
    return click.option(
        "-f",
        "--file",
        "files",
        multiple=True,
        required=required,
        type=click.Path(path_type=Path),
        help=help_text,
    )


def set_option(command: F) -> F:
    """Add `--set PATH=VALUE`, which may be repeated; the command receives `settings`."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="Replace a value of the manifest: spec.training.totalSteps=200. With several objects "
        "KIND/NAME:PATH=VALUE. May be repeated.",
    )(command)


def claims_option(help_text: str) -> Callable[[F], F]:
    """Return the decorator for `--claim NAME=DIR`, which may be repeated; the command receives `claims`."""
    return click.option("--claim", "claims", multiple=True, metavar="NAME=DIR", help=help_text)
