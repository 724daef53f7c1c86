"""Validation: the mean loss of data that is not trained, or no result where a stop ends it early.

Called by the loop between steps; it changes no state of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.host_link import upload
from stoker.trainer.rank.train_step import Passes, counted_once
from stoker.trainer.rank.zero import Zero


@dataclass(frozen=True)
class ValidationLoss:
    """Mean loss over the weighted targets of all ranks, and their number."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation; the same values on every rank."""

    signals: StepSignals
    """The decision of all ranks after the last micro-batches that were computed."""
    found: ValidationLoss | None
    """None: a stop arrived before the last micro-batches."""


def validate(
    passes: Passes, zero: Zero, batches: Iterable[MicroBatch], signals: Callable[[], StepSignals]
) -> ValidationResult:
    """Compute the loss of this rank's micro-batches, of which every rank has the same number.

    After each group that is computed at once the ranks agree on their `signals`: a stop may have less time than a long
    validation takes.
    """
    zero.wait_parameters()
    loss_sum, targets = 0.0, 0
    for group, more_follow in in_groups(iter(batches), passes.max_evaluated):
        loss_sum += sum(passes.evaluate(group))
        targets += sum(int(batch.weights_T.sum()) for batch in group)
        sums, decided = _exchange(zero, [loss_sum, targets], signals())
        if more_follow and decided.stop is not None:
            return ValidationResult(decided, None)
    loss, tokens = counted_once(sums, zero.mesh).sum(0).tolist()
    return ValidationResult(decided, ValidationLoss(loss / max(1.0, tokens), int(tokens)))


def in_groups(batches: Iterator[MicroBatch], size: int) -> Iterator[tuple[list[MicroBatch], bool]]:
    """Yield at least one group of at most `size` micro-batches, each with whether more follow."""
    group = list(islice(batches, size))
    while following := list(islice(batches, size)):
        yield group, True
        group = following
    yield group, False


def _exchange(zero: Zero, sums: list[float], signals: StepSignals) -> tuple[Tensor, StepSignals]:
    """Gather the sums of all ranks [ranks, 2], and merge their signals."""
    mine = upload([*sums, *signals.numbers()], zero.states[0].bucket.device, torch.float64)
    by_rank = zero.mesh.world.exchange(mine).cpu()
    return by_rank[:, : len(sums)], StepSignals.merge(by_rank[:, len(sums) :].tolist())
