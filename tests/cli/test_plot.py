"""`stoker plot`: from a metrics log to text, points and a picture."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli.braille import BLANK, drawn
from stoker.cli.curves import Curve, read_curves
from stoker.cli.exit_status import WRONG_INPUT
from stoker.cli.plot import plot
from testing.cli.small_disk import room_for


def line(step: int, loss: float, kind: str = "step") -> str:
    rest = {"learning_rate": step / 1000, "grad_norm": 2.0} if kind == "step" else {}
    return json.dumps({"kind": kind, "step": step, "loss": loss, **rest}) + "\n"


def log(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(lines))
    return file


def run(file: Path, *options: str) -> Result:
    return CliRunner().invoke(plot, [str(file), *options], help_option_names=["-h", "--help"])  # as below `stoker`


def test_the_last_line_of_a_step_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    """Step 3 was trained before the run went back, and is not a part of it."""
    file = log(tmp_path, line(1, 4), line(2, 3), line(3, 9), line(2, 2.5), line(2, 7, "validation"), '{"kind": "st')
    loss, validation, rate, norm = read_curves(file).curves
    assert (loss.steps, loss.values) == ((1, 2), (4, 2.5))
    assert (validation.title, validation.steps, validation.values) == ("validation loss", (2,), (7,))
    assert rate.values == (0.001, 0.002)
    assert norm.values == (2, 2)


DAMAGE = ["\0" * 40 + "\n", "\udcff\n", '{"kind": "step", "lo\n', "[1]\n", '{"kind": "step"}\n']


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    """A power cut leaves zeros in a log, behind which the next attempt goes on."""
    file = tmp_path / "log.jsonl"
    file.write_bytes(f"{line(1, 4)}{damage}{line(2, 3)}".encode(errors="surrogateescape"))
    found = run(file, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["loss"] == {"steps": [1, 2], "values": [4, 3]}
    assert found.stderr == "warning: 1 lines of the log cannot be read\n"


def test_a_falling_loss_falls_from_the_left_to_the_right(tmp_path: Path) -> None:
    found = run(log(tmp_path, *(line(step, 10 - step) for step in range(1, 9))), "--width", "40")
    assert found.exit_code == 0
    loss = found.output.split("\n\n")[0].splitlines()
    assert loss[0] == "loss  (last 2)"
    assert loss[1].startswith("         9 ")
    assert loss[8].startswith("         2 ")
    assert loss[9].split() == ["step", "1", "8"]
    starts = [len(row[11:]) - len(row[11:].lstrip(chr(BLANK))) for row in loss[1:9]]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(loss[8]) == 40
    assert "gradient norm  (last 2)" in found.output


POINTS = st.dictionaries(st.integers(0, 10**6), st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(POINTS, st.integers(24, 200), st.integers(2, 20))
def test_a_drawing_has_its_size_and_its_first_and_last_point(points: dict[int, float], width: int, height: int) -> None:
    steps = tuple(sorted(points))
    text = drawn(Curve("loss", steps, tuple(points[step] for step in steps)), width, height).splitlines()
    assert len(text) == height + 2
    assert all(len(row) <= width for row in text[1:-1])
    dots = [row[11:].ljust(1, chr(BLANK)) for row in text[1:-1]]
    assert any(ord(row[0]) > BLANK for row in dots)
    assert len(steps) == 1 or max(map(len, dots)) == max(2, width - 11)


def test_json_has_the_points(tmp_path: Path) -> None:
    found = json.loads(run(log(tmp_path, line(1, 4), line(2, 3)), "--json").output)
    assert found["loss"] == {"steps": [1, 2], "values": [4.0, 3.0]}


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "loss.png"
    found = run(log(tmp_path, line(1, 4), line(2, 3), line(2, 3.5, "validation")), "--png", str(png))
    assert (found.exit_code, found.output) == (0, f"wrote {png}\n")
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack_from(">II", content, 16)
    assert (width, height) == (1080, 936)  # three panels


def test_a_picture_without_room_leaves_the_one_before(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "loss.png"
    png.write_bytes(b"before")
    points = log(tmp_path, line(1, 4), line(2, 3))
    run(points, "--png", "/dev/null")  # matplotlib writes its list of fonts the first time
    with room_for(5000):
        found = run(points, "--png", str(png))
    assert (found.exit_code, found.output) == (68, f"error: --png {png}: File too large\n")
    assert png.read_bytes() == b"before"
    assert run(points, "--png", "/dev/full").exit_code == 68


BAD = [
    ("", "the file has no step; a metrics log is needed"),
    ("text\n", "the file has no step, and 1 lines are of another form; a metrics log is needed"),
    ('{"kind": "step", "step": "x"}\n[1]\n', "the file has no step, and 2 lines are of another form"),
    ('{"kind": "step", "step": 1, "loss": "x"}\n', "the file has no step; a metrics log is needed"),
    (line(1, 4).rstrip(), "the file has no step; a metrics log is needed"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_what_is_no_metrics_log_is_refused(tmp_path: Path, content: str, message: str) -> None:
    found = run(log(tmp_path, content))
    assert found.exit_code == WRONG_INPUT
    assert message in found.output


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    (picture := tmp_path / "x.png").write_bytes(b"\x89PNG")
    good, lost = log(tmp_path, line(1, 4)), tmp_path / "none" / "x.png"
    assert run(tmp_path).output == f"error: {tmp_path}: Is a directory\n"
    assert run(picture).output.startswith(f"error: {picture}: the file has no step; a metrics log is needed")
    found = run(good, "--png", str(lost))
    assert (found.exit_code, found.output) == (WRONG_INPUT, f"error: --png {lost}: No such file or directory\n")


def test_a_missing_file_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run(tmp_path / "none.jsonl")
    assert (missing.exit_code, "none.jsonl" in missing.output) == (WRONG_INPUT, True)
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    found = run(log(tmp_path, line(1, 4)), "--png", str(tmp_path / "x.png"))
    assert (found.exit_code, found.output) == (WRONG_INPUT, "error: --png needs matplotlib: install stoker[plot]\n")


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    too_large = line(3, 3).replace('"loss": 3', '"loss": 1' + 400 * "0")
    scaled = line(4, 2).replace('"grad_norm": 2.0', '"grad_norm": null')
    loss, _, norm = read_curves(log(tmp_path, line(1, 4), line(2, float("nan")), too_large, scaled)).curves
    assert loss.steps == (1, 4)
    assert norm.steps == (1, 2, 3)


def test_a_curve_without_a_finite_value_is_not_drawn(tmp_path: Path) -> None:
    diverged = '{"kind": "validation", "step": 1, "loss": NaN}'
    found = run(log(tmp_path, line(1, 4), diverged))
    assert found.exit_code == 0
    assert "loss  (last 4)" in found.output
    assert "validation" not in found.output
