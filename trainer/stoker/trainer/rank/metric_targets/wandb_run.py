"""Weights & Biases (extra `wandb`): offline without the variable WANDB_API_KEY, for `wandb sync` later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.trainer.rank.metric_targets.target import MetricTarget, place_in_errors


class WandbRun(MetricTarget):
    """One run of the project for all attempts of a job."""

    def __init__(self, fields: Mapping[str, Any], run_id: str, name: str, folder: Path, config: dict[str, Any]) -> None:
        """`fields`: `logging.wandb`. `folder`: where the run's files lie."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._place = f"logging.wandb {dict(fields)}"
        with place_in_errors(self._place):
            self._run = wandb.init(
                project=fields["project"],
                entity=fields.get("entity"),
                group=fields.get("group"),
                name=fields.get("name") or name,
                tags=list(fields.get("tags") or ()),
                id=run_id,
                resume="allow",
                mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
                dir=str(folder),
                config=config,
                settings=wandb.Settings(console="off"),
            )

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:  # noqa: ARG002  it notes the time itself
        with place_in_errors(self._place):
            self._run.log(numbers, step=step)

    def close(self, completed: bool) -> None:
        with place_in_errors(self._place):
            self._run.finish(exit_code=0 if completed else 1)
