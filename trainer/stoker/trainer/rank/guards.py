"""The guards of a run: when replicas are compared, and what a loss spike leads to.

Decides alone; the loop acts. Every rank has the same guards and sees the same losses. The state is in every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from stoker.trainer.protocol.config import GuardsConfig
from stoker.trainer.rank.loss_spike import LossHistory
from stoker.trainer.rank.skipped_batches import batch_of_step, left_out_before

Action = Literal["Off", "Record", "Skip", "Rewind", "Accept"]

MAX_REWINDS = 4
"""Steps with a spike that are taken back in a row. The next one is a new level of the losses, as data of another kind
brings it: to leave out more batches would only end the job. Fewer than the default of `run.backoffLimit`, 6."""


def action_at(mode: Literal["Off", "Record", "Skip", "Rewind"], batch: int, skipped: Collection[int]) -> Action:
    """Return what a spike of a batch leads to."""
    is_new_level = mode == "Rewind" and left_out_before(batch, skipped) >= MAX_REWINDS
    return "Accept" if is_new_level else mode


class Guards:
    """Owns the history of losses and the list of batches that are left out."""

    def __init__(
        self,
        config: GuardsConfig,
        skipped_batches: Sequence[int] = (),
        write: Callable[[Sequence[int]], None] = lambda _batches: None,
    ) -> None:
        """`write` keeps the list of batches for the next attempt."""
        self._config = config
        self._history = LossHistory()
        self._write = write
        self.skipped_batches = tuple(skipped_batches)

    def loss_limit(self, batch: int) -> float:
        """A larger loss of this batch changes no weight."""
        return self._history.limit if self._action_at(batch) in ("Skip", "Rewind") else math.inf

    def batch_of_step(self, step: int) -> int:
        """The batch that step `step` (from 0) trains."""
        return batch_of_step(step, self.skipped_batches)

    def compares(self, step: int) -> bool:
        """Whether replicas are compared after step `step` (from 1)."""
        every = self._config.checksum_every_steps
        return every is not None and step % every == 0

    def judge(self, step: int, batch: int, loss: float, samples: tuple[int, int]) -> dict[str, Any] | None:
        """Add a step's loss to the history; the facts of a spike, or None. Its `action` says what follows.

        `samples`: indices of the first sample in the global order, and of the one after the last.
        """
        limit, action = self._history.limit, self._action_at(batch)
        if action == "Off":
            return None
        if action in ("Rewind", "Accept") and loss > limit:
            if action == "Accept":
                self._history.begin_anew(loss)
            return _facts(step, loss, limit, action, samples)  # a step that is taken back is no part of the history
        return _facts(step, loss, limit, action, samples) if self._history.add(loss) else None

    @property
    def rewinds(self) -> bool:
        """Whether a loss that is not finite ends the attempt, and its batch is left out for good."""
        return self._config.loss_spike == "Rewind"

    def facts_of_non_finite(self, step: int, samples: tuple[int, int]) -> dict[str, Any]:
        """Return the facts of a step whose loss or gradient is not finite: a spike without a number."""
        return {"step": step, "loss": None, "limit": None, "action": self._config.loss_spike, "samples": list(samples)}

    def leave_out(self, batch: int) -> None:
        """Keep for all later attempts that a batch is left out."""
        self.skipped_batches = tuple(sorted({*self.skipped_batches, batch}))
        self._write(self.skipped_batches)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"loss_history": self._history.state()}

    def restore(self, state: Mapping[str, Any] | None, skipped_batches: Sequence[int] = ()) -> None:
        """Continue from a checkpoint; one of an earlier version has no state.

        `skipped_batches`: what the run of the checkpoint left out; it may be another job's, whose list is elsewhere.
        """
        self._history.restore((state or {}).get("loss_history"))
        self.skipped_batches = tuple(sorted({*self.skipped_batches, *skipped_batches}))

    def _action_at(self, batch: int) -> Action:
        return action_at(self._config.loss_spike, batch, self.skipped_batches)


def _facts(step: int, loss: float, limit: float, action: Action, samples: tuple[int, int]) -> dict[str, Any]:
    return {"step": step, "loss": loss, "limit": limit, "action": action, "samples": list(samples)}
