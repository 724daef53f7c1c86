"""TensorBoard event files (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path

from stoker.trainer.rank.metric_targets.target import MetricTarget

FLUSH_S = 10
"""Longest time that numbers stay in memory: so many are lost by a kill."""


class TensorboardFiles(MetricTarget):
    """One file of events for each attempt, in one folder."""

    def __init__(self, folder: str, done: int, *, is_first: bool) -> None:
        """`done`: steps of earlier attempts; what these wrote about later steps is hidden.

        `is_first`: there was no earlier attempt, so that what lies in the folder is another job's, and stays.
        """
        from tensorboardX import SummaryWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        hidden_from = None if is_first and not done else done + 1
        self._writer = SummaryWriter(logdir=folder, purge_step=hidden_from, flush_secs=FLUSH_S)

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, at)

    def close(self, completed: bool) -> None:  # noqa: ARG002
        self._writer.close()
