"""Label selectors in kubectl's notation."""

from __future__ import annotations

import pytest

from stoker.cli.label_selector import parse_selector

LABELS = {"team": "a", "zone": "x", "stoker.dev/job": "teach"}


def chosen(text: str | None) -> bool:
    return parse_selector(text).matches({"metadata": {"labels": LABELS}})


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (None, True),
        ("team=a", True),
        ("team==a,zone=x", True),
        ("team=b", False),
        ("team=a,zone!=x", False),
        ("spot!=yes", True),
        ("zone in (x, y)", True),
        ("zone in (y,z),team=a", False),
        ("zone notin (y)", True),
        ("spot notin (y)", True),
        ("team", True),
        ("spot", False),
        ("!spot,stoker.dev/job=teach", True),
        ("!team", False),
    ],
)
def test_an_object_is_selected_by_its_labels(text: str | None, matches: bool) -> None:
    assert chosen(text) is matches


def test_an_object_without_labels_meets_what_is_absent() -> None:
    assert parse_selector("!team,zone!=x").matches({"metadata": {}})


def test_only_equalities_go_to_the_server() -> None:
    assert parse_selector("team=a,zone in (x),tier in (p,q),!spot,gpu").equalities == {"team": "a", "zone": "x"}


@pytest.mark.parametrize("text", ["", "team=a,", "=a", "team in x", "team=a b", "a in (b,c", "team=!"])
def test_what_is_no_selector_names_the_part_and_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"selector: '.*' is none of NAME=VALUE"):
        parse_selector(text)
