"""Verbs that are programs of their own, where a part of the distribution is absent."""

from __future__ import annotations

import pytest

from stoker.cli.programs import missing_part


def test_a_whole_installation_misses_nothing() -> None:
    assert missing_part("stoker.engine.serve_main") == ""
    assert missing_part("stoker.checkpoint") == ""


@pytest.mark.parametrize(
    ("module", "absent", "cure"),
    [
        ("stoker.engine.serve_main", "stoker.engine", "stoker[engine]"),
        ("stoker.trainer", "torch", "stoker[trainer]"),
        ("stoker.checkpoint", "stoker.checkpoint", "whole distribution"),
    ],
)
def test_what_is_absent_is_named_with_its_cure(module: str, absent: str, cure: str) -> None:
    message = missing_part(module, lambda name: None if name == absent else object())
    assert f"has no {absent}" in message
    assert cure in message
