"""The options that `get` has on both clusters."""

from __future__ import annotations

from dataclasses import dataclass

import click

from stoker.cli.option_group import option_group
from stoker.cli.output_format import Format, output_options


@dataclass(frozen=True)
class ListingRequest:
    """How `get` was asked to print."""

    all_namespaces: bool = False
    selector: str | None = None
    watch: bool = False
    no_headers: bool = False
    output: str = Format.TABLE.value

    @property
    def form(self) -> Format:
        return Format(self.output)


listing_options = option_group(
    "request",
    ListingRequest,
    (
        click.option("-A", "--all-namespaces", is_flag=True, help="Objects of all namespaces."),
        click.option("-l", "--selector", help="Only objects with these labels: team=a,zone in (x,y),!spot."),
        click.option("-w", "--watch", is_flag=True, help="Print what changes, until Ctrl-C."),
        click.option("--no-headers", is_flag=True, help="Print no header."),
        output_options(),
    ),
)
"""Adds -o, -A, -l, -w and --no-headers; the command receives `request`."""
