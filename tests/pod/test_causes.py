"""The one table of causes: complete, without doubles, and the same as the page that users read."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.pod.causes import (
    CAUSES,
    EXIT_CODES,
    ROOT_CAUSE_ORDER,
    Action,
    Cause,
    CauseRule,
    action_after,
    cause_of_error,
    cause_of_exit_code,
    is_explained,
    mentions,
    root_cause_rank,
)

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"


def test_every_cause_has_one_row_and_one_exit_code_of_its_own() -> None:
    assert sorted(ROOT_CAUSE_ORDER) == sorted(Cause)
    assert len(set(EXIT_CODES.values())) == len(Cause)
    assert EXIT_CODES[Cause.COMPLETED] == 0
    assert all(0 < code < 126 for cause, code in EXIT_CODES.items() if cause is not Cause.COMPLETED)


def test_an_exit_code_leads_back_to_its_cause() -> None:
    assert {cause_of_exit_code(code): code for code in EXIT_CODES.values()} == EXIT_CODES
    assert cause_of_exit_code(1) is None


def test_the_page_shows_the_table() -> None:
    rows = sorted(CAUSES, key=lambda row: row.exit_code)
    expected = [f"| {row.exit_code} | {row.cause} | {row.meaning} | {row.action} |" for row in rows]
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert shown == expected


def test_the_page_shows_the_order_of_root_causes_and_every_action() -> None:
    page = PAGE.read_text()
    assert " > ".join(ROOT_CAUSE_ORDER) in " ".join(page.split())
    assert [action for action in Action if f"| {action} |" not in page] == []


def test_consequences_come_last() -> None:
    assert ROOT_CAUSE_ORDER[-4:] == (Cause.CANCELLED, Cause.INTERRUPTED, Cause.PEER_LOST, Cause.COMPLETED)
    assert root_cause_rank(Cause.HANG) < root_cause_rank(Cause.RANK_FAILED) < root_cause_rank(Cause.PEER_LOST)


def test_only_causes_that_recur_end_a_job_at_once() -> None:
    ends = {cause for cause in Cause if action_after(cause) is Action.FAIL}
    assert ends == {Cause.CONFIG_INVALID, Cause.DATA_ERROR, Cause.MODEL_ERROR, Cause.TASK_FAILED}


def test_errors_that_no_cause_describes_keep_their_stack() -> None:
    assert {cause for cause in Cause if not is_explained(cause)} == {Cause.RANK_FAILED, Cause.INTERNAL}


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FileNotFoundError("x"), Cause.STORAGE_ERROR),
        (RuntimeError("peer reset"), Cause.PEER_LOST),
        (RuntimeError("other"), Cause.RANK_FAILED),
        (ValueError("peer reset"), Cause.RANK_FAILED),
    ],
)
def test_the_first_rule_that_fits_gives_the_cause(error: Exception, cause: Cause) -> None:
    rules = [
        CauseRule(OSError, Cause.STORAGE_ERROR),
        CauseRule(RuntimeError, Cause.PEER_LOST, mentions("closed", "reset")),
        CauseRule(FileNotFoundError, Cause.DATA_ERROR),
    ]
    assert cause_of_error(error, rules, Cause.RANK_FAILED) is cause
