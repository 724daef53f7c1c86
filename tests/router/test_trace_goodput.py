"""What the goodput bench replays of a trace, and which answers count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.gpu.trace_goodput import Goals, first_lines, shares, speed_for


def line(at_s: float, length: int, *hashes: int) -> str:
    return json.dumps({"timestamp": 1000 * at_s, "input_length": length, "output_length": 10, "hash_ids": hashes})


def answer(first_s: float, *gaps_ms: float, error: str = "") -> dict[str, Any]:
    stamps = [5.0 + first_s]
    for gap in gaps_ms:
        stamps.append(stamps[-1] + gap / 1000)
    return {"sent_s": 5.0, "stamps": stamps, "output_tokens": len(stamps), "error": error}


def test_new_tokens_are_those_behind_what_an_earlier_prompt_began_with() -> None:
    lines = [line(0, 1000, 1, 2), line(1, 1500, 1, 2, 3), line(2, 700, 9, 1), line(3, 5000, 4), line(60, 512, 5)]
    assert [one.new_tokens for one in first_lines(lines, 60, 4000)] == [1000, 1500 - 1024, 700]


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (answer(1.9, 20, 20), (1, 1, 1, 1)),
        (answer(2.1, 20, 20), (0, 0, 0, 0)),
        (answer(1.0, 30, 30), (0, 0, 0, 1)),
        (answer(1.0, *[20] * 199, 40), (1, 1, 0, 1)),
        (answer(1.0, 10, 10, 40), (1, 0, 0, 1)),
        (answer(1.0, 10, error="cut off"), (0, 0, 0, 1)),
        ({"sent_s": 5.0, "stamps": [], "output_tokens": 0, "error": ""}, (0, 0, 0, 0)),
    ],
    ids=["good", "late", "slow", "one long gap of 200", "one long gap of three", "failed", "no token"],
)
def test_each_reading_of_the_gap_has_its_share(one: dict[str, Any], good: tuple[int, ...]) -> None:
    lines = first_lines([line(0, 100, 1)], 60, 4000)
    found = shares(lines, [one], Goals(2000, 25, 40_000))
    names = ("share", "share_gap_p99", "share_longest_gap", "share_ttft")
    assert tuple(found[name] for name in names) == good


def test_very_long_prompts_are_counted_apart() -> None:
    lines = first_lines([line(0, 100, 1), line(0, 50_000, 2)], 60, 100_000)
    found = shares(lines, [answer(1.0, 10), answer(9.0, 10)], Goals(2000, 25, 40_000))
    assert (found["counted"], found["apart"], found["share"]) == (1, 1, 1.0)


def test_the_speed_follows_the_share() -> None:
    speeds = [speed_for(2.0, share) for share in (0.3, 0.7, 0.8, 0.9, 0.93, 0.96, 1.0)]
    assert speeds == sorted(speeds)
    assert speed_for(2.0, 0.9) == 2.0
