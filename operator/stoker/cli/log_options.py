"""Options of `logs` on both clusters."""

from __future__ import annotations

from typing import Any

import click

from stoker.cli.log_selection import LogSelection, parse_duration_s
from stoker.cli.option_group import option_group


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time such as 90s, 5m or 1h30m; the command receives seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_duration_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


OPTIONS = (
    click.option("-f", "--follow", is_flag=True, help="Print new lines until the job, or every pod, has ended."),
    click.option("--tail", type=click.IntRange(min=0), help="Only the last lines of each pod."),
    click.option("--rank", type=click.IntRange(min=0), help="Only the lines that this rank of a job wrote."),
    click.option("--attempt", type=click.IntRange(min=0), help="Pods of this attempt [default: the newest]."),
    click.option("-p", "--previous", is_flag=True, help="Pods of the attempt before the newest."),
)
SINCE = click.option("--since", "since_s", type=Duration(), metavar="TIME", help="Only newer lines: 90s, 5m, 1h30m.")

log_options = option_group("selection", LogSelection, OPTIONS)
"""Adds -f, --tail, --rank, --attempt and --previous; the command receives `selection`."""
timed_log_options = option_group("selection", LogSelection, (*OPTIONS, SINCE))
"""The same with --since, where the cluster knows when a line was written."""
