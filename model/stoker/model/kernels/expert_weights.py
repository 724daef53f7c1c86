"""The parameters of a layer's experts as kernels take them.

E experts of the layer, e experts that are held here, K experts of a token, D hidden, F width of an expert (this rank's
columns of it).

Made by `experts.Experts`, read by `ExpertOps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from stoker.model.hosted_experts import HostedExperts


class ExpertWeights(NamedTuple):
    """Router and experts of one layer, and how the router chooses."""

    router: Tensor
    """[E, D]"""
    gate_up: Tensor
    """[e * 2F, D]: rows of gate, then of up, expert by expert."""
    down: Tensor
    """[e * D, F]"""
    num_choices: int
    """K."""
    normalise: bool
    """Whether the weights of a token's experts add up to one."""
    first: int = 0
    """Number of the first expert that is held here. A token's choices of others add nothing to its sum."""

    hosted: HostedExperts | None = None
    """Slots on the device, where gate, up and down are in host memory."""

    @property
    def num_experts(self) -> int:
        return self.router.shape[0]

    @property
    def num_own(self) -> int:
        """e."""
        return self.down.shape[0] // self.hidden

    @property
    def hidden(self) -> int:
        return self.router.shape[1]

    @property
    def width(self) -> int:
        return self.down.shape[1]
