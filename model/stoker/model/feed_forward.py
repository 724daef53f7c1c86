"""The dense feed-forward part of a block: gate and up, SwiGLU, down.

Its twin with experts is `experts.Experts`; a block holds one of the two. T tokens, t tokens of this rank
(sequence parallel), D hidden, F width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.expert_peers import ExpertCut
from stoker.model.kernels.ops import Ops
from stoker.model.parallel import ColumnParallelLinear, Norm, RowParallelLinear
from stoker.model.parameter import Part, Section


class DenseFeedForward(nn.Module):
    """The feed-forward part of layer `layer`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        expert_group: ProcessGroup | None = None,  # noqa: ARG002  for experts
        expert_runs: int = 1,  # noqa: ARG002  as well
        expert_cut: ExpertCut | None = None,  # noqa: ARG002  as well
        experts_on_device: int | None = None,  # noqa: ARG002  as well
    ) -> None:
        super().__init__()
        name, hidden, width = f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size
        sections = [Section(f"{name}.gate_proj", width), Section(f"{name}.up_proj", width)]
        made: Any = {"dtype": dtype, "device": device, "group": group, "sequence_parallel": sequence_parallel}
        self.gate_up_proj = ColumnParallelLinear(sections, hidden, ops, bias=False, **made)
        self.down_proj = RowParallelLinear(Section(f"{name}.down_proj", hidden), width, ops, bias=False, **made)

    def forward(
        self,
        norm: Norm,
        x_tD: Tensor,
        attended_tD: Tensor,
        aux: Aux | None = None,  # noqa: ARG002  for experts
        slots_T: Tensor | None = None,  # noqa: ARG002  as well
    ) -> tuple[Tensor, Tensor]:
        """Return (feed_forward(norm(x + attended)), x + attended)."""
        activated_TF, x_tD = self.gate_up_proj.swiglu_of_norm(norm, x_tD, attended_tD)
        return self.down_proj(activated_TF), x_tD

    def parts(self, prefix: str) -> Iterator[Part]:
        yield from self.gate_up_proj.parts(f"{prefix}.gate_up_proj")
        yield from self.down_proj.parts(f"{prefix}.down_proj")
