"""The type of options that take a time: finite seconds, so that no comparison with a clock is undecided."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """Seconds from 0 on. Without the option a command waits as long as it takes."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the value. Raises click.BadParameter, which names the option."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"a finite number of seconds, 0 or more, is needed (got {value})", param, ctx)
        return seconds


SECONDS = Seconds()
