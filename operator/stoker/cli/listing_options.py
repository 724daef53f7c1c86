"""The options that `get` has on both clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from stoker.cli.output_format import output_options

F = TypeVar("F", bound=Callable[..., Any])


def listing_options(command: F) -> F:
    """Add -o, -A, -l, -w and --no-headers."""
    options = (
        click.option("-A", "--all-namespaces", is_flag=True, help="Objects of all namespaces."),
        click.option("-l", "--selector", help="Only objects with these labels: team=a,zone in (x,y),!spot."),
        click.option("-w", "--watch", is_flag=True, help="Print what changes, until Ctrl-C."),
        click.option("--no-headers", is_flag=True, help="Print no header."),
        output_options(),
    )
    for option in reversed(options):
        command = option(command)
    return command
