"""Manifests mean here what they mean to kubectl."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from stoker.cli.manifest_yaml import documents, written


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1E5", 100000.0),
        ("4.0e-5", 0.00004),
        (".5", 0.5),
        ("'3e-4'", "3e-4"),
        ("12", 12),
        ("-0x1f", -31),
        ("0644", 420),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0.1.0", "0.1.0"),
        ("1e3f", "1e3f"),
        ("=", "="),
        ("yes", True),
        ("~", None),
        ("{8080: x, true: y}", {"8080": "x", "true": "y"}),
        ("{<<: {a: 1, b: 2}, a: 3}", {"a": 3, "b": 2}),
    ],
)
def test_scalars_are_what_kubectl_reads(text: str, value: Any) -> None:
    found = documents(text)[0]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: {b: 1, b: 2}", "the key b appears twice in one mapping"),
        ("[a]: b", "a key must be a string"),
        ("1e400", "1e400 is too large for a number"),
        ("9" * 5000, "99999999999999999999... is too large for a number: it has 5000 digits"),
        ("!!binary aGk=", "could not determine a constructor"),
        ("!!python/name:os.system", "could not determine a constructor"),
        ("a: &a [*a]", "the anchor a contains itself"),
        ("[" * 5000, "more than 100 levels"),
    ],
)
def test_what_json_cannot_say_is_refused(text: str, problem: str) -> None:
    with pytest.raises(yaml.MarkedYAMLError, match=problem):
        documents(text)


def test_what_is_shown_can_be_applied_again() -> None:
    value = {
        "rate": "3e-4",
        "steps": "7",
        "off": "Off",
        "half": 0.5,
        "tiny": 1e-9,
        "name": "a",
        "day": "2024-01-01",
        "no": None,
    }
    assert "rate: '3e-4'" in written(value)
    assert documents(written(value)) == [value]
