"""TensorBoard event files (extra `tensorboard`)."""

from __future__ import annotations

from pathlib import Path

from stoker.trainer.rank.metric_targets.target import MetricTarget, place_in_errors

FLUSH_S = 10
"""Longest time that numbers stay in memory: so many are lost by a kill."""


class TensorboardFiles(MetricTarget):
    """One file of events for each attempt, in one folder."""

    def __init__(self, folder: str, done: int, *, is_first: bool) -> None:
        """`done`: steps of earlier attempts; what these wrote about later steps is hidden.

        `is_first`: there was no earlier attempt, so that what lies in the folder is another job's, and stays.
        """
        from tensorboardX import SummaryWriter

        self._place = f"logging.tensorboard {folder}"
        hidden_from = None if is_first and not done else done + 1
        with place_in_errors(self._place):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(logdir=folder, purge_step=hidden_from, flush_secs=FLUSH_S)

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:
        with place_in_errors(self._place):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step, at)

    def close(self, completed: bool) -> None:  # noqa: ARG002
        with place_in_errors(self._place):
            self._writer.close()
