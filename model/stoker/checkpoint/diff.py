"""Comparison of the values of two checkpoints, whatever layouts wrote them.

Reads both piece by piece, in bounded memory.

Read-only. Called by the command `diff` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stoker.checkpoint.cover import pieces_by_tensor
from stoker.checkpoint.dtype import Array, to_float32
from stoker.checkpoint.manifest import Piece
from stoker.checkpoint.reader import CheckpointReader

Kind = Literal["only in first", "only in second", "shape", "dtype", "values", "file"]
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Difference:
    """One tensor or file that differs. Counts and sizes only for `values`."""

    name: str
    kind: Kind
    detail: str = ""
    elements: int = 0
    """Elements whose bits differ."""
    max_abs: float | None = None
    """Largest absolute difference; None for types without float32 values, NaN when one side is NaN."""

    def as_json(self) -> dict[str, Any]:
        finite = self.max_abs if self.max_abs is not None and np.isfinite(self.max_abs) else None
        return {
            "name": self.name,
            "kind": self.kind,
            "detail": self.detail,
            "elements": self.elements,
            "max_abs": finite,
        }


def diff(
    first: CheckpointReader, second: CheckpointReader, *, prefix: str = "", tolerance: float = 0.0
) -> list[Difference]:
    """Return the tensors (of that name prefix) and files that differ, by name; empty when both are equal.

    With a `tolerance` float tensors differ only where some element is further apart; else every bit counts.

    Raises:
        CheckpointCorrupt: one of the two is damaged.
    """
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    pieces = pieces_by_tensor(first.manifest)
    differences = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name.startswith(prefix):
            found = _compare(name, first, second, pieces.get(name, []), tolerance)
            differences += [found] if found else []
    return differences + ([] if prefix else _file_differences(first, second))


def _compare(
    name: str, first: CheckpointReader, second: CheckpointReader, pieces: list[Piece], tolerance: float
) -> Difference | None:
    ours, theirs = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
    if ours is None or theirs is None:
        return Difference(name, "only in second" if ours is None else "only in first")
    if ours.shape != theirs.shape:
        return Difference(name, "shape", f"{list(ours.shape)} and {list(theirs.shape)}")
    if ours.dtype != theirs.dtype:
        return Difference(name, "dtype", f"{ours.dtype} and {theirs.dtype}")
    return _compare_values(name, first, second, pieces, tolerance)


def _compare_values(
    name: str, first: CheckpointReader, second: CheckpointReader, pieces: list[Piece], tolerance: float
) -> Difference | None:
    elements, largest = 0, 0.0
    first.check_cover(name)
    for piece in pieces:
        left = first.read_piece(piece)
        right = second.read(name, piece.box, (piece.flat_start, piece.flat_end))
        unequal = _bits(left) != _bits(right)
        count = int(np.count_nonzero(unequal))
        if count:
            elements += count
            largest = _larger(largest, _max_abs(left[unequal], right[unequal], piece.dtype))
    has_values = first.manifest.tensors[name].dtype in _FLOATS
    if not elements or (has_values and largest <= tolerance and tolerance > 0):
        return None
    return Difference(name, "values", "", elements, largest if has_values else None)


def _bits(values: Array) -> Array:
    """Return the same memory as unsigned integers: NaN equals NaN, and -0 is not 0."""
    return values.view(np.dtype(f"u{values.itemsize}"))


def _max_abs(left: Array, right: Array, dtype: str) -> float:
    if dtype not in _FLOATS:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(to_float32(left, dtype).astype(np.float64) - to_float32(right, dtype).astype(np.float64))
    return float(np.max(apart))


def _larger(first: float, second: float) -> float:
    return first if np.isnan(first) or first >= second else second


def _file_differences(first: CheckpointReader, second: CheckpointReader) -> list[Difference]:
    ours = {entry.name: entry.blake3 for entry in first.manifest.files}
    theirs = {entry.name: entry.blake3 for entry in second.manifest.files}
    differences = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            differences.append(Difference(name, "only in second" if name not in ours else "only in first", "file"))
        elif ours[name] != theirs[name]:
            differences.append(Difference(name, "file", "contents differ"))
    return differences
