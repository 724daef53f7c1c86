"""What backward computes again in each layer of a run: none, selective, full, or what a budget of bytes allows.

The trainer does what `layer_choices` says; `stoker plan` prints it. T tokens; bytes and work are per token of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from stoker.pod.plan.activations import Kept, Recomputed, layer_tensors, router_bytes
from stoker.pod.plan.budget import Cost, choose_cheapest, fullest_moment, least_room
from stoker.pod.plan.context import exchanged_bytes
from stoker.pod.plan.job import Job
from stoker.pod.plan.late_gradients import Moment, fullest_moments, held_of_layer, late_bytes, turning
from stoker.pod.plan.layer_budget import choose_by_layer, least_room_by_layer
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.stage import PipelineRank, pipeline_ranks, stage_layers

GIB = 2**30
Half = Literal["attention", "feed-forward"]
Cheap = Literal["attention norm", "rotated q and k", "feed-forward norm", "activated"]
HALVES: tuple[Half, ...] = ("attention", "feed-forward")
CHEAP: dict[Half, tuple[Cheap, ...]] = {
    "attention": ("attention norm", "rotated q and k"),
    "feed-forward": ("feed-forward norm", "activated"),
}
"""Results of cheap operations, by the half of a block that makes them."""
LINK_WORK = 2000.0
"""Operations in the time of one byte from another rank: a GPU's peak to its links' rate, less what products miss."""
ORDER_BYTES = 16.0
"""Of a row that came from another rank of `expert`: its place in the order of experts, and the inverse."""


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

    def __init__(self, message: str, needed: float) -> None:
        """`needed`: bytes of the smallest budget that works on this rank."""
        super().__init__(message)
        self.needed = needed


def layer_choices(job: Job) -> tuple[LayerChoice, ...]:
    """Return the choice of each layer, first to last.

    Raises:
        BudgetTooSmall: the budget cannot be met, even where every layer is computed again.
    """
    if job.activation_budget_bytes is None:
        return (MODES[job.layout.recompute],) * job.model.num_layers
    return tuple(choice for stage in _by_stage(job) for choice in stage)


def stage_choices(job: Job, stage: int, layers: int) -> tuple[LayerChoice, ...]:
    """Return the choices of the first `layers` layers of a stage of a pipeline.

    Raises:
        BudgetTooSmall: the budget cannot be met, even where every layer is computed again.
        ValueError: the budget is planned for another number of layers.
    """
    planned = _by_stage(job)[stage]
    if layers != len(planned):
        raise ValueError(
            f"a budget of activations was planned for {len(planned)} layers of stage {stage}, not {layers}"
        )
    return planned


def planned_activations(job: Job, rank: PipelineRank | None = None) -> float:
    """Return the bytes of activations at the fullest moment of backward, with the choices of a budget.

    `rank`: of a pipeline; None: the whole model.
    """
    if rank is None or job.layout.pipeline == 1:
        chosen = list(zip(layer_jobs(job), layer_choices(job), strict=True))
        return job.tokens * (fullest_moment(_costs_of(chosen, layer_cost)) + beside_layers(job))
    moments = fullest_moments(job, rank)
    stages = [
        _costs_of(stage, lambda kind, choice: _under_way(kind, moments, layer_cost(kind, choice)))
        for stage in _stages_of(job, rank.index)
    ]
    held = max(sum(cost.kept for cost in stage) for stage in stages)
    again = max(cost.again for stage in stages for cost in stage)
    return job.tokens * (held + again + _beside_stages(job, rank))


def mean_recomputed(job: Job) -> Recomputed:
    """Return what the layers keep and compute again on average; of `again` what any layer does."""
    choices = layer_choices(job)
    costs = _costs_of(list(zip(layer_jobs(job), choices, strict=True)), _computed)
    names = dict.fromkeys(name for choice in choices for name in choice.names())
    kept, work = sum(cost.kept for cost in costs), sum(cost.work for cost in costs)
    return Recomputed(kept / len(costs), tuple(names), work / len(costs))


def _costs_of(chosen: Sequence[tuple[Job, LayerChoice]], cost: Callable[[Job, LayerChoice], Cost]) -> list[Cost]:
    """Return the cost of each layer; those of one kind with one choice are computed once."""
    known = {one: cost(*one) for one in set(chosen)}
    return [known[one] for one in chosen]


def beside_layers(job: Job) -> float:
    """Bytes of a token outside of the layers.

    Sum of the last norm and gradient of its result, the rotary table's rows in fp32, and the numbers of a batch (8
    bytes for token, position and target, 4 for the weight, and one copy of each). Ranks that share sequences know the
    places of all tokens (3 numbers of 8 bytes). Ranks that cut them have their own tokens of the sum, and the gradient
    of all; the gathered result itself is freed with the loss, and counts as a tensor on its way (`memory`).
    """
    layout = job.layout
    streams = 1.0 + (1.0 / layout.tensor if layout.sequence_parallel else 1.0)
    return streams * job.model.hidden_size * job.value_bytes + _numbers(job)


def _numbers(job: Job) -> float:
    context = job.layout.context
    places = 24.0 * context if context > 1 else 0.0
    return 8.0 * job.model.head_dim + 2 * (3 * 8.0 + 4.0) + places


def _beside_stages(job: Job, rank: PipelineRank) -> float:
    """The same for a rank of a pipeline.

    Of each micro-batch under way the output of its stage in two parts, or its input and the gradient of that; of one
    the gathered result of the last norm; of all in a step their numbers.
    """
    layout = job.layout
    hidden = job.model.hidden_size * float(job.value_bytes)
    stream, gathered = (hidden / layout.tensor, hidden) if layout.sequence_parallel else (hidden, 0.0)
    passes = max(moment.passes for moment in fullest_moments(job, rank))
    return passes * 2.0 * stream + gathered + job.micro_batches * _numbers(job)


def _by_stage(job: Job) -> tuple[tuple[LayerChoice, ...], ...]:
    """Return the choices of the layers of each stage, in the order of the forward pass."""
    found = _solved(replace(job, layout=replace(job.layout, zero_stage=0)))  # activations are alike in all stages
    if isinstance(found, BudgetTooSmall):
        raise BudgetTooSmall(str(found), found.needed)
    return found


@lru_cache(maxsize=64)
def _solved(job: Job) -> tuple[tuple[LayerChoice, ...], ...] | BudgetTooSmall:
    """Return the choices, or what refuses the budget: a search costs up to a second."""
    try:
        return _searched(job)
    except BudgetTooSmall as error:
        return error


def _searched(job: Job) -> tuple[tuple[LayerChoice, ...], ...]:
    if job.layout.pipeline == 1:
        return (_within_budget(job),)
    by_rank: dict[int, list[tuple[LayerChoice, ...]]] = {}
    refused: list[BudgetTooSmall] = []
    for rank in pipeline_ranks(job):
        try:
            by_rank[rank.index] = _within_budget_of(job, rank)
        except BudgetTooSmall as error:
            refused.append(error)
    if refused:  # the smallest budget that works is that of the rank that needs most
        raise max(refused, key=lambda error: error.needed)
    ranks = job.layout.pipeline
    return tuple(by_rank[number % ranks][number // ranks] for number in range(ranks * job.layout.stages_per_rank))


def _stages_of(job: Job, index: int) -> list[list[tuple[Job, LayerChoice]]]:
    """Return the layers of the stages of one pipeline rank: each as its kind sees the job, and its choice."""
    choices = _by_stage(job)[index :: job.layout.pipeline]
    return [list(zip(kinds, stage, strict=True)) for kinds, stage in zip(_kinds_of(job, index), choices, strict=True)]


def _kinds_of(job: Job, index: int) -> list[tuple[Job, ...]]:
    """Return the job as the layers of each stage of a pipeline rank see it."""
    kinds = layer_jobs(job)
    return [kinds[layers.start : layers.stop] for layers in stage_layers(job)[index :: job.layout.pipeline]]


def _within_budget(job: Job) -> tuple[LayerChoice, ...]:
    kinds, budget = layer_jobs(job), job.activation_budget_bytes
    assert budget is not None
    costs = {kind: [layer_cost(kind, option) for option in all_options(kind)] for kind in set(kinds)}
    room = budget / job.tokens - beside_layers(job)
    chosen, layers = _cheapest([costs[kind] for kind in kinds], room), len(kinds)
    if chosen is None:
        of_layers = [costs[kind] for kind in kinds]
        least = least_room_by_layer(of_layers) if job.model.is_mixed else least_room(of_layers[0], layers)
        raise _too_small(job, layers, least, beside_layers(job))
    return _named(kinds, chosen)


def _named(kinds: tuple[Job, ...], numbers: list[int]) -> tuple[LayerChoice, ...]:
    """Return the choices of layers of these kinds by the numbers of their options."""
    return tuple(all_options(kind)[number] for kind, number in zip(kinds, numbers, strict=True))


def _work(layers: list[list[Cost]], numbers: list[int]) -> float:
    return sum(options[number].work for options, number in zip(layers, numbers, strict=True))


def _cheapest(layers: list[list[Cost]], room: float) -> list[int] | None:
    """Layers of one kind change places for the least memory; others have theirs."""
    if all(options == layers[0] for options in layers):
        return choose_cheapest(layers[0], len(layers), room)
    return choose_by_layer(layers, room)


def _under_way(kind: Job, moments: tuple[Moment, ...], cost: Cost) -> Cost:
    """Return the cost of a layer in all passes that a rank of a pipeline holds; `again` of the one that turns."""
    return Cost(held_of_layer(kind, moments, cost.kept), cost.again + turning(kind, cost.kept), cost.work)


def _within_budget_of(job: Job, rank: PipelineRank) -> list[tuple[LayerChoice, ...]]:
    """Return the choices of the layers of a rank's stages, for as many activations as its schedule holds.

    Bound: all of them whole, of its fullest stage, and what one layer computes again. So for each limit of the latter
    the rest is a sum, and each stage is solved alone.
    """
    stages, budget = _kinds_of(job, rank.index), job.activation_budget_bytes
    assert budget is not None
    costs = _costs_under_way(job, rank)
    of_stages = {stage: [costs[kind] for kind in stage] for stage in stages}
    limits = {cost.again for options in costs.values() for cost in options}
    room = budget / job.tokens - _beside_stages(job, rank)
    found: list[tuple[float, float, dict[tuple[Job, ...], list[int]]]] = []
    for limit in limits:
        picks = {stage: _stage_within(layers, limit, room) for stage, layers in of_stages.items()}
        chosen = {stage: pick for stage, pick in picks.items() if pick is not None}
        if len(chosen) == len(picks):
            work = sum(
                costs[kind][number].work for stage in stages for kind, number in zip(stage, chosen[stage], strict=True)
            )
            found.append((work, limit, chosen))
    if not found:
        least = min(max(_least_of_stage(layers, limit) for layers in of_stages.values()) for limit in limits)
        raise _too_small(job, rank.live_stages * rank.largest_stage, least, _beside_stages(job, rank))
    _, _, chosen = min(found, key=lambda one: one[:2])
    return [
        tuple(all_options(kind)[number] for kind, number in zip(stage, chosen[stage], strict=True)) for stage in stages
    ]


def _costs_under_way(job: Job, rank: PipelineRank) -> dict[Job, list[Cost]]:
    """Return the costs of all options of each kind of a rank's layers, in all passes that its schedule holds."""
    moments, kinds = fullest_moments(job, rank), {kind for stage in _kinds_of(job, rank.index) for kind in stage}
    return {
        kind: [_under_way(kind, moments, layer_cost(kind, option)) for option in all_options(kind)] for kind in kinds
    }


def _stage_within(layers: list[list[Cost]], limit: float, room: float) -> list[int] | None:
    """Return the cheapest options of a stage where no layer computes more than `limit` again."""
    allowed = [[number for number, cost in enumerate(options) if cost.again <= limit] for options in layers]
    sums = [
        [Cost(options[number].kept, 0.0, options[number].work) for number in numbers]
        for options, numbers in zip(layers, allowed, strict=True)
    ]
    chosen = _cheapest(sums, room - limit)
    if chosen is None:
        return None
    picked = [numbers[place] for numbers, place in zip(allowed, chosen, strict=True)]
    alike = all(options == layers[0] for options in layers)
    return sorted(picked, key=lambda number: -layers[0][number].again) if alike else picked


def _least_of_stage(layers: list[list[Cost]], limit: float) -> float:
    """Return the least that a stage holds where no layer computes more than `limit` again; infinite where none does."""
    kept = [min((cost.kept for cost in options if cost.again <= limit), default=math.inf) for options in layers]
    return limit + sum(kept)


def _too_small(job: Job, layers: int, least: float, outside: float) -> BudgetTooSmall:
    """`layers`: times the micro-batches that are under way."""
    tokens, kinds = job.tokens, set(layer_jobs(job))
    inputs = max((layer_cost(kind, LAYER_AGAIN) for kind in kinds), key=lambda cost: cost.again)
    needed = tokens * (least + outside)
    late = ""
    if job.layout.pipeline > 1 and job.layout.schedule == "ZeroBubble":
        late = f"late gradients of a layer read {max(map(late_bytes, kinds)):,.0f}, "
    loads = ""
    if job.layout.expert > 1:
        loads = f" (experts over {job.layout.expert} ranks: one may get {job.fullest_load:g} x the mean of their rows)"
    message = (
        f"activations of {tokens:,} tokens need at least {shown_gib(needed)} GiB on a rank: {layers} layers keep "
        f"{inputs.kept:,.0f} bytes of a token each where they are computed again, the one that backward computes again "
        f"has {inputs.again:,.0f}{loads}, {late}and {outside:,.0f} are outside of the layers; "
        f"the smallest that works is {shown_gib(needed)}"
    )
    return BudgetTooSmall(message, needed)


def shown_gib(count: float) -> str:
    """Return bytes as GiB that are not less, in at least three digits."""
    digits = 3
    while count < 100 * GIB / 10**digits and digits < 12:
        digits += 1
    units = -(-count * 10**digits // GIB) + 1 if count * 10**digits % GIB else count * 10**digits / GIB
    return f"{units / 10**digits:.{digits}f}"


def all_options(job: Job) -> list[LayerChoice]:
    """Return every choice of one layer: each half whole, or any of its cheap results that are kept, or nothing."""
    kept = [tuple(name for name in CHEAP[half] if name in _half(job, half)[0]) for half in HALVES]
    of_half = [
        [((half,), ())] + [((), found) for found in _subsets(names)] for half, names in zip(HALVES, kept, strict=True)
    ]
    return [LayerChoice((*one[0], *other[0]), (*one[1], *other[1])) for one, other in product(*of_half)]


def layer_cost(job: Job, choice: LayerChoice) -> Cost:
    """Return bytes and work of a layer for one token; what the ranks of `tensor` send again counts as work."""
    cost = _computed(job, choice)
    return replace(cost, work=cost.work + LINK_WORK * sent_again(job, choice))


def sent_again(job: Job, choice: LayerChoice) -> float:
    """Return the bytes of one token that a rank sends over `tensor` for what a layer computes again.

    A half ends in a sum over the ranks, twice a pass of its rows; a norm's result is gathered for the product after it.
    """
    layout, row = job.layout, job.model.hidden_size * float(job.value_bytes)
    kept = {item.name for item in layer_tensors(job)} if layout.sequence_parallel else set()
    norms = sum(name in kept for name in choice.cheap if name.endswith("norm"))
    return (2 * len(choice.halves) + norms) * row * (layout.tensor - 1) / layout.tensor


def _computed(job: Job, choice: LayerChoice) -> Cost:
    """The cost without what is sent.

    A half whose input alone is kept holds both parts of the residual stream; one that is kept holds their sum.
    """
    stream = next(item.bytes_per_token for item in layer_tensors(job) if item.name == "residual sums") / 2
    if len(choice.halves) == len(HALVES):
        everything = [
            item for half in HALVES for items in (_half(job, half)[0].values(), _half(job, half)[1]) for item in items
        ]
        work = sum(item.work_per_token for item in everything) + sum(_last_product(job, half) for half in HALVES)
        return Cost(2 * stream, 2 * stream + sum(item.bytes_per_token for item in everything), work)
    kept, again, work = 0.0, 0.0, 0.0
    for half in HALVES:
        cheap, others = _half(job, half)
        parts = [*cheap.values(), *others]
        if half in choice.halves:
            # The sum of the stream before attention is kept there if attention is, so feed-forward adds one part.
            kept += stream if half == "feed-forward" else 2 * stream
            again = max(again, stream + sum(item.bytes_per_token for item in parts))
            work += sum(item.work_per_token for item in parts) + _last_product(job, half)
            continue
        dropped = [item for name, item in cheap.items() if name in choice.cheap]
        kept += stream + sum(item.bytes_per_token for item in parts) - sum(item.bytes_per_token for item in dropped)
        again = max([again, *(item.bytes_per_token for item in dropped)])
        work += sum(item.work_per_token for item in dropped)
    return Cost(kept, again, work)


def _half(job: Job, half: Half) -> tuple[dict[Cheap, Kept], list[Kept]]:
    """Return what a half of a block keeps of one token: results that can be computed again alone, and others."""
    tensors, size = {item.name: item for item in layer_tensors(job)}, job.value_bytes
    norm: Cheap = "attention norm" if half == "attention" else "feed-forward norm"
    cheap: dict[Cheap, Kept] = {norm: tensors[norm]} if norm in tensors else {}
    others: list[Kept] = []
    if half == "attention":
        rotated = tensors["rotated q and k"]
        others += [tensors["q, k and v"], tensors["attention"]]
        if job.layout.context > 1 and job.layout.context_method == "Ulysses":
            others += [rotated, Kept("exchanged v and result", exchanged_bytes(job), 0.0)]
        else:
            cheap["rotated q and k"] = rotated
    else:
        cheap["activated"] = _at_fullest_load(job, tensors["activated"])
        names = ("dispatched tokens", "gate and up")
        others += [_at_fullest_load(job, tensors[name]) for name in names if name in tensors]
        others += [tensors[name] for name in ("gathered tokens", "router", "experts' results") if name in tensors]
        if job.model.num_experts:
            others.append(Kept("router in fp32", router_bytes(job.model, size), 0.0))
        if job.layout.expert > 1:
            others.append(_at_fullest_load(job, Kept("order of received rows", ORDER_BYTES * job.expert_rows, 0.0)))
    if job.adapters is not None:
        inner = Kept("adapters", job.adapters.inner_bytes(half == "attention", job.model, size), 0.0)
        others.append(inner if half == "attention" else _at_fullest_load(job, inner))
    return cheap, others


def _at_fullest_load(job: Job, mean: Kept) -> Kept:
    """Return rows of experts as the fullest rank keeps them; their work is that of equal loads."""
    return replace(mean, bytes_per_token=mean.bytes_per_token * job.fullest_load)


def _last_product(job: Job, half: Half) -> float:
    """Operations of the product that ends a half: its result is not kept, but a second pass computes it."""
    model = job.model
    width = model.num_heads * model.head_dim if half == "attention" else model.intermediate_size
    if half == "feed-forward" and model.num_experts:
        width = model.experts_per_token * model.expert_size
    return 2.0 * width * model.hidden_size / job.layout.tensor


def _subsets(names: tuple[Cheap, ...]) -> list[tuple[Cheap, ...]]:
    found: list[tuple[Cheap, ...]] = [()]
    for name in names:
        found += [(*subset, name) for subset in found]
    return found
