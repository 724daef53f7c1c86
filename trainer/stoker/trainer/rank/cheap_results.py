"""Selective activation checkpointing: results that are cheap to compute again are not kept for backward.

Products and attention keep their results, and so does the residual stream. Norms, rotations and SwiGLU, whose results
are inputs of products and attention, are computed again when backward asks for them: the same kernels on the same
inputs, so the gradients have the same bits. With sequence parallelism the result of a norm is gathered again, too.

`RecomputingOps` notes how each result was made; `CheapResults` gives it back. Both belong to one rank's forward pass,
which sets before each part of a block what of it is noted (`RecomputingOps.again`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import Rotation
from stoker.model.tensor_group import gathered
from stoker.pod.capabilities import KernelsName
from stoker.trainer.rank.saved_tensors import Keeper, Restore


@dataclass(frozen=True, eq=False)
class Recipe:
    """How some results were made."""

    function: Callable[..., Any]
    inputs: Sequence[Tensor | Restore | None]

    def results(self) -> tuple[Tensor, ...]:
        """Compute them again, without a graph, but on the path of a differentiable call."""
        inputs = [item() if callable(item) and not isinstance(item, Tensor) else item for item in self.inputs]
        with torch.enable_grad():
            made = self.function(*(None if item is None else item.detach() for item in inputs))
        return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True, eq=False)
class Noted:
    """A living result: its memory belongs to it as long as it lives."""

    result: weakref.ref[Tensor]
    recipe: Recipe
    index: int


class CheapResults:
    """The cheap results of a forward pass, by the memory that they occupy."""

    def __init__(self) -> None:
        self.weights: Keeper | None = None
        """Knows the weights that backward gathers again (ZeRO stage 3)."""
        self._noted: dict[int, Noted] = {}
        self._last: tuple[Recipe, tuple[Tensor, ...]] | None = None

    def note(self, results: Sequence[Tensor], function: Callable[..., Any], *inputs: Tensor | None) -> None:
        """Note that `function(*inputs)` made the results."""
        if not torch.is_grad_enabled():
            return
        recipe = Recipe(function, [None if item is None else self._hold(item) for item in inputs])
        for index, result in enumerate(results):
            address = result.untyped_storage().data_ptr()
            self._noted[address] = Noted(weakref.ref(result, partial(self._drop, address)), recipe, index)

    def restore_of(self, tensor: Tensor) -> Restore | None:
        """For a view of a living cheap result: the same view of what its recipe makes."""
        noted = self._noted.get(tensor.untyped_storage().data_ptr())
        if noted is None or noted.result() is None:
            return None
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return partial(self._restore, noted.recipe, noted.index, *place)

    def forget(self) -> None:
        """Free the result that was computed last. Call it after backward."""
        self._last = None

    def _hold(self, tensor: Tensor) -> Tensor | Restore:
        weights = None if self.weights is None else self.weights.restore_of(tensor)
        return weights or self.restore_of(tensor) or tensor.detach()

    def _drop(self, address: int, result: weakref.ref[Tensor]) -> None:
        if (noted := self._noted.get(address)) is not None and noted.result is result:
            del self._noted[address]

    def _restore(self, recipe: Recipe, index: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        if self._last is None or self._last[0] is not recipe:  # q and k, or documents, need the same results in a row
            self._last = None
            self._last = recipe, recipe.results()
        return self._last[1][index].as_strided(size, stride, offset)


CheapKind = Literal["norm", "rotated", "activated"]
EVERY_KIND: frozenset[CheapKind] = frozenset(get_args(CheapKind))


class RecomputingOps(Ops):
    """The operations, with a note of each cheap result."""

    keeps_casts = False  # the input of a product is a cheap result, or attention keeps it

    def __init__(self, kernels: KernelsName, deterministic: bool) -> None:
        super().__init__(kernels, deterministic)
        self.cheap = CheapResults()
        self.again = EVERY_KIND
        """What is noted now; the other results are kept."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed_TD: Tensor = self._from_inputs(partial(super().rms_norm, eps=eps), x_TD, weight_D)
        if "norm" in self.again:
            self.cheap.note([normed_TD], partial(self.impl.rms_norm, eps=eps), x_TD, weight_D)
        return normed_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is kept: the norm of the rounded sum has the bits of both in one."""
        if self.kernels == "fused":
            normed_TD, total_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        else:  # its twin adds first, and the norm of that sum keeps it alone
            total_TD = x_TD + residual_TD
            normed_TD = self._from_inputs(partial(super().rms_norm, eps=eps), total_TD, weight_D)
        if "norm" in self.again:
            self.cheap.note([normed_TD], partial(self.impl.rms_norm, eps=eps), total_TD, weight_D)
        return normed_TD, total_TD

    def note_gathered(self, x_TD: Tensor, x_tD: Tensor, group: ProcessGroup) -> None:
        """Backward gathers them again; every rank of the group reaches that at the same place of its graph."""
        if "norm" in self.again:
            self.cheap.note([x_TD], partial(gathered, group=group), x_tD)

    def swiglu(self, gate_up_TF: Tensor) -> Tensor:
        activated_TF: Tensor = self._from_inputs(super().swiglu, gate_up_TF)
        if "activated" in self.again:
            self.cheap.note([activated_TF], self.impl.swiglu, gate_up_TF)
        return activated_TF

    def rotate(self, q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        cos, sin, q_norm, k_norm, eps = rotation
        twin = super().rotate
        rotated: tuple[Tensor, Tensor] = self._from_inputs(
            lambda q, k, a, b: twin(q, k, Rotation(cos, sin, a, b, eps)), q_TNH, k_TKH, q_norm, k_norm
        )
        if "rotated" in self.again:
            self._note_rotated(rotated, q_TNH, k_TKH, rotation)
        return rotated

    def _note_rotated(self, rotated: tuple[Tensor, Tensor], q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> None:
        def again(q: Tensor, k: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.impl.rotate(q, k, Rotation(rotation.cos, rotation.sin, q_norm, k_norm, rotation.eps))

        self.cheap.note(rotated, again, q_TNH, k_TKH, rotation.q_norm, rotation.k_norm)

    def _from_inputs(self, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """Keep the inputs alone, as the fused kernels do; others keep what is between."""
        differs = torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in inputs)
        if self.kernels == "fused" or not differs:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
