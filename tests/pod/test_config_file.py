"""Strict configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from stoker.pod.config_file import Config, ConfigError, load, parse
from stoker.pod.listen import ListenConfig


class Inner(Config):
    rate: float = Field(default=1.0, gt=0)
    names: tuple[str, ...] = ()


class Outer(Config):
    size: int = Field(ge=1)
    inner: Inner = Inner()


def test_a_right_configuration_is_typed_and_frozen(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"size": 3, "inner": {"names": ["a"]}}')
    config = load(Outer, path)
    assert config == Outer(size=3, inner=Inner(names=("a",)))
    with pytest.raises(ValueError, match="frozen"):
        config.size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"size": 1, "sice": 2}, "config: unknown key sice"),
        ({"size": 1, "inner": {"ratio": 2}}, "config: unknown key inner.ratio"),
        ({}, "config: size is missing"),
        ({"size": 0}, "config: size: Input should be greater than or equal to 1 (got 0)"),
        ({"size": "x" * 200}, "(got '" + "x" * 76 + "...)"),
        ({"size": 1, "inner": {"rate": float("nan")}}, "config: inner.rate: Input should be a finite number (got nan)"),
        ({"size": 1, "inner": {"names": ["a", 2]}}, "config: inner.names.1: Input should be a valid string (got 2)"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(Outer, mapping)
    assert message in str(refused.value)


def test_every_wrong_field_has_its_own_line() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(Outer, {"size": 0, "inner": {"rate": -1}, "more": 1}, "job.json")
    assert [line.split(":")[1].strip() for line in str(refused.value).splitlines()] == [
        "size",
        "inner.rate",
        "unknown key more",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a JSON object is needed, got list"),
        ("{", "Expecting property name"),
        (None, "No such file"),
        ('{"size": 1, "size": 2}', "key 'size' appears twice"),
        ("[" * 5000, "recursion"),
        ('{"size": NaN}', "NaN is not a number of JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_path(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load(Outer, path)
    assert str(path) in str(refused.value)


def test_programs_listen_on_loopback_unless_told_otherwise() -> None:
    assert ListenConfig().host == "127.0.0.1"
    with pytest.raises(ConfigError, match="listen: port"):
        parse(ListenConfig, {"port": 70_000}, "listen")
