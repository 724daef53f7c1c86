"""Text about what the kinds offer and this version has not built: values of the CRDs less those of the table.

`python -m stoker.operator.api.not_yet --write|--check README.md` keeps the list between the two marks of that file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.operator.api.crd import KIND_INFOS, KindInfo
from stoker.operator.api.schema import structural_schema
from stoker.pod.capabilities import CAPABILITIES, Row, shown

Schema = Mapping[str, Any]

BEGIN = "<!-- not yet: written by `python -m stoker.operator.api.not_yet --write README.md` -->"
END = "<!-- end of not yet -->"
_LISTED = 16
"""A range of more numbers is described instead."""


def missing(info: KindInfo) -> dict[str, str]:
    """Path below `spec` -> which of its values are not built; an empty text stands for the whole field."""
    spec = structural_schema(info.model)["properties"]["spec"]
    rows = CAPABILITIES[info.kind]
    return {path: text for path, row in rows.items() if (text := _missing_values(row, _at(spec, path))) is not None}


def listing() -> str:
    """The list for README: one line of Markdown per kind that misses something."""
    lines = []
    for info in KIND_INFOS:
        fields = [f"`{path}` {text}".rstrip() for path, text in missing(info).items()]
        if fields:
            lines.append(f"* {info.kind}: {'; '.join(fields)}.")
    return "\n".join(lines)


def with_listing(text: str) -> str:
    """The document with the present list between its marks.

    Raises:
        ValueError: the marks are missing.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the lines {BEGIN} and {END} are missing")
    return f"{head}{BEGIN}\n{listing()}\n{END}{tail}"


def _missing_values(row: Row, schema: Schema) -> str | None:
    """None: everything is built."""
    if not row.values:
        return ""
    offered = _offered(schema)
    if offered:
        return _listed([value for value in offered if not row.allows(value)]) or None
    if row.values == (schema.get("minimum"),):
        return f"above {row.values[0]}"
    return f"other than {' and '.join(map(shown, row.values))}"


def _offered(schema: Schema) -> list[Any]:
    """The values of a field; none where they are too many to list."""
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [False, True]
    if {"minimum", "maximum"} <= schema.keys() and schema["maximum"] - schema["minimum"] < _LISTED:
        return list(range(schema["minimum"], schema["maximum"] + 1))
    return []


def _listed(values: list[Any]) -> str:
    return ", ".join(shown(value) for value in values)


def _at(schema: Schema, path: str) -> Schema:
    for part in path.split("."):
        schema = schema["properties"][part.removesuffix("[]")]
        schema = schema["items"] if part.endswith("[]") else schema
    return schema


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stoker.operator.api.not_yet", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", metavar="FILE", type=Path, help="write the list into the file")
    mode.add_argument("--check", metavar="FILE", type=Path, help="exit 1 when the list there is out of date")
    chosen = parser.parse_args(arguments)
    path: Path = chosen.write or chosen.check
    text = path.read_text(encoding="utf-8")
    if chosen.write:
        path.write_text(with_listing(text), encoding="utf-8")
        return 0
    if with_listing(text) == text:
        return 0
    sys.stderr.write(f"{path} is out of date: run python -m stoker.operator.api.not_yet --write {path}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
