"""YAML in kubectl's dialect, read and written: `3e-4` is a number, `2024-01-01` and `1:30` are strings.

A key that appears twice is an error. Pure. `manifests` reads files with it, `printers` writes the page of `describe`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
INTEGER = re.compile(r"[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0[0-7]*|[1-9][0-9_]*)$")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
KEPT = ("null", "bool", "int", "float", "str", "seq", "map")
"""Tags of values that JSON has."""

MAX_DEPTH = 100

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(content: str) -> list[Any]:
    """Parse every document of a text as plain data.

    Raises:
        yaml.YAMLError: it is not YAML, or holds a value that JSON does not have.
    """
    _check_nesting(content)
    return list(yaml.load_all(content, Loader=ManifestLoader))


def first_lines(content: str) -> list[int]:
    """The line, from 1, at which the content of each document begins."""
    lines: list[int] = []
    opened = False
    for event in yaml.parse(content, Loader=ManifestLoader):
        if opened:
            lines.append(int(event.start_mark.line) + 1)  # type: ignore[union-attr]
        opened = isinstance(event, yaml.DocumentStartEvent)
    return lines


def written(value: Any) -> str:
    """Write YAML that reads back as `value`, here and in kubectl: a string that looks like a number is quoted."""
    return str(yaml.dump(value, Dumper=ManifestDumper, sort_keys=False, width=110, allow_unicode=True))


class ManifestDumper(yaml.SafeDumper):
    """PyYAML's dumper, which would write the string "3e-4" without quotes."""


class ManifestLoader(_Base):  # type: ignore[misc]
    """Builds only values that JSON has. Raises yaml.YAMLError with the position for all others."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own names
        first: [(tag, pattern) for tag, pattern in found if tag.removeprefix(TAG) in ("null", "bool", "merge")]
        for first, found in _Base.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: made for tag, made in _Base.yaml_constructors.items() if tag is None or tag.removeprefix(TAG) in KEPT
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        """Build a mapping whose keys are strings, each present once; keys that `<<` merges in may be overridden."""
        own: set[str] = set()
        for key in (key for key, _ in node.value if key.tag != f"{TAG}merge"):
            if _key(key) in own:
                raise _wrong(f"the key {_key(key)} appears twice in one mapping", key)
            own.add(_key(key))
        self.flatten_mapping(node)
        return {_key(key): self.construct_object(value, deep=deep) for key, value in node.value}


def _check_nesting(content: str) -> None:
    """Refuse deep nesting and anchors that contain themselves, before anything is built."""
    anchors: list[str | None] = []
    for event in yaml.parse(content, Loader=ManifestLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            if len(anchors) > MAX_DEPTH:
                raise _wrong(f"more than {MAX_DEPTH} levels", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise _wrong(f"the anchor {event.anchor} contains itself", event)


def _int(loader: Any, node: Any) -> int:
    """Build an integer of as many digits as Python reads."""
    try:
        return int(loader.construct_yaml_int(node))
    except ValueError as error:
        raise _wrong(
            f"{node.value[:20]}... is too large for a number: it has {len(node.value)} digits", node
        ) from error


def _float(_: Any, node: Any) -> float:
    """Build a finite float."""
    value = float(node.value)
    if not math.isfinite(value):
        raise _wrong(f"{node.value} is too large for a number", node)
    return value


def _key(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong("a key must be a string", node)
    return str(node.value)


def _wrong(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


ManifestLoader.add_implicit_resolver(f"{TAG}int", INTEGER, list("-+0123456789"))
ManifestDumper.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+.0123456789"))
ManifestLoader.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+.0123456789"))
ManifestLoader.add_constructor(f"{TAG}int", _int)
ManifestLoader.add_constructor(f"{TAG}float", _float)
