"""How long a step of an engine takes, by what is in it: measured from counters, not configured. Pure.

`seconds = base + prompt_token * prompt tokens + decode_token * sequences that decode`. It is linear, so the sums over
any number of steps follow the same equation with `base * steps`, and counters of a poll are samples of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from stoker.operator.domain.autoscaling.load_report import LoadCounts

ENOUGH_STEPS = 20
"""Fewer steps than this tell nothing."""
ENOUGH_S = 0.05


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a step."""

    base_s: float
    prompt_token_s: float
    decode_token_s: float

    def step_s(self, prompt_tokens: float, decodes: float) -> float:
        """Seconds of one step."""
        return self.base_s + self.prompt_token_s * prompt_tokens + self.decode_token_s * decodes


_Costs = tuple[float, float, float]


@dataclass(frozen=True)
class CurveSums:
    """Sums over samples that determine the curve: they add up, so a window of them is cheap to keep.

    Each sample counts by 1 / its seconds, so that the noise of all is alike.
    """

    steps: float = 0.0
    busy_s: float = 0.0
    normal: tuple[float, ...] = (0.0,) * 9
    """Sums of products of (steps, prompt tokens, decoded tokens), row by row."""
    right: _Costs = (0.0, 0.0, 0.0)
    """Sums of products with the seconds."""

    def plus(self, counts: LoadCounts) -> CurveSums:
        """The sums with one more sample; one without a step changes nothing."""
        if not counts.steps or counts.busy_s <= 0:
            return self
        row = (float(counts.steps), float(counts.prompt_tokens), float(counts.decode_tokens))
        products = [a * b / counts.busy_s for a in row for b in row]
        return _added(self, CurveSums(row[0], counts.busy_s, tuple(products), row))


def fit_curve(parts: Iterable[CurveSums]) -> StepCurve | None:
    """The curve with non-negative costs and the least relative error; None while too few steps were seen.

    Least squares over the seven sets of costs that may differ from zero: three unknowns need no library.
    """
    sums = CurveSums()
    for part in parts:
        sums = _added(sums, part)
    if sums.steps < ENOUGH_STEPS or sums.busy_s < ENOUGH_S:
        return None
    chosen = (subset for size in (3, 2, 1) for subset in combinations(range(3), size))
    solved = (_solve(sums, subset) for subset in chosen)
    allowed = [costs for costs in solved if costs is not None and min(costs) >= 0]
    return StepCurve(*min(allowed, key=lambda costs: _error(sums, costs))) if allowed else None


def _added(one: CurveSums, other: CurveSums) -> CurveSums:
    normal = tuple(a + b for a, b in zip(one.normal, other.normal, strict=True))
    right = tuple(a + b for a, b in zip(one.right, other.right, strict=True))
    return CurveSums(one.steps + other.steps, one.busy_s + other.busy_s, normal, (right[0], right[1], right[2]))


def _solve(sums: CurveSums, chosen: Sequence[int]) -> _Costs | None:
    """Costs of the chosen unknowns, the others zero (Gauss and Jordan); None where samples do not tell them apart."""
    table = [[sums.normal[3 * i + j] for j in chosen] + [sums.right[i]] for i in chosen]
    for column, unknown in enumerate(chosen):
        pivot = max(range(column, len(chosen)), key=lambda row: abs(table[row][column]))
        table[column], table[pivot] = table[pivot], table[column]
        if abs(table[column][column]) <= 1e-9 * sums.normal[4 * unknown]:
            return None
        for row in range(len(chosen)):
            if row != column:
                factor = table[row][column] / table[column][column]
                table[row] = [a - factor * b for a, b in zip(table[row], table[column], strict=True)]
    costs = [0.0, 0.0, 0.0]
    for place, unknown in enumerate(chosen):
        costs[unknown] = table[place][-1] / table[place][place]
    return costs[0], costs[1], costs[2]


def _error(sums: CurveSums, costs: _Costs) -> float:
    """Sum of squares less a constant."""
    square = sum(costs[i] * sums.normal[3 * i + j] * costs[j] for i in range(3) for j in range(3))
    return square - 2 * sum(cost * value for cost, value in zip(costs, sums.right, strict=True))
