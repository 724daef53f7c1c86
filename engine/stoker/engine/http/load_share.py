"""One front's part of the load of an engine, as the fronts of an engine send it to each other.

Made by `JobLedger`; `fronts` carries it between the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from stoker.engine.core.prefill_rate import Prefill, newest
from stoker.pod.prompt_order import LOOK_AHEAD


class LoadShare(NamedTuple):
    """One front's part of the load, or of that of one data rank."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    gap_s: float | None = None
    prefills: tuple[Prefill, ...] = ()
    """Its last prompts, in the order of their ends."""
    prompts: tuple[int, ...] = ()
    """Prompt tokens of the first of those that wait, in the order of arrival."""
    ranks: tuple[LoadShare, ...] = ()
    """The parts of each data rank, where there are several."""

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> LoadShare:
        """Read the list of its fields."""
        *fields, prefills, prompts, ranks = wire
        made = tuple(Prefill._make(one) for one in prefills), tuple(prompts), tuple(map(cls.from_wire, ranks))
        return cls._make((*fields, *made))


def summed(shares: Sequence[LoadShare]) -> LoadShare:
    """The load of several fronts; rates are means over those that have measured one. Which of their prompts came first
    is not known."""
    return LoadShare(
        sum(one.running for one in shares),
        sum(one.waiting for one in shares),
        sum(one.waiting_tokens for one in shares),
        _average([one.prefill_tokens_per_s for one in shares]),
        _average([one.gap_s for one in shares]),
        newest(chain.from_iterable(one.prefills for one in shares)),
        tuple(islice(chain.from_iterable(one.prompts for one in shares), LOOK_AHEAD)),
    )


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
