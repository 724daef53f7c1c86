"""Element types of the format: their names, their sizes, and the numpy type that carries their bits.

numpy has no bfloat16 and no float8, so those travel as unsigned integers of the same size; `to_float32` gives their
values.

Pure conversions, called wherever elements become bytes or numbers: writer, reader, entries, diff and export.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.checkpoint.errors import CheckpointError

Array = npt.NDArray[Any]

NUMPY: MappingProxyType[str, np.dtype[Any]] = MappingProxyType(
    {
        "float64": np.dtype("<f8"),
        "float32": np.dtype("<f4"),
        "float16": np.dtype("<f2"),
        "bfloat16": np.dtype("<u2"),
        "float8_e4m3fn": np.dtype("u1"),
        "float8_e5m2": np.dtype("u1"),
        "int64": np.dtype("<i8"),
        "int32": np.dtype("<i4"),
        "int16": np.dtype("<i2"),
        "int8": np.dtype("i1"),
        "uint64": np.dtype("<u8"),
        "uint32": np.dtype("<u4"),
        "uint16": np.dtype("<u2"),
        "uint8": np.dtype("u1"),
        "bool": np.dtype("u1"),
    }
)
"""Name in a manifest -> numpy type with the same bits (little-endian)."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return carrier(dtype).itemsize


def carrier(dtype: str) -> np.dtype[Any]:
    """The numpy type that carries the bits of `dtype`."""
    if dtype not in NUMPY:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(NUMPY)}")
    return NUMPY[dtype]


def to_float32(bits: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Values of float32, bfloat16 or float16 elements as float32 (exact)."""
    if dtype == "float32":
        return bits
    if dtype == "float16":
        return bits.astype(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    raise CheckpointError(f"dtype {dtype} has no float32 values; float32, bfloat16 and float16 have")


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Round float32 values to `dtype` (nearest, ties to even) and return its carrier bits.

    Raises:
        CheckpointError: a finite value is too large for `dtype`.
    """
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded: Array = values.astype(np.float16)
        overflowed = bool(np.any(np.isinf(rounded) & np.isfinite(values)))
    elif dtype == "bfloat16":
        rounded = _to_bfloat16(values)
        overflowed = bool(np.any(((rounded & 0x7FFF) == 0x7F80) & np.isfinite(values)))
    else:
        raise CheckpointError(f"cannot convert to {dtype}; float32, bfloat16 and float16 are possible")
    if overflowed:
        raise CheckpointError(f"a value is too large for {dtype}")
    return rounded


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
