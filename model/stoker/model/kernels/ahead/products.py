"""Products of cuBLAS and fills that are not computed: their results have the right shape and type, and any values.

Compiling ahead needs only what kernels are called with. One layer of a model of 70 billion parameters would take a CPU
minutes to multiply, and its weights gigabytes to write.

Entered by `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


def with_dtype(args: Sequence[Any], place: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with the type of the result where it is given by its place."""
    return {"out_dtype": args[place]} | dict(options) if len(args) > place else options


class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips what takes long on a CPU."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name, kwargs or {}
        if name in RESULTS and "out" not in options:
            return RESULTS[name](args, options)
        result = func(*args, **options)
        if name in ALLOCATIONS and not result.dtype.is_floating_point:
            result.zero_()  # a token or an index that no kernel has written is still one that there is
        return result
