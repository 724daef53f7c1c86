"""The option -o of the verbs that print objects, and the texts of its formats. Pure but for the option itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
Object = Mapping[str, Any]


class Format(StrEnum):
    """How objects are printed."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_table(self) -> bool:
        return self in (Format.TABLE, Format.WIDE)


def output_options(*formats: Format) -> Callable[[F], F]:
    """Return the decorator for `-o FORMAT` and its short form --json; the command receives `output`."""
    allowed = formats or tuple(Format)

    def add(command: F) -> F:
        short = click.option("--json", "output", flag_value=Format.JSON.value, help="The same as -o json.")
        long = click.option(
            "-o",
            "--output",
            "output",
            type=click.Choice([one.value for one in allowed]),
            default=Format.TABLE.value,
            show_default=True,
            help="Format of the output.",
        )
        return long(short(command))

    return add


def text_of(items: Sequence[Object], output: Format, *, alone: bool) -> str:
    """Write whole objects or their names; `alone`: one object was asked for by its name, so it is no list."""
    if output is Format.NAME:
        return "\n".join(f"{item['kind'].lower()}/{item['metadata']['name']}" for item in items)
    shown = [without_managed_fields(item) for item in items]
    found: Any = shown[0] if alone and len(shown) == 1 else {"apiVersion": "v1", "kind": "List", "items": shown}
    if output is Format.JSON:
        return json.dumps(found, indent=1)
    from stoker.cli.manifest_yaml import written  # YAML is read and written by few verbs

    return written(json.loads(json.dumps(found))).rstrip("\n")


def without_managed_fields(item: Object) -> dict[str, Any]:
    """An object as people read it; kubectl leaves the owners of its fields out as well."""
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    return {**item, "metadata": metadata}
