"""Proof of exact cover: every element of every tensor lies in exactly one piece, every byte of a data file too.

The rectangles of a tensor's pieces cover it exactly if and only if their indicator functions add up to 1 everywhere.
Give each coordinate `x` of each dim `k` a random number `P_k(x)` modulo a prime. A rectangle weighs `prod_k (P_k(end_k)
- P_k(start_k))`; the weights of an exact cover add up to that of the whole tensor, and of anything else only by a
chance of `dims / prime` (Schwartz-Zippel: the difference is a polynomial that is not zero). With a prime of 127 bits
that is below 1e-37.

The proof takes one pass over the pieces, whatever their shapes. Once the sums of a tensor differ, halving it finds a
rectangle at fault: the weights show which half is wrong. One budget for the whole manifest bounds that search.

Pure, apart from the random numbers. Called before a commit (`store`), when a checkpoint is opened or verified, and by
`diff`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from stoker.checkpoint.box import Box, slabs
from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.manifest import Manifest, Piece, TensorInfo

_PRIME = (1 << 127) - 1
SEARCHED_RECTANGLES = 1_000_000
"""Rectangles that the searches of one manifest may look at. Beyond it a message only says that there is a fault."""


class SearchBudget:
    """Rectangles that searches for faults may still look at."""

    def __init__(self, rectangles: int = SEARCHED_RECTANGLES) -> None:
        self._left = rectangles

    def take(self, rectangles: int) -> bool:
        """Use some up; False when so many are not left."""
        if rectangles > self._left:
            return False
        self._left -= rectangles
        return True


def cover_problems(manifest: Manifest) -> list[str]:
    """Return a message for each data file's gaps and overlaps, and one for each tensor at fault; empty when sound."""
    problems = _file_problems(manifest.pieces)
    by_tensor = pieces_by_tensor(manifest)
    budget = SearchBudget()
    for name, tensor in manifest.tensors.items():
        problem = tensor_problem(tensor, by_tensor.get(name, ()), budget)
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


def tensor_problem(tensor: TensorInfo, pieces: Sequence[Piece], budget: SearchBudget | None = None) -> str | None:
    """Return what is wrong with the cover of one tensor, or None. `budget` bounds the search for the place."""
    boxes = [box for piece in pieces for box in slabs(piece.box, piece.flat_start, piece.flat_end)]
    whole = Box.whole(tensor.shape)
    if covers_exactly(whole, boxes):
        return None
    return f"tensor {tensor.name} {list(tensor.shape)}: {_explain(whole, boxes, budget or SearchBudget())}"


def covers_exactly(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether each element of `whole` lies in exactly one of the boxes (all inside `whole`)."""
    if whole.volume == 0:
        return not any(box.volume for box in boxes)
    return _adds_up(whole, boxes, [_RandomWeights() for _ in whole.size])


def _adds_up(whole: Box, boxes: Iterable[Box], weights: Sequence[_RandomWeights]) -> bool:
    return sum(_weight(box, weights) for box in boxes) % _PRIME == _weight(whole, weights)


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


def _explain(whole: Box, boxes: Sequence[Box], budget: SearchBudget) -> str:
    found = _find_fault(whole, boxes, budget)
    if found is None:
        covered = sum(box.volume for box in boxes)
        return f"the pieces hold {covered} elements of {whole.volume}, with a gap or an overlap"
    place, holders = found
    if not holders:
        return f"no piece holds {place}"
    return f"pieces overlap at {holders[0].intersect(holders[1])}"


def _find_fault(whole: Box, boxes: Sequence[Box], budget: SearchBudget) -> tuple[Box, list[Box]] | None:
    """Return a rectangle that not exactly one box holds, with the boxes that hold it; None when the budget ends.

    No box begins or ends inside that rectangle. Each step keeps a half whose sums differ, so the fault is in it.
    """
    weights = [_RandomWeights() for _ in whole.size]
    place = whole
    held = [(box, box) for box in boxes]  # the part inside of `place`, and the whole box
    while budget.take(max(len(held), 1)):
        halves = _halve(place, [part for part, _ in held])
        if halves is None:
            return place, [box for _, box in held]
        lower, upper = halves
        inside = _clip(held, lower)
        if _adds_up(lower, (part for part, _ in inside), weights):
            place, held = upper, _clip(held, upper)
        else:
            place, held = lower, inside
    return None


def _clip(held: Iterable[tuple[Box, Box]], place: Box) -> list[tuple[Box, Box]]:
    clipped = ((part.intersect(place), box) for part, box in held)
    return [(part, box) for part, box in clipped if part is not None]


def _halve(place: Box, parts: Sequence[Box]) -> tuple[Box, Box] | None:
    """Cut `place` at the middle one of the coordinates where parts begin or end, in the dim with the most of them."""
    inner = [
        {edge for part in parts for edge in (part.start[dim], part.end[dim])} - {place.start[dim], place.end[dim]}
        for dim in range(len(place.size))
    ]
    dim = max(range(len(inner)), key=lambda dim: len(inner[dim]), default=None)
    if dim is None or not inner[dim]:
        return None
    cut = sorted(inner[dim])[len(inner[dim]) // 2]
    start, end = place.start, place.end
    middle_end, middle_start = (*end[:dim], cut, *end[dim + 1 :]), (*start[:dim], cut, *start[dim + 1 :])
    return _between(start, middle_end), _between(middle_start, end)


def _between(start: tuple[int, ...], end: tuple[int, ...]) -> Box:
    return Box(start, tuple(last - first for first, last in zip(start, end, strict=True)))


def _file_problems(pieces: Sequence[Piece]) -> list[str]:
    """Return a message for each piece that does not begin where the one before it in its file ends."""
    problems = []
    expected: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        position = expected.get(piece.file, 0)
        if piece.offset != position:
            problems.append(f"{piece}: the piece before it ends at {position}")
        expected[piece.file] = max(position, piece.offset + piece.bytes)
    return problems
