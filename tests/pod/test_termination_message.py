"""The termination message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.causes import Cause
from stoker.pod.termination_message import MAX_BYTES, SaveReport, TerminationMessage, parse_termination_message

METRICS = {
    "tokens": 10**13,
    "loss": 2.123456789012345,
    "validation_loss": 2.123456789012345,
    "learning_rate": 0.00012345678901234567,
    "elapsed_s": 1234567.890123456,
    "bytes": 10**12,
    "files": 1030,
    "pieces": 10**6,
    "layout": {"world_size": 1024, "data_parallel": 1024, "tensor": 1, "pipeline": 1, "context": 1, "zero_stage": 2},
}


def record(step: int, **fields: Any) -> SaveReport:
    values: dict[str, Any] = {
        "id": f"id-{step}",
        "folder": f"step-{step:08d}.0a1b2c3d",
        "step": step,
        "digest": "d" * 64,
        "verified": True,
    }
    return SaveReport(**(values | fields))


def test_a_termination_message_survives_the_trip(tmp_path: Path) -> None:
    message = TerminationMessage(
        cause=Cause.HANG,
        step=7,
        rank=1,
        detail="no step for 600 s",
        saves=(record(5, metrics=METRICS),),
        result={"a": 1},
    )
    log = tmp_path / "log"
    log.write_text("x" * 5000)
    message.write(log)
    assert parse_termination_message(log.read_text()) == message


def test_only_the_last_eight_saves_are_kept() -> None:
    message = parse_termination_message(
        TerminationMessage(cause=Cause.COMPLETED, saves=tuple(map(record, range(20)))).encode().decode()
    )
    assert message is not None
    assert [save.step for save in message.saves] == list(range(12, 20))
    assert message.saves_omitted == 12


@given(
    detail=st.one_of(st.text(max_size=9000), st.text(alphabet='\n"\\é漢😀\ud800', min_size=3000, max_size=6000)),
    saves=st.integers(0, 10),
    extra=st.integers(0, 600),
)
def test_it_never_exceeds_its_limit_and_always_parses(detail: str, saves: int, extra: int) -> None:
    message = TerminationMessage(
        cause=Cause.RANK_FAILED,
        detail=detail,
        saves=tuple(record(step, folder="f" * extra) for step in range(saves)),
    )
    encoded = message.encode()
    assert len(encoded) <= MAX_BYTES
    read = parse_termination_message(encoded.decode())
    assert read is not None
    assert read.cause == Cause.RANK_FAILED
    assert read.saves == message.saves[len(message.saves) - len(read.saves) :]
    assert read.saves_omitted == saves - len(read.saves)


def test_a_long_detail_is_shortened_before_a_save_is_dropped() -> None:
    message = parse_termination_message(
        TerminationMessage(cause=Cause.HANG, detail="x" * 9000, saves=tuple(map(record, range(8)))).encode().decode()
    )
    assert message is not None
    assert len(message.saves) == 8
    assert message.detail.endswith("xxx...")


def test_the_figures_of_old_saves_make_room_for_the_newest_and_for_the_detail() -> None:
    uid = "0f0e0d0c-0b0a-0908-0706-050403020100"
    saves = tuple(record(step, id=uid, metrics=METRICS) for step in range(8))
    encoded = TerminationMessage(cause=Cause.HANG, detail="x" * 1000, saves=saves).encode()
    assert len(encoded) <= MAX_BYTES
    message = parse_termination_message(encoded.decode())
    assert message is not None
    assert len(message.detail) == 1000
    assert [bool(save.metrics) for save in message.saves] == [False] * 4 + [True] * 4
    assert message.saves[-1].metrics == METRICS


def test_a_result_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="4096 are allowed"):
        TerminationMessage(cause=Cause.COMPLETED, result={"a": "x" * 5000}).encode()


SAVE = '"id": "x", "folder": "f", "step": 1, "digest": "d", "verified": true'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):",
        "5",
        "null",
        "[]",
        '"text"',
        "{}",
        '{"cause": "Nonsense"}',
        '{"cause": ["Hang"]}',
        '{"cause": "Hang", "step": "7"}',
        '{"cause": "Hang", "rank": true}',
        '{"cause": "Hang", "saves": 5}',
        '{"cause": "Hang", "saves": [5]}',
        '{"cause": "Hang", "saves": [{"id": "x"}]}',
        '{"cause": "Hang", "saves": [{"id": 1, "folder": "f", "step": 1, "digest": "d", "verified": true}]}',
        '{"cause": "Hang", "saves": [{"id": "x", "folder": "f", "step": "1", "digest": "d", "verified": true}]}',
        '{"cause": "Hang", "saves": [{"id": "x", "folder": "f", "step": 1, "digest": "d", "verified": "yes"}]}',
        f'{{"cause": "Hang", "saves": [{{{SAVE}, "metrics": 1}}]}}',
        f'{{"cause": "Hang", "saves": [{{{SAVE}, "metrics": {{"loss": "1"}}}}]}}',
        '{"cause": "Hang", "result": 5}',
        "[" * 4096,
        TerminationMessage(cause=Cause.HANG, detail="cut").encode().decode()[:-1],
    ],
)
def test_text_that_is_no_termination_message_is_none(text: str) -> None:
    assert parse_termination_message(text) is None


def test_missing_fields_have_defaults() -> None:
    assert parse_termination_message('{"cause": "Hang"}') == TerminationMessage(cause=Cause.HANG)


def test_encoding_is_plain_json() -> None:
    assert json.loads(TerminationMessage(cause=Cause.COMPLETED).encode())["cause"] == "Completed"


def test_a_save_of_an_earlier_version_names_its_metrics_figures() -> None:
    message = TerminationMessage(cause=Cause.COMPLETED, saves=(record(5, metrics=METRICS),))
    old = message.encode().decode().replace('"metrics":', '"figures":')
    assert parse_termination_message(old) == message
