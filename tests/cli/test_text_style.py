"""Tables: columns, colours and the width of a terminal."""

from __future__ import annotations

import pytest

from stoker.cli.text_style import TextStyle, aligned, is_coloured

ROWS = [["NAME", "PHASE", "MESSAGE"], ["teach", "Running", "LoadingWeights 43 % of 7 GB"], ["b", "Failed", ""]]


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_follows_the_environment(environment: dict[str, str], terminal: bool, coloured: bool) -> None:
    assert is_coloured(environment, terminal=terminal) is coloured


def test_a_pipe_gets_plain_whole_lines() -> None:
    assert aligned(ROWS, states=["going", "bad"]).splitlines() == [
        "NAME    PHASE     MESSAGE",
        "teach   Running   LoadingWeights 43 % of 7 GB",
        "b       Failed",
    ]


def test_a_narrow_terminal_cuts_the_last_column_only() -> None:
    assert aligned(ROWS, TextStyle(width=32)).splitlines() == [
        "NAME    PHASE     MESSAGE",
        "teach   Running   LoadingWeight…",
        "b       Failed",
    ]
    assert "LoadingWeig…" in aligned(ROWS, TextStyle(width=5)), "twelve characters stay"


def test_a_phase_has_the_colour_of_its_state_and_columns_stay_aligned() -> None:
    header, teach, failed = aligned(ROWS, TextStyle(colour=True), ["going", "bad"]).splitlines()
    assert header == "\x1b[1mNAME    PHASE     MESSAGE\x1b[0m"
    assert teach == "teach   \x1b[33mRunning\x1b[0m   LoadingWeights 43 % of 7 GB"
    assert failed == "b       \x1b[31mFailed\x1b[0m"
