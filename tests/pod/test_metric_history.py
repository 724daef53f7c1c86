"""The metrics log of a run: read from its end, with restarts; thinned with its extremes; printed and read back."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.metric_log import COLUMNS, Sample, lines_from_the_end
from stoker.pod.metric_reader import BrokenHistory, History, history_lines, main, parse_lines, read_history
from stoker.pod.metric_thinning import FEWEST, Thinner, extremes, thinned


def step_line(step: int, loss: float) -> str:
    fields = {"kind": "step", "step": step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_s": 9.0}
    return json.dumps(fields)


def validation_line(step: int, loss: float) -> str:
    return json.dumps({"kind": "validation", "step": step, "loss": loss})


def written(folder: Path, lines: list[str], end: str = "\n") -> Path:
    file = folder / "log.jsonl"
    file.write_text("\n".join(lines) + end)
    return file


def test_a_restart_replaces_what_it_threw_away(tmp_path: Path) -> None:
    first = [step_line(step, 10.0) for step in range(1, 9)]
    lines = [*first[:4], validation_line(4, 4.0), *first[4:], validation_line(8, 8.0)]
    again = [step_line(5, 1.0), step_line(6, math.nan), '{"kind": "loss_spike", "step": 6}', "no json", "[1]"]
    found = read_history(written(tmp_path, [*lines, *again, '{"kind": "step", "st'], end=""))
    losses = [(point.step, point.values.get("loss"), point.values.get("validation_loss")) for point in found.points]
    assert losses == [
        (1, 10.0, None),
        (2, 10.0, None),
        (3, 10.0, None),
        (4, 10.0, 4.0),
        (5, 1.0, None),
        (6, None, None),
    ]
    assert found.unreadable == 2
    assert found.points[0].values == {
        "loss": 10.0,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens_per_second": 9.0,
    }


@given(
    resumes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=5),
    after=st.integers(0, 40),
    until=st.integers(0, 60),
)
def test_reading_backwards_equals_replaying_the_run(
    resumes: list[tuple[int, int]], after: int, until: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The slow twin: keep a list, cut it where an attempt begins, append."""
    run: list[tuple[int, float]] = []
    lines, loss = [], 0.0
    for wanted, steps in resumes:
        begin = min(wanted, run[-1][0] if run else 0)
        run = [one for one in run if one[0] <= begin]
        for step in range(begin + 1, begin + steps + 1):
            loss += 1.0
            run.append((step, loss))
            lines.append(step_line(step, loss))
    file = written(tmp_path_factory.mktemp("run"), lines)
    found = read_history(file, after, until)
    assert [(p.step, p.values["loss"]) for p in found.points] == [one for one in run if after < one[0] <= until]


@given(st.binary(max_size=200).map(lambda data: data.replace(b"a", b"\n")), st.integers(1, 7))
def test_lines_from_the_end_are_the_lines(data: bytes, chunk: int) -> None:
    found = list(lines_from_the_end(io.BytesIO(data), chunk))
    assert found == [line for line in reversed(data.split(b"\n")[:-1]) if line]


samples = st.lists(
    st.builds(
        Sample,
        st.integers(0, 3000),
        st.dictionaries(st.sampled_from(COLUMNS), st.floats(-9, 9, width=16), max_size=3),
    ),
    max_size=300,
    unique_by=lambda sample: sample.step,
)


@given(samples, st.integers(FEWEST, 60))
def test_thinning_a_stream_equals_thinning_the_whole_and_keeps_extremes(found: list[Sample], most: int) -> None:
    thinner = Thinner(most)
    for sample in found:
        thinner.add(sample)
    points = thinner.points()
    assert len(points) <= most
    buckets: dict[int, dict[int, dict[str, float]]] = {}
    for sample in found:
        buckets.setdefault(sample.step // thinner.width, {})[sample.step] = sample.values
    whole = {step for bucket in buckets.values() for step in (bucket if thinner.width == 1 else extremes(bucket))}
    ends = {min(sample.step for sample in found), max(sample.step for sample in found)} if found else set()
    assert [point.step for point in points] == sorted(whole | ends)
    for column in COLUMNS:
        values = [sample.values[column] for sample in found if column in sample.values]
        kept = [point.values[column] for point in points if column in point.values]
        assert (min(values), max(values)) == (min(kept), max(kept)) if values else not kept


def test_a_long_run_keeps_its_spikes_and_its_ends() -> None:
    draw = random.Random(3)
    run = [Sample(step, {"loss": 2 + draw.random(), "gradient_norm": draw.random()}) for step in range(1, 100_001)]
    run[77_777] = Sample(77_778, {"loss": 50.0, "gradient_norm": 9.0})
    points = thinned(reversed(run), 1000)
    assert 300 < len(points) <= 1000
    assert {1, 77_778, 100_000} <= {point.step for point in points}
    assert thinned(run[:1000], 1000) == run[:1000]
    assert len(thinned(run[:1001], 1000)) < 1000
    with pytest.raises(ValueError, match="max_points: at least 12 are needed, got 11"):
        thinned(run, 11)


def test_the_program_prints_what_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, [step_line(1, 3.5), validation_line(1, 3.0), step_line(2, 3.25), "noise"])
    assert main([str(file), "--after-step", "1"]) == 0
    assert [point.step for point in parse_lines(capsys.readouterr().out.splitlines()).points] == [2]
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert parse_lines(printed) == read_history(file)
    assert parse_lines(history_lines(History([], 3))) == History([], 3)
    for broken in (printed[:-1], printed[1:], ["Traceback"], [*printed[:1], '[1, "x", null, null, null, null]']):
        with pytest.raises(BrokenHistory):
            parse_lines(broken)
    log = tmp_path / "last-word"
    log.touch()
    assert main([str(tmp_path / "nothing"), "--termination-log", str(log)]) == 76
    assert "No such file" in json.loads(log.read_text())["detail"]
    with pytest.raises(SystemExit) as ended:
        main([str(file), "--max-points", "3"])
    assert ended.value.code == 64
