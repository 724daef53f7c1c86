"""Strict configuration: frozen pydantic models loaded from a mounted JSON file.

Unknown keys fail, and every message names the path of the field, the value and what is allowed.

Owns the base class `Config`, `load` (a file) and `parse` (plain data); each program declares its own sections with
them. A loaded configuration is frozen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """The configuration cannot be used; the message lists each wrong field on its own line."""


class Config(BaseModel):
    """Base of every configuration section: frozen, no unknown keys, defaults validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


C = TypeVar("C", bound=Config)


def parse(cls: type[C], mapping: Mapping[str, Any], where: str = "config") -> C:
    """Check plain data and return it as a typed configuration.

    Raises:
        ConfigError: with one line `where.path: problem (got value)` for each wrong field.
    """
    try:
        return cls.model_validate(dict(mapping))
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error, where))) from error


def load(cls: type[C], path: Path | str) -> C:
    """Read and check a JSON configuration file.

    Raises:
        ConfigError: the file is missing, is not a JSON object, or does not fit `cls`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        mapping = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a JSON object is needed, got {type(mapping).__name__}")
    return parse(cls, mapping, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"key {key!r} appears twice")
        mapping[key] = value
    return mapping


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _lines(error: ValidationError, where: str) -> list[str]:
    return [_line(item, where) for item in error.errors(include_url=False, include_context=False)]


def _line(item: Mapping[str, Any], where: str) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key {path}"
    if item["type"] == "missing":
        return f"{where}: {path} is missing"
    if not path:
        return f"{where}: {message}"
    return f"{where}: {path}: {message} (got {_shown(item['input'])})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
