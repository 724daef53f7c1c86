"""What a rank's forward passes need not keep for backward: weights that are gathered again, results that are cheap.

Used by `train_step` for a whole model, and by each stage of a pipeline.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.trainer.rank.cheap_results import RecomputingOps
from stoker.trainer.rank.gathered_weights import GatheredWeights
from stoker.trainer.rank.saved_tensors import Keeper, saved_tensors


class Savings:
    """ZeRO stage 3 and selective checkpointing, as the passes use them; without either it does nothing."""

    def __init__(self, ops: Ops | None = None, gathered: GatheredWeights | None = None) -> None:
        """`ops`: with `RecomputingOps` cheap results are computed again. `gathered`: the weights of stage 3."""
        self._gathered = gathered
        self._cheap = ops.cheap if isinstance(ops, RecomputingOps) else None
        self._keepers: list[Keeper] = [] if gathered is None else [gathered]
        if self._cheap is not None:
            self._cheap.weights = gathered
            self._keepers.append(self._cheap)

    def in_forward(self) -> AbstractContextManager[object]:
        """Operations inside of this context keep only what backward cannot get back."""
        return saved_tensors(self._keepers)

    def use_too(self, unit: str) -> None:
        """Make the weights of a second unit ready beside the one in use (a tied table as the output layer)."""
        if self._gathered is not None:
            self._gathered.use_too(unit)

    def gather_for_backward(self, unit: str, *outputs: Tensor | None) -> None:
        """Let backward gather a unit's weights when the gradient of its outputs has arrived."""
        gathered = self._gathered
        if gathered is None:
            return
        for output in outputs:
            if output is not None and output.requires_grad:
                output.register_hook(lambda _grad: gathered.before_backward(unit))  # type: ignore[no-untyped-call]

    def end_backward(self) -> None:
        """Free what backward has computed again."""
        if self._cheap is not None:
            self._cheap.forget()
