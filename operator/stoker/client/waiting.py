"""Waiting for a job: when it has ended, how its progress reads, and a bar for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from stoker.client.errors import GatewayFailed, JobFailed, NoAnswer
from stoker.gateway.domain.states import JobState, goes_no_further
from stoker.gateway.models import Job
from stoker.pod.patience import Patience

POLL_S = 2.0


class Wait:
    """The time of one wait: when it ends, how long until the next look, how long a silent gateway is borne."""

    def __init__(self, timeout_s: float | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self.monotonic = timeout_s, monotonic
        self._end = None if timeout_s is None else monotonic() + timeout_s
        self._patience = Patience(monotonic=monotonic)

    def heard(self, job: Job) -> None:
        """Note an answer. Raises TimeoutError when the time is over."""
        self._patience.heard()
        if self._is_over:
            raise TimeoutError(f"job {job.job_name} is still {job.status} after {self.timeout_s:g} s")

    def missed(self, error: NoAnswer | GatewayFailed) -> None:
        """Note that no answer came. Raises `error` after five minutes, or when the time is over."""
        if self._is_over:
            raise error
        self._patience.missed(error)

    @property
    def _is_over(self) -> bool:
        return self._end is not None and self.monotonic() >= self._end

    @property
    def pause_s(self) -> float:
        """Time until the next look."""
        return POLL_S if self._end is None else max(0.0, min(POLL_S, self._end - self.monotonic()))


def is_settled(job: Job) -> bool:
    """Whether a job goes no further by itself: ended, or suspended; not one that was resumed or cancelled just now."""
    return goes_no_further(job.status, job.spec)


def checked(job: Job) -> Job:
    """The job, if it did not fail. Raises JobFailed."""
    if job.status in (JobState.FAILED, JobState.CANCELLED):
        raise JobFailed(f"job {job.job_name} is {job.status}{f': {job.message}' if job.message else ''}", job)
    return job


def progress_text(job: Job) -> str:
    """The progress of a job in one line."""
    metrics = job.metrics
    parts = [str(job.status)]
    if metrics.step is not None:
        parts.append(f"step {metrics.step}/{metrics.total_steps or '?'}")
    if metrics.loss is not None:
        parts.append(f"loss {metrics.loss:.4f}")
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:,.0f} tokens/s")
    return "  ".join([*parts, *([job.message] if job.message else [])])


class ProgressBar:
    """A bar on a terminal; in a log, a line for each change of state."""

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self._said = ""
        self._live: Any = None

    def __enter__(self) -> ProgressBar:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, job: Job) -> None:
        """Show a job as it is now."""
        if self._live is not None:
            self._live.update(_bar(job))
        elif self.shown and str(job.status) != self._said:
            self._said = str(job.status)
            sys.stderr.write(f"{job.job_name}  {progress_text(job)}\n")


def _bar(job: Job) -> Any:
    from rich.columns import Columns
    from rich.progress_bar import ProgressBar as Bar
    from rich.text import Text

    bar = Bar(total=job.metrics.total_steps or 1, completed=job.metrics.step or 0, width=30)
    return Columns([Text(job.job_name), bar, Text(progress_text(job))])
