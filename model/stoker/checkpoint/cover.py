"""The proof of exact cover: every element of every tensor lies in exactly one piece, every byte of every data file too.

The rectangles of a tensor's pieces cover it exactly if and only if their indicator functions add up to 1 everywhere. Give each coordinate
`x` of each dim `k` a random number `P_k(x)` modulo a prime. A rectangle weighs `prod_k (P_k(end_k) - P_k(start_k))`; the weights of an exact cover
add up to that of the whole tensor, and of anything else only by a chance of `dims / prime` (Schwartz-Zippel: the difference is a polynomial that
is not zero). With a prime of 127 bits that is below 1e-37. It takes one pass over the pieces, whatever their shapes; a search for the culprit runs
only once the sums differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import combinations

from stoker.checkpoint.box import Box, slabs
from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.manifest import Manifest, Piece, TensorInfo

_PRIME = (1 << 127) - 1
_MAX_SEARCHED = 2000
"""Rectangles among which a culprit is searched pair by pair; with more, the message only says that there is one."""


def cover_problems(manifest: Manifest) -> list[str]:
    """Every gap and overlap, in tensors and in data files; empty for a sound manifest."""
    problems = _file_problems(manifest.pieces)
    by_tensor = pieces_by_tensor(manifest)
    for name, tensor in manifest.tensors.items():
        problem = tensor_problem(tensor, by_tensor.get(name, ()))
        if problem is not None:
            problems.append(problem)
    return problems


def check_tensor(tensor: TensorInfo, pieces: Sequence[Piece]) -> None:
    """Refuse a tensor whose pieces do not cover it exactly.

    Raises:
        CheckpointCorrupt: with the first gap or overlap.
    """
    problem = tensor_problem(tensor, pieces)
    if problem is not None:
        raise CheckpointCorrupt(problem)


def pieces_by_tensor(manifest: Manifest) -> dict[str, list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in manifest.pieces:
        groups.setdefault(piece.tensor, []).append(piece)
    return groups


def tensor_problem(tensor: TensorInfo, pieces: Sequence[Piece]) -> str | None:
    """What is wrong with the cover of one tensor, or None."""
    boxes = [box for piece in pieces for box in slabs(piece.box, piece.flat_start, piece.flat_end)]
    whole = Box.whole(tensor.shape)
    if covers_exactly(whole, boxes):
        return None
    return f"tensor {tensor.name} {list(tensor.shape)}: {_explain(whole, boxes)}"


def covers_exactly(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether each element of `whole` lies in exactly one of the boxes (all inside `whole`)."""
    if whole.volume == 0:
        return not any(box.volume for box in boxes)
    weights = [_RandomWeights() for _ in whole.size]
    total = sum(_weight(box, weights) for box in boxes)
    return total % _PRIME == _weight(whole, weights)


class _RandomWeights(dict[int, int]):
    """One random number for each coordinate, drawn when it is first asked for."""

    def __missing__(self, coordinate: int) -> int:
        self[coordinate] = secrets.randbelow(_PRIME)
        return self[coordinate]


def _weight(box: Box, weights: Sequence[_RandomWeights]) -> int:
    product = 1
    for start, extent, weight in zip(box.start, box.size, weights, strict=True):
        product = product * (weight[start + extent] - weight[start]) % _PRIME
    return product


def _explain(whole: Box, boxes: Sequence[Box]) -> str:
    covered = sum(box.volume for box in boxes)
    if len(boxes) <= _MAX_SEARCHED:
        for first, second in combinations(boxes, 2):
            shared = first.intersect(second)
            if shared is not None:
                return f"pieces overlap at {shared}"
        gap = _first_gap(whole, boxes)
        if gap is not None:
            return f"no piece holds {gap}"
    return f"the pieces hold {covered} elements of {whole.volume}, with a gap or an overlap"


def _first_gap(whole: Box, boxes: Sequence[Box]) -> Box | None:
    """Some rectangle that no box touches: what remains of `whole` when each box is cut away in turn."""
    remaining = [whole]
    for box in boxes:
        remaining = [rest for left in remaining for rest in _without(left, box)]
        if len(remaining) > _MAX_SEARCHED:
            return None
    return remaining[0] if remaining else None


def _without(left: Box, cut: Box) -> list[Box]:
    shared = left.intersect(cut)
    if shared is None:
        return [left]
    rests = []
    start, end = list(left.start), list(left.end)
    for dim, (low, high) in enumerate(zip(shared.start, shared.end, strict=True)):
        for first, last in ((start[dim], low), (high, end[dim])):
            if first < last:
                corner = (*start[:dim], first, *start[dim + 1 :])
                limit = (*end[:dim], last, *end[dim + 1 :])
                rests.append(Box(corner, tuple(b - a for a, b in zip(corner, limit, strict=True))))
        start[dim], end[dim] = low, high
    return rests


def _file_problems(pieces: Sequence[Piece]) -> list[str]:
    """Data files hold their pieces one after the other, without a byte between; `pieces` are ordered by file and offset."""
    problems = []
    expected: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        position = expected.get(piece.file, 0)
        if piece.offset != position:
            problems.append(f"{piece}: the piece before it ends at {position}")
        expected[piece.file] = max(position, piece.offset + piece.bytes)
    return problems
