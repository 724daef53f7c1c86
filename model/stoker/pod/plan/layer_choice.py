"""What backward computes again in each layer of a run: none, selective, full, or what a budget of bytes allows.

The trainer does what `layer_choices` says; `stoker plan` prints it. T tokens; bytes and work are per token of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from stoker.pod.plan.activations import Kept, Recomputed, layer_tensors
from stoker.pod.plan.budget import Cost, choose_cheapest, fullest_moment, least_room
from stoker.pod.plan.job import Job

GIB = 2**30
Half = Literal["attention", "feed-forward"]
Cheap = Literal["attention norm", "rotated q and k", "feed-forward norm", "activated"]
HALVES: tuple[Half, ...] = ("attention", "feed-forward")
CHEAP: dict[Half, tuple[Cheap, ...]] = {
    "attention": ("attention norm", "rotated q and k"),
    "feed-forward": ("feed-forward norm", "activated"),
}
"""Results of cheap operations, by the half of a block that makes them."""


@dataclass(frozen=True)
class LayerChoice:
    """What backward computes again in one layer."""

    halves: tuple[Half, ...] = ()
    """Halves of the block of which only the inputs are kept; both: the block's input."""
    cheap: tuple[Cheap, ...] = ()
    """Results in the other halves that are computed again, each alone."""

    def shown(self) -> str:
        """Return the choice in words."""
        return ", ".join(self.names()) or "nothing"

    def names(self) -> list[str]:
        """Return the names of what is computed again."""
        if len(self.halves) == len(HALVES):
            return ["the whole layer"]
        return [*(f"all of {half}" for half in self.halves), *self.cheap]


KEEP_ALL = LayerChoice()
CHEAP_AGAIN = LayerChoice(cheap=(*CHEAP["attention"], *CHEAP["feed-forward"]))
LAYER_AGAIN = LayerChoice(halves=HALVES)
MODES = {"none": KEEP_ALL, "selective": CHEAP_AGAIN, "full": LAYER_AGAIN}
"""The choice of every layer without a budget."""


class BudgetTooSmall(ValueError):
    """No choice keeps the activations within the budget; the message has the smallest budget that works."""


def layer_choices(job: Job) -> tuple[LayerChoice, ...]:
    """Return the choice of each layer, first to last.

    Raises:
        BudgetTooSmall: the budget cannot be met, even where every layer is computed again.
        ValueError: a budget for the ranks of a pipeline is not planned.
    """
    if job.activation_budget_bytes is None:
        return (MODES[job.layout.recompute],) * job.model.num_layers
    if job.layout.pipeline > 1:
        raise ValueError(f"a budget of activations is not planned with pipeline {job.layout.pipeline}; leave it out")
    return _within_budget(job)


def planned_activations(job: Job) -> float:
    """Return the bytes of activations at the fullest moment of backward, with the choices of a budget."""
    costs = {choice: layer_cost(job, choice) for choice in set(layer_choices(job))}
    layers = fullest_moment([costs[choice] for choice in layer_choices(job)])
    return job.tokens * (layers + beside_layers(job))


def mean_recomputed(job: Job) -> Recomputed:
    """Return what the layers keep and compute again on average; of `again` what any layer does."""
    choices = layer_choices(job)
    costs = [layer_cost(job, choice) for choice in choices]
    names = dict.fromkeys(name for choice in choices for name in choice.names())
    kept, work = sum(cost.kept for cost in costs), sum(cost.work for cost in costs)
    return Recomputed(kept / len(costs), tuple(names), work / len(costs))


def beside_layers(job: Job) -> float:
    """Bytes of a token outside of the layers.

    Sum and gradient of the last norm, the rotary table's rows in fp32, and the numbers of a batch (8 bytes for token,
    position and target, 4 for the weight, and one copy of each).
    """
    return 2.0 * job.model.hidden_size * job.value_bytes + 8.0 * job.model.head_dim + 2 * (3 * 8.0 + 4.0)


@lru_cache(maxsize=64)
def _within_budget(job: Job) -> tuple[LayerChoice, ...]:
    budget, layers = job.activation_budget_bytes, job.model.num_layers
    assert budget is not None
    options = all_options()
    costs = [layer_cost(job, option) for option in options]
    chosen = choose_cheapest(costs, layers, budget / job.tokens - beside_layers(job))
    if chosen is None:
        raise BudgetTooSmall(_too_small(job, costs))
    return tuple(options[number] for number in chosen)


def _too_small(job: Job, costs: Sequence[Cost]) -> str:
    assert job.activation_budget_bytes is not None
    layers, tokens = job.model.num_layers, job.tokens
    inputs, outside = layer_cost(job, LAYER_AGAIN), beside_layers(job)
    needed = tokens * (least_room(costs, layers) + outside)
    return (
        f"activations of {tokens:,} tokens need at least {shown_gib(needed)} GiB on a rank: {layers} layers keep "
        f"{inputs.kept:,.0f} bytes of a token each where they are computed again, the one that backward computes again "
        f"has {inputs.again:,.0f}, and {outside:,.0f} are outside of the layers; the smallest that works is "
        f"{shown_gib(needed)}"
    )


def shown_gib(count: float) -> str:
    """Return bytes as GiB that are not less, in at least three digits."""
    digits = 3
    while count < 100 * GIB / 10**digits and digits < 12:
        digits += 1
    units = -(-count * 10**digits // GIB) + 1 if count * 10**digits % GIB else count * 10**digits / GIB
    return f"{units / 10**digits:.{digits}f}"


def all_options() -> list[LayerChoice]:
    """Return every choice of one layer: each half whole, or any of its cheap results, or nothing."""
    of_half = [[((half,), ())] + [((), found) for found in _subsets(CHEAP[half])] for half in HALVES]
    return [LayerChoice((*one[0], *other[0]), (*one[1], *other[1])) for one, other in product(*of_half)]


def layer_cost(job: Job, choice: LayerChoice) -> Cost:
    """Return bytes and work of a layer for one token.

    A half whose input alone is kept holds both parts of the residual stream; one that is kept holds their sum.
    """
    tensors = {item.name: item for item in layer_tensors(job)}
    sums, norms = tensors["residual sums"], tensors["norms"]
    stream, norm = sums.bytes_per_token / 2, Kept("norm", norms.bytes_per_token / 2, norms.work_per_token / 2)
    cheap = {
        "attention norm": norm,
        "rotated q and k": tensors["rotated q and k"],
        "feed-forward norm": norm,
        "activated": tensors["activated"],
    }
    products = {"attention": [tensors["q, k and v"], tensors["attention"]], "feed-forward": [tensors["gate and up"]]}
    if len(choice.halves) == len(HALVES):
        everything = [*cheap.values(), *products["attention"], *products["feed-forward"]]
        work = sum(item.work_per_token for item in everything) + sum(_last_product(job, half) for half in HALVES)
        return Cost(2 * stream, 2 * stream + sum(item.bytes_per_token for item in everything), work)
    kept, again, work = 0.0, 0.0, 0.0
    for half in HALVES:
        parts = [*(cheap[name] for name in CHEAP[half]), *products[half]]
        if half in choice.halves:
            # The sum of the stream before attention is kept there if attention is, so feed-forward adds one part.
            kept += stream if half == "feed-forward" else 2 * stream
            again = max(again, stream + sum(item.bytes_per_token for item in parts))
            work += sum(item.work_per_token for item in parts) + _last_product(job, half)
            continue
        dropped = [cheap[name] for name in CHEAP[half] if name in choice.cheap]
        kept += stream + sum(item.bytes_per_token for item in parts) - sum(item.bytes_per_token for item in dropped)
        again = max([again, *(item.bytes_per_token for item in dropped)])
        work += sum(item.work_per_token for item in dropped)
    return Cost(kept, again, work)


def _last_product(job: Job, half: Half) -> float:
    """Operations of the product that ends a half: its result is not kept, but a second pass computes it."""
    model = job.model
    width = model.num_heads * model.head_dim if half == "attention" else model.intermediate_size
    return 2.0 * width * model.hidden_size / job.layout.tensor


def _subsets(names: tuple[Cheap, ...]) -> list[tuple[Cheap, ...]]:
    found: list[tuple[Cheap, ...]] = [()]
    for name in names:
        found += [(*subset, name) for subset in found]
    return found
