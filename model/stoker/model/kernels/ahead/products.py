"""Products, fills and large operations that are not computed: their results have the right shape and type, any values.

Compiling ahead needs only what kernels are called with. One layer of a model of 70 billion parameters would take a CPU
minutes to multiply, and its weights, gradients and optimizer state gigabytes to write. Memory that nothing writes costs
nothing.

Entered by `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Result = Callable[[Sequence[Any], Mapping[str, Any]], Tensor]


def product(x_TD: Tensor, weight_DE: Tensor, options: Mapping[str, Any]) -> Tensor:
    dtype = options.get("out_dtype") or x_TD.dtype
    return torch.empty(*x_TD.shape[:-1], weight_DE.shape[-1], dtype=dtype, device=x_TD.device)


RESULTS: dict[str, Result] = {
    "aten::mm": lambda args, options: product(args[0], args[1], with_dtype(args, 2, options)),
    "aten::bmm": lambda args, options: product(args[0], args[1], with_dtype(args, 2, options)),
    "aten::addmm": lambda args, options: product(args[1], args[2], options),
    "aten::_scaled_mm": lambda args, options: product(args[0], args[1], with_dtype(args, 6, options)),
    "aten::_grouped_mm": lambda args, options: product(args[0], args[1], options),
    "aten::zero_": lambda args, _: args[0],
    "aten::normal_": lambda args, _: args[0],
    "aten::uniform_": lambda args, _: args[0],
}


LARGE = 1 << 20
"""Elements from which on an operation on numbers is left out."""
COMPUTED = ("aten::_unsafe_view", "aten::set_", "aten::resize_")
"""Operations on memory as such, although their schemas do not say that they are views."""
ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


def with_dtype(args: Sequence[Any], place: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with the type of the result where it is given by its place."""
    return {"out_dtype": args[place]} | dict(options) if len(args) > place else options


class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips what takes long on a CPU."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name, kwargs or {}
        if name in RESULTS:
            return options["out"] if "out" in options else RESULTS[name](args, options)
        if is_left_out(func, args, options):
            return left_out(func, args, options)
        result = func(*args, **options)
        if name in ALLOCATIONS and not result.dtype.is_floating_point:
            result.zero_()  # a token or an index that no kernel has written is still one that there is
        return result


def is_left_out(func: Any, args: Any, options: Any) -> bool:
    """Whether an operation reads or makes large tensors of numbers, and is no view, exchange or allocation."""
    schema = func._schema
    if func.is_view or not schema.name.startswith("aten::") or schema.name in (*COMPUTED, *ALLOCATIONS):
        return False
    if any(isinstance(leaf, Tensor) and is_large(leaf) for leaf in tree_leaves((args, options))):
        return True
    return schema.name == "aten::zeros" and all(is_large(one) for one in on_meta(func, args, options))


def is_large(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= LARGE


def left_out(func: Any, args: Any, options: Any) -> Any:
    """The tensor that would have been written, or empty ones like those that would have been made.

    Whole numbers that are made of numbers are computed: they may be places.
    """
    written = [place for place, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
    if written:
        name = func._schema.arguments[written[0]].name
        return args[written[0]] if written[0] < len(args) else options[name]
    made = on_meta(func, args, options)
    if not all(one.is_floating_point() for one in made):
        return func(*args, **options)
    empty = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="cpu") for one in made]
    return empty[0] if len(empty) == 1 else tuple(empty)


def on_meta(func: Any, args: Any, options: Any) -> list[Tensor]:
    """The results of an operation, without memory."""
    args, options = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, dict(options)))
    if "device" in options:
        options["device"] = torch.device("meta")
    return [leaf for leaf in tree_leaves(func(*args, **options)) if isinstance(leaf, Tensor)]
