"""Low-rank adapters (LoRA, arXiv 2106.09685): W x + alpha / rank * B (A x) with a frozen W.

An adapter belongs to one Hugging Face tensor, also where that tensor is a section of a fused parameter, or the matrix
of one expert. Over a tensor-parallel group A or B is cut as the tensor is; the other one is whole on every rank, and
its gradient there is a part of the sum. T tokens, D input size, E output size, R rank of the adapter.

`adapt` adds adapters to a decoder once, before its parameters get memory; the layers of `parallel` apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.model.kernels.ops import Ops
from stoker.model.parameter import Part

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of a block that can have an adapter. The last word of their Hugging Face name is the same; experts of
mixtral alone have other names there (`w1`, `w3`, `w2`)."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Size and places of the adapters of a model. Raises ValueError for targets that no model has."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if unknown := [name for name in self.targets if name not in TARGETS]:
            raise ValueError(f"targets: unknown: {', '.join(unknown)}; allowed: {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / self.rank

    def adapts(self, hf_name: str) -> bool:
        """Whether the tensor `model.layers.3.self_attn.q_proj` (without `.weight`) gets an adapter."""
        return hf_name.rsplit(".", 1)[-1] in self.targets


@dataclass(frozen=True, kw_only=True)
class AdaptedTensor:
    """This rank's box of the tensor W_ED that an adapter belongs to."""

    hf_name: str
    """Without `.weight`."""
    shape: tuple[int, int]
    """E and D of the whole tensor."""
    start: tuple[int, int]
    size: tuple[int, int]
    shard_dim: int
    """Dim that is cut over the tensor-parallel group."""


class LoraAdapter(nn.Module):
    """A and B of one tensor, or of the same tensor of several experts: their rows expert by expert."""

    def __init__(
        self, settings: LoraSettings, tensor: AdaptedTensor, ops: Ops, like: Tensor, *experts: AdaptedTensor
    ) -> None:
        """`like`: a tensor of the dtype and on the device that the parameters get. `experts`: further ones."""
        super().__init__()
        self.ops, self.scale, self.tensors = ops, settings.scale, (tensor, *experts)
        self.rank, count, (rows, columns) = settings.rank, 1 + len(experts), tensor.size
        self.a = nn.Parameter(torch.empty(count * self.rank, columns, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.empty(count * rows, self.rank, dtype=like.dtype, device=like.device))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return what is added to the product with the frozen weight, y_TE."""
        return self.ops.linear(self.ops.linear(x_TD, self.a) * self.scale, self.b)

    def of_experts(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the same for rows sorted by expert, y_SE."""
        inner_SR = self.ops.grouped_linear(x_SD, self.a, ends_E)
        return self.ops.grouped_linear(inner_SR * self.scale, self.b, ends_E)

    def parts(self, prefix: str) -> Iterator[Part]:
        """Yield A and B under the names that the PEFT library gives them, without its own prefix."""
        for place, tensor in enumerate(self.tensors):
            (rows, columns), rank, size = tensor.shape, self.rank, tensor.size[0]
            cut_a, cut_b = (None, 0) if tensor.shard_dim == 0 else (1, None)
            for letter, held, height, shape, start, cut in (
                ("A", self.a, rank, (rank, columns), (0, tensor.start[1]), cut_a),
                ("B", self.b, size, (rows, rank), (tensor.start[0], 0), cut_b),
            ):
                yield Part(
                    f"{tensor.hf_name}.lora_{letter}.weight",
                    f"{prefix}.{letter.lower()}",
                    held,
                    place * height,
                    (place + 1) * height,
                    shape,
                    start,
                    cut,
                    is_adapter=True,
                )


def adapt(decoder: nn.Module, settings: LoraSettings) -> None:
    """Freeze all parameters of a decoder and add adapters to the projections that the settings name."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    for module in list(decoder.modules()):
        add: Callable[[LoraSettings], None] | None = getattr(module, "add_adapters", None)
        if add is not None:
            add(settings)


def adapter_parts(decoder: nn.Module) -> Iterator[Part]:
    """Yield A and B of every adapter of which this rank holds a box, in the order of the forward pass."""
    for name, module in decoder.named_modules():
        if isinstance(module, LoraAdapter):
            yield from module.parts(name)
