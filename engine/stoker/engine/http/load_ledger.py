"""The open jobs of one front, and what they measured: all together, and by data rank where an engine has several.

Counts change with each job; rates are means of the last ones. Owned by `Front`, changed by `Generation` and
`JobFollower`; read by `LoadReports`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from stoker.engine.core.messages import RequestFacts
from stoker.engine.core.prefill_rate import FEWEST_TOKENS, Prefill, PrefillRate, rate_of
from stoker.engine.core.stats import TransferStats
from stoker.engine.http.load_share import LoadShare, summed
from stoker.pod.prompt_order import LOOK_AHEAD

WEIGHT = 0.2
"""Of a new measurement in a mean."""


class JobLedger:
    """Open jobs of one front, or those of one data rank."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        """Prompt tokens of jobs without a first token."""
        self.running: set[str] = set()
        self.prefill_tokens_per_s: float | None = None
        """Mean of the last prompts, each by itself."""
        self.prefill_rate = PrefillRate()
        """Of all prompts in work together."""
        self.gap_s: float | None = None
        self._of_all: tuple[tuple[Prefill, ...], float | None] = (), None
        """The prompts of all fronts, and their rate."""

    def begin(self, name: str, prompt_tokens: int) -> None:
        """Count a job."""
        self.waiting[name] = prompt_tokens

    def end(self, name: str) -> None:
        """Count a job no longer."""
        self.waiting.pop(name, None)
        self.running.discard(name)

    def compute(self, name: str, facts: RequestFacts | None) -> bool:
        """Note that a job's prompt is computed; return whether it was not known."""
        if self.waiting.pop(name, None) is None:
            return False
        self.running.add(name)
        if facts is None or facts.helped or facts.scheduled_s is None or facts.first_token_s is None:
            return True
        tokens, seconds = facts.prompt_tokens - facts.cached_tokens, facts.first_token_s - facts.scheduled_s
        if tokens >= FEWEST_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / seconds)
            self.prefill_rate.computed(tokens, facts.scheduled_s, facts.first_token_s)
        return True

    def note_gap(self, seconds: float) -> None:
        """Note the time between two tokens of a sequence."""
        if seconds > 0:
            self.gap_s = _mean(self.gap_s, seconds)

    @property
    def share(self) -> LoadShare:
        """The present load."""
        return LoadShare(
            len(self.running), len(self.waiting), sum(self.waiting.values()), self.prefill_tokens_per_s, self.gap_s,
            tuple(self.prefill_rate.recent), tuple(islice(self.waiting.values(), LOOK_AHEAD)),
        )  # fmt: skip

    def counts(self, others: Sequence[LoadShare], helps: TransferStats | None) -> dict[str, Any]:
        """The present load of all fronts, with what is computed for other engines."""
        load = summed((self.share, *others))
        helping, waiting, tokens, rate = (
            (helps.helping, helps.helping_waiting, helps.helping_tokens, helps.prefill_tokens_per_s)
            if helps is not None
            else (0, 0, 0, None)
        )
        return {
            "requests": load.waiting + load.running + helping,
            "waiting": load.waiting + waiting,
            "waiting_tokens": load.waiting_tokens + tokens,
            "prompts": load.prompts,
            "prefill_tokens_per_s": load.prefill_tokens_per_s if rate is None else rate,
            "busy_tokens_per_s": self._busy_tokens_per_s(load.prefills) if others else self.prefill_rate.tokens_per_s,
            "gap_s": load.gap_s,
        }

    def _busy_tokens_per_s(self, prefills: tuple[Prefill, ...]) -> float | None:
        """The rate of all prompts together, by the last ones of all fronts."""
        if prefills != self._of_all[0]:
            self._of_all = prefills, rate_of(prefills)
        return self._of_all[1]


class LoadLedger(JobLedger):
    """Open jobs of one front, of all data ranks together and of each."""

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__()
        self.ranks = tuple(JobLedger() for _ in range(num_ranks if num_ranks > 1 else 0))
        """Of each data rank; empty where there is one."""

    @contextmanager
    def job(self, name: str, prompt_tokens: int, rank: int = 0) -> Iterator[None]:
        """Count a job of a data rank until it ends."""
        ledgers: Sequence[JobLedger] = (self, self.ranks[rank]) if self.ranks else (self,)
        for ledger in ledgers:
            ledger.begin(name, prompt_tokens)
        try:
            yield
        finally:
            for ledger in ledgers:
                ledger.end(name)

    def first_token(self, name: str, facts: RequestFacts | None) -> None:
        """Note that a job's prompt is computed; harmless when repeated."""
        if self.compute(name, facts):
            for rank in self.ranks:
                rank.compute(name, facts)

    def gap(self, seconds: float, rank: int = 0) -> None:
        """Note the time between two tokens of a sequence."""
        self.note_gap(seconds)
        if self.ranks:
            self.ranks[rank].note_gap(seconds)

    @property
    def share(self) -> LoadShare:
        """The present load of this front."""
        return super().share._replace(ranks=tuple(rank.share for rank in self.ranks))


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
