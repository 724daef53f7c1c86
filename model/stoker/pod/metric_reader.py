"""`python -m stoker.pod.metric_reader FILE`: the points of a metrics log as JSON lines, for a task beside a volume.

Each line is `[step, loss, validation_loss, learning_rate, gradient_norm, tokens_per_second]` with null for what is not
there. The last line `{"points": N, "unreadable": M}` proves that nothing is missing. What `read_history` returns is
also the answer of the trainer's agent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser, run_program
from stoker.pod.metric_log import COLUMNS, LogReader, Sample
from stoker.pod.metric_thinning import FEWEST, thinned
from stoker.pod.termination_message import TerminationMessage

MOST = 20_000
"""Points of one answer: about 2 MB, which the log of a pod holds."""


class BrokenHistory(ValueError):
    """Lines that are not the whole output of a reader."""


@dataclass(frozen=True)
class History:
    """Points of a log in the order of their steps, and how many of its lines are no JSON object."""

    points: list[Sample]
    unreadable: int

    def document(self) -> dict[str, Any]:
        """The history as JSON data."""
        points = [{"step": point.step, **point.values} for point in self.points]
        return {"points": points, "unreadable": self.unreadable}


def read_history(file: Path, after_step: int = 0, until_step: int | None = None, max_points: int = MOST) -> History:
    """Read a log, thinned to `max_points`.

    Raises:
        OSError: the file cannot be read.
        ValueError: `max_points` is too small.
    """
    reader = LogReader(file, after_step, until_step)
    return History(thinned(reader.samples(), max_points), reader.unreadable)


def history_lines(history: History) -> list[str]:
    """The output of the program."""
    rows = [[point.step, *(point.values.get(column) for column in COLUMNS)] for point in history.points]
    return [*map(json.dumps, rows), json.dumps({"points": len(rows), "unreadable": history.unreadable})]


def parse_lines(lines: Iterable[str]) -> History:
    """Read the program's output back.

    Raises:
        BrokenHistory: a line is missing or is no point.
    """
    points: list[Sample] = []
    for line in lines:
        try:
            found = json.loads(line)
            if isinstance(found, dict):
                if found["points"] != len(points):
                    raise BrokenHistory(f"{len(points)} of {found['points']} points have arrived")
                return History(points, int(found["unreadable"]))
            step, *values = found
            given = {name: float(value) for name, value in zip(COLUMNS, values, strict=True) if value is not None}
            points.append(Sample(int(step), given))
        except (ValueError, TypeError, KeyError) as error:
            raise error if isinstance(error, BrokenHistory) else BrokenHistory(f"no point: {line[:200]!r}") from error
    raise BrokenHistory(f"the output ends behind {len(points)} points")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the points; the exit code (docs/exit-codes.md)."""
    parser = CommandParser(
        prog="python -m stoker.pod.metric_reader",
        description="Print the points of a metrics log (logging.jsonl) as JSON lines.",
        epilog="example: python -m stoker.pod.metric_reader /var/stoker/checkpoints/teach/logs/teach.jsonl",
    )
    parser.add_argument("file", type=Path, help="the log")
    parser.add_argument("--after-step", type=int, default=0, help="only later steps")
    parser.add_argument("--until-step", type=int, help="no later steps")
    parser.add_argument("--max-points", type=int, default=MOST, help=f"at least {FEWEST}; extremes are kept")
    parser.add_argument("--termination-log", type=Path, help="file for the reason of a failure")
    given = parser.parse_args(arguments)
    if given.max_points < FEWEST:
        parser.error(f"--max-points: at least {FEWEST} are needed, got {given.max_points}")
    try:
        history = read_history(given.file, given.after_step, given.until_step, given.max_points)
    except OSError as error:
        detail = f"{given.file}: {error.strerror or error}"
        sys.stderr.write(f"error: {detail}\n")
        if given.termination_log is not None:
            TerminationMessage(cause=Cause.TASK_FAILED, detail=detail).write(given.termination_log)
        return EXIT_CODES[Cause.TASK_FAILED]
    sys.stdout.write("\n".join(history_lines(history)) + "\n")
    return 0


if __name__ == "__main__":
    run_program(main, "python -m stoker.pod.metric_reader")
