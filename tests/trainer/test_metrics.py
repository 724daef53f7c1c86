"""Speed, time left and the log."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path

import pytest

from stoker.trainer.protocol.messages import StepEvent, ValidationEvent
from stoker.trainer.rank.metrics import MetricLog, StepClock


def test_time_left_leaves_the_first_step_out() -> None:
    times = iter([0.0, 10.0, 10.0, 12.0, 20.0, 24.0])
    clock = StepClock(100, lambda: next(times))
    eta = []
    for left in (9, 8, 7):
        clock.start()
        clock.stop()
        eta.append(clock.eta_s(left))
    assert eta == [90.0, 16.0, 21.0]
    assert clock.tokens_per_s == 25.0
    assert clock.steps == 3


def event(step: int) -> StepEvent:
    return StepEvent(
        step=step,
        total_steps=5,
        tokens=step,
        loss=0.1 + 0.2,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens_per_s=1.0,
        step_s=1.0,
        eta_s=1.0,
        at=0.0,
    )


def test_the_log_keeps_every_nth_step_the_last_one_and_validations_with_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    with MetricLog(str(path), 2) as log:
        for step in range(1, 6):
            log.step(event(step))
        log.validation(ValidationEvent(step=5, loss=1.0, tokens=3, at=0.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 2),
        ("step", 4),
        ("step", 5),
        ("validation", 5),
    ]
    given = {name: value for name, value in asdict(event(2)).items() if value is not None}
    assert lines[0] == {"kind": "step", **given}
    with MetricLog(str(path), 1) as log:  # a resumed run appends
        log.step(event(1))
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize("every", [1, 3])
def test_without_a_path_nothing_is_written(tmp_path: Path, every: int) -> None:
    with MetricLog(None, every) as log:
        log.step(event(3))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_log() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), MetricLog("/dev/full", 1) as log:
        log.step(event(1))


def test_a_line_that_was_cut_short_is_removed_when_a_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with MetricLog(str(path), 1) as log:
        log.step(event(1))
        log.step(event(2))
    path.write_bytes(path.read_bytes()[:-20])  # the disk was full, or the rank was killed
    with MetricLog(str(path), 1) as log:
        log.step(event(2))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_bytes(b'{"kind": "st')
    with MetricLog(str(path), 1) as log:
        log.step(event(1))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


@pytest.mark.parametrize("room", [0, 10, 100])
def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricLog(str(path), 1) as log:
        log.step(event(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: '{path}'"):
                log.step(event(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


def test_a_validation_that_diverged_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with MetricLog(str(path), 1) as log:
        log.validation(ValidationEvent(step=3, loss=float("nan"), tokens=5, at=7.0))
    assert path.read_text() == '{"kind": "validation", "step": 3, "loss": null, "tokens": 5, "at": 7.0}\n'
