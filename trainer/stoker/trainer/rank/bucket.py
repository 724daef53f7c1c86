"""Flat buckets: the parameters of one block side by side in one buffer, and the table of their positions.

A bucket is layout only. `zero.py` communicates and updates.

Made by `build`; the buffers' contents change in `zero`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stoker.trainer.rank.fp8_weights import release_fp8, renew_fp8

LINE = 1024
"""Elements. Shards and the region with weight decay begin and end at multiples of it.

Every shard is then whole rows of this length: kernels get no ragged tails (they may round differently), and partial
sums do not depend on the number of shards.
"""
EVERY_UNIT = ""
"""Unit of a bucket that every part of the model uses."""
ADAPTERS = "adapters"
"""Name of the bucket of all adapters that are not `replicated`: they are few, and have no unit of their own."""
Reduction = Literal["dense", "replicated", "expert"]
"""The ranks over which the gradient of a parameter is summed.

`dense`: all ranks that hold the same part of it. `replicated`: those and the ranks of `tensor`, each of which has the
whole parameter and a part of its gradient. `expert`: the ranks that hold the same experts.
"""
ALIGN = 64
"""Elements; the alignment of parameters.

Each one begins at a multiple of it, like an allocation of its own: kernels may choose another path for odd
addresses.
"""

Decays = Callable[[nn.Parameter], bool]
"""Whether weight decay applies to a parameter."""


def decays_matrices(parameter: nn.Parameter) -> bool:
    """The usual rule: matrices decay, norms and biases do not."""
    return parameter.ndim > 1


@dataclass(frozen=True)
class Range:
    """Position of one parameter in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool
    """Weight decay applies."""

    @property
    def numel(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class BucketPlan:
    """Layout of one bucket for `shards` shards: the decayed parameters first, then the others."""

    ranges: tuple[Range, ...]
    decay_end: int
    """Elements [0, decay_end) decay; a multiple of LINE."""
    used: int
    """Elements up to the last line with a parameter: the part of the layout that does not depend on `shards`."""
    numel: int
    """Size of the buffer: `used` padded to a multiple of `shards * replicas * LINE`."""
    shards: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard(self, index: int) -> tuple[int, int]:
        """First and last element of a shard: contiguous and equal."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def gaps(self) -> Iterator[slice]:
        """Yield the runs of elements that belong to no parameter."""
        begin = 0
        for item in sorted(self.ranges, key=lambda item: item.offset):
            if item.offset > begin:
                yield slice(begin, item.offset)
            begin = item.end
        if self.numel > begin:
            yield slice(begin, self.numel)


def plan_bucket(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    shards: int,
    replicas: int = 1,
    decayed_names: Collection[str] | None = None,
) -> BucketPlan:
    """Lay out named shapes. Offsets do not depend on `shards`.

    `replicas`: ranks that hold the same shard; each shard is cut evenly over them. `decayed_names`: the parameters that
    decay; None: all matrices.
    """
    if decayed_names is None:
        decayed_names = {name for name, shape in parameters if len(shape) > 1}
    decayed = [(name, shape) for name, shape in parameters if name in decayed_names]
    others = [(name, shape) for name, shape in parameters if name not in decayed_names]
    ranges: list[Range] = []
    decay_end = _round_up(_place(decayed, True, 0, ranges), LINE)
    used = _round_up(_place(others, False, decay_end, ranges), LINE)
    unit = shards * replicas * LINE
    return BucketPlan(tuple(ranges), decay_end, used, max(_round_up(used, unit), unit), shards)


def _place(parameters: Sequence[tuple[str, tuple[int, ...]]], decay: bool, offset: int, ranges: list[Range]) -> int:
    for name, shape in parameters:
        ranges.append(Range(name, shape, offset, decay))
        offset = _round_up(ranges[-1].end, ALIGN)
    return offset


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


class Bucket:
    """One unit's parameters as views of one flat buffer in the compute dtype."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        shards: int,
        device: torch.device | None = None,
        *,
        replicas: int = 1,
        unit: str | None = None,
        reduction: Reduction = "dense",
        decays: Decays = decays_matrices,
    ) -> None:
        """`device`: where parameters on the meta device get their memory.

        `unit`: the part of the model that waits for this bucket; `EVERY_UNIT` for a bucket that all parts use.

        Frozen parameters (without gradient) have buckets of their own, which have no gradient and no optimizer state.
        """
        self.name = name
        self.unit = name if unit is None else unit
        self.reduction: Reduction = reduction
        """The ranks that sum its gradient."""
        self.stage = 0
        """The pipeline stage that its parameters belong to: micro-batches pass each stage at another time."""
        self.is_late = False
        """Some of its gradients arrive after the backward pass of their micro-batch (a backward pass in two parts)."""
        self.plan = plan_bucket(
            [(name, tuple(parameter.shape)) for name, parameter in parameters],
            shards,
            replicas,
            {name for name, parameter in parameters if decays(parameter)},
        )
        by_name = dict(parameters)
        self.parameters = [by_name[item.name] for item in self.plan.ranges]
        """The parameters in the order of `plan.ranges`."""
        self.num_trainable = sum(parameter.requires_grad for parameter in self.parameters)
        """Number of parameters that get a gradient: all, or none of a bucket of frozen ones."""
        self.holds_adapters = False
        self.device = device or self.parameters[0].device
        self.flat = torch.empty(0)
        """The memory of the parameters; empty while they are released."""
        self.dtype = self.parameters[0].dtype

    @property
    def is_empty(self) -> bool:
        """The parameters are on the meta device: they have shapes and no values."""
        return self.parameters[0].is_meta

    def materialise(self) -> Tensor:
        """Give parameters of the meta device fp32 memory, all zero, and return the buffer.

        The parameter objects stay the same.
        """
        flat = torch.zeros(self.plan.numel, dtype=torch.float32, device=self.device)
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            torch.utils.swap_tensors(parameter, nn.Parameter(view, requires_grad=parameter.requires_grad))  # type: ignore[no-untyped-call]
        return flat

    def master_copy(self) -> Tensor:
        """The parameters' values as one fp32 buffer (padding is zero)."""
        flat = torch.zeros(self.plan.numel, dtype=torch.float32, device=self.device)
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return flat

    def adopt(self, flat: Tensor) -> None:
        """Make the parameters views of `flat`, which may have another dtype than they have."""
        self.flat, self.dtype = flat, flat.dtype
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            parameter.data = view

    def release(self, dtype: torch.dtype | None = None) -> None:
        """Take the memory away from the parameters: until the next `adopt` they have shapes, and NaN as values.

        `dtype`: of the memory that they will get, if it is not the last one's.
        """
        release_fp8(self.parameters)
        self.dtype = dtype or self.dtype
        self.flat = torch.empty(0, dtype=self.dtype, device=self.device)
        nothing = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        for item, parameter in zip(self.plan.ranges, self.parameters, strict=True):
            parameter.data = nothing.expand(item.shape)

    def renew(self) -> None:
        """Note that the parameters' values have changed: what was made of them is out of date."""
        renew_fp8(self.parameters)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """One view per parameter of a buffer of `plan.numel` elements."""
        for item in self.plan.ranges:
            yield flat[item.offset : item.end].view(item.shape)


class Cut(NamedTuple):
    """The number of shards of a bucket's state, and of the ranks that hold the same shard."""

    shards: int
    replicas: int = 1


ONE_RANK: Mapping[Reduction, Cut] = {"dense": Cut(1), "replicated": Cut(1), "expert": Cut(1)}
NO_KINDS: Mapping[int, Reduction] = {}


def make_buckets(
    units: Sequence[tuple[str, nn.Module]],
    rest: nn.Module,
    cuts: Mapping[Reduction, Cut] = ONE_RANK,
    device: torch.device | None = None,
    reductions: Mapping[int, Reduction] = NO_KINDS,
    decays: Decays = decays_matrices,
    adapters: Collection[int] = (),
) -> list[Bucket]:
    """One bucket per unit, after a bucket `root` with every other parameter of `rest`.

    A tied parameter appears once, under its first name. `reductions`: by id, the parameters that are not `dense`.
    Experts of a unit have a bucket of their own, `replicated` parameters are few and share one over all units, and so
    do `adapters` (ids). Frozen parameters never share a bucket with others.
    """
    in_units = {id(parameter) for _, unit in units for parameter in unit.parameters()}
    root = [(name, parameter) for name, parameter in rest.named_parameters() if id(parameter) not in in_units]
    prefixes = [(name, [(f"{name}.{key}", value) for key, value in unit.named_parameters()]) for name, unit in units]
    split: dict[BucketKey, list[tuple[str, nn.Parameter]]] = {}
    for unit, parameters in [("root", root), *prefixes]:
        for name, parameter in parameters:
            key = _bucket_key(unit, parameter, reductions.get(id(parameter), "dense"), id(parameter) in adapters)
            split.setdefault(key, []).append((name, parameter))
    buckets = []
    for key in sorted(split, key=lambda key: key.unit == EVERY_UNIT):  # what all units share comes last
        cut = cuts[key.reduction]
        made: Any = {"replicas": cut.replicas, "unit": key.unit, "reduction": key.reduction, "decays": decays}
        buckets.append(Bucket(key.name, split[key], cut.shards, device, **made))
        buckets[-1].holds_adapters = key.holds_adapters
    return buckets


class BucketKey(NamedTuple):
    """What the parameters of one bucket have in common."""

    name: str
    unit: str
    reduction: Reduction
    holds_adapters: bool


def _bucket_key(unit: str, parameter: nn.Parameter, reduction: Reduction, is_adapter: bool) -> BucketKey:
    frozen = "" if parameter.requires_grad else ".frozen"
    if reduction == "replicated":
        name = f"{ADAPTERS}.replicated" if is_adapter else f"replicated{frozen}"
        return BucketKey(name, EVERY_UNIT, reduction, is_adapter)
    if is_adapter:
        name = f"{ADAPTERS}.experts" if reduction == "expert" else ADAPTERS
        return BucketKey(name, EVERY_UNIT, reduction, holds_adapters=True)
    name = f"{unit}.experts" if reduction == "expert" else unit
    return BucketKey(name + frozen, unit, reduction, holds_adapters=False)
