"""Activation checkpointing by layer: each block runs as its choice demands, whole or by halves.

Used by the forward pass. T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stoker.model.attend import Attend
from stoker.model.aux import Aux
from stoker.model.block import Block
from stoker.model.decoder import Decoder
from stoker.pod.plan.layer_choice import CHEAP, HALVES, Cheap, Half, LayerChoice
from stoker.trainer.rank.cheap_results import EVERY_KIND, CheapKind, RecomputingOps

KINDS: dict[Cheap, CheapKind] = {
    "attention norm": "norm",
    "rotated q and k": "rotated",
    "feed-forward norm": "norm",
    "activated": "activated",
}
"""Results of a plan -> the operations that make them."""
Stream = tuple[Tensor, Tensor]
"""The residual stream in two parts, [T, D] each."""


class LayersAgain:
    """The blocks of one rank, each with its choice of what backward computes again."""

    def __init__(self, decoder: Decoder, ready: Callable[[str], None], choices: Sequence[LayerChoice]) -> None:
        """`ready` is called with `blocks.N`, N the number of its layer, before the parameters of a block are used."""
        self._blocks, self._choices, self._ready = decoder.blocks, choices, ready
        self._units = [f"blocks.{layer}" for layer in decoder.layers]
        self._ops = decoder.ops if isinstance(decoder.ops, RecomputingOps) else None
        if self._ops is None and any(choice.cheap for choice in choices):
            raise ValueError("the model's operations cannot give cheap results back: it needs RecomputingOps")

    def block(
        self, index: int, x_TD: Tensor, update_TD: Tensor | None, positions_T: Tensor, attend: Attend, aux: Aux | None
    ) -> Stream:
        """Run a block; see `Block.forward`."""
        choice = self._choices[index]
        if len(choice.halves) == len(HALVES):
            return _again(self._whole, index, x_TD, update_TD, positions_T, attend, aux)
        first: tuple[Any, ...] = self._attended, index, x_TD, update_TD, positions_T, attend
        stream: Stream = _again(*first) if "attention" in choice.halves else first[0](*first[1:])
        second: tuple[Any, ...] = self._fed, index, *stream, aux
        fed: Stream = _again(*second) if "feed-forward" in choice.halves else second[0](*second[1:])
        return fed

    def leave_blocks(self) -> None:
        """Note all cheap results from here on: those of the last norm."""
        if self._ops is not None:
            self._ops.again = EVERY_KIND

    def _whole(
        self, index: int, x_TD: Tensor, update_TD: Tensor | None, positions_T: Tensor, attend: Attend, aux: Aux | None
    ) -> Stream:
        return self._fed(index, *self._attended(index, x_TD, update_TD, positions_T, attend), aux)

    def _attended(
        self, index: int, x_TD: Tensor, update_TD: Tensor | None, positions_T: Tensor, attend: Attend
    ) -> Stream:
        stream: Stream = self._enter(index, "attention").attended(x_TD, update_TD, positions_T, attend)
        return stream

    def _fed(self, index: int, x_TD: Tensor, attended_TD: Tensor, aux: Aux | None) -> Stream:
        stream: Stream = self._enter(index, "feed-forward").fed(x_TD, attended_TD, aux)
        return stream

    def _enter(self, index: int, half: Half) -> Block:
        """Make the parameters ready, also when backward computes the half again, and note what its choice demands."""
        self._ready(self._units[index])
        if self._ops is not None:
            noted = [KINDS[name] for name in CHEAP[half] if name in self._choices[index].cheap]
            self._ops.again = frozenset(noted)
        block = self._blocks[index]
        assert isinstance(block, Block)
        return block


def _again(function: Callable[..., Stream], *inputs: Any) -> Stream:
    """Keep the inputs alone. Nothing in a block is random: no generator state is kept for the second pass."""
    stream: Stream = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return stream
