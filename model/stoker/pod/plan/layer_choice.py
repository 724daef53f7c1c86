"""What backward computes again in each layer of a run: none, selective, full, or what a budget of bytes allows.

The trainer does what `layer_choices` says; `stoker plan` prints it. T tokens; bytes and work are per token of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from stoker.pod.plan.activations import Kept, Recomputed, layer_tensors, router_bytes
from stoker.pod.plan.budget import Cost, choose_cheapest, fullest_moment, least_room
from stoker.pod.plan.context import exchanged_bytes
from stoker.pod.plan.job import Job
from stoker.pod.plan.late_gradients import fullest_moments, held_of_layer, late_bytes, turning
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


class BudgetNotPlanned(ValueError):
    """No bound of what layers keep is known for this layout or model; the message tells why and what is allowed."""


def layer_choices(job: Job) -> tuple[LayerChoice, ...]:
    """Return the choice of each layer, first to last.

    Raises:
        BudgetTooSmall: the budget cannot be met, even where every layer is computed again.
        BudgetNotPlanned: no bound is known for this layout or model.
    """
    if job.activation_budget_bytes is None:
        return (MODES[job.layout.recompute],) * job.model.num_layers
    check_planned(job)
    return tuple(choice for stage in _by_stage(job) for choice in stage)


def stage_choices(job: Job, stage: int, layers: int) -> tuple[LayerChoice, ...]:
    """Return the choices of the first `layers` layers of a stage of a pipeline.

    Raises:
        BudgetTooSmall: the budget cannot be met, even where every layer is computed again.
        BudgetNotPlanned: no bound is known for this layout or model.
        ValueError: the budget is planned for another number of layers.
    """
    check_planned(job)
    planned = _by_stage(job)[stage]
    if layers != len(planned):
        raise ValueError(
            f"a budget of activations was planned for {len(planned)} layers of stage {stage}, not {layers}"
        )
    return planned


def check_planned(job: Job) -> None:
    """Raise BudgetNotPlanned where no bound of what layers keep is known."""
    model = job.model
    if model.num_experts and model.dense_layers:
        raise BudgetNotPlanned(
            f"a budget of activations is not planned for a model with both dense layers ({model.dense_layers} of "
            f"{model.num_layers}) and layers with experts: one choice of layers cannot hold both; leave "
            "activationBudgetGiB out"
        )


def planned_activations(job: Job, rank: PipelineRank | None = None) -> float:
    """Return the bytes of activations at the fullest moment of backward, with the choices of a budget.

    `rank`: of a pipeline; None: the whole model.
    """
    check_planned(job)
    if rank is None or job.layout.pipeline == 1:
        chosen = [layer_cost(job, choice) for choice in layer_choices(job)]
        return job.tokens * (fullest_moment(chosen) + beside_layers(job))
    stages = [[layer_cost(job, choice) for choice in stage] for stage in _stages_of(job, rank.index)]
    moments = fullest_moments(job, rank)
    held = max(sum(held_of_layer(job, moments, cost.kept) for cost in stage) for stage in stages)
    again = max(cost.again + turning(job, cost.kept) for stage in stages for cost in stage)
    return job.tokens * (held + again + _beside_stages(job, rank))


def mean_recomputed(job: Job) -> Recomputed:
    """Return what the layers keep and compute again on average; of `again` what any layer does."""
    choices = layer_choices(job)
    costs = [_computed(job, choice) for choice in choices]
    names = dict.fromkeys(name for choice in choices for name in choice.names())
    kept, work = sum(cost.kept for cost in costs), sum(cost.work for cost in costs)
    return Recomputed(kept / len(costs), tuple(names), work / len(costs))


def beside_layers(job: Job) -> float:
    """Bytes of a token outside of the layers.

    Sum and gradient of the last norm, the rotary table's rows in fp32, and the numbers of a batch (8 bytes for token,
    position and target, 4 for the weight, and one copy of each). Ranks that share sequences know the places of all
    tokens (3 numbers of 8 bytes); ranks that cut them gather the last norm's result.
    """
    streams = 3.0 if job.layout.sequence_parallel else 2.0
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


@lru_cache(maxsize=64)
def _by_stage(job: Job) -> tuple[tuple[LayerChoice, ...], ...]:
    """Return the choices of the layers of each stage, in the order of the forward pass."""
    if job.layout.pipeline == 1:
        return (_within_budget(job),)
    by_rank: dict[int, tuple[LayerChoice, ...]] = {}
    refused: list[BudgetTooSmall] = []
    for rank in pipeline_ranks(job):
        try:
            by_rank[rank.index] = _within_budget_of(job, rank)
        except BudgetTooSmall as error:
            refused.append(error)
    if refused:  # the smallest budget that works is that of the rank that needs most
        raise max(refused, key=lambda error: error.needed)
    stages = stage_layers(job)
    return tuple(by_rank[number % job.layout.pipeline][: len(layers)] for number, layers in enumerate(stages))


def _stages_of(job: Job, index: int) -> list[tuple[LayerChoice, ...]]:
    """Return the choices of the stages of one pipeline rank."""
    return list(_by_stage(job)[index :: job.layout.pipeline])


def _within_budget(job: Job) -> tuple[LayerChoice, ...]:
    budget, layers = job.activation_budget_bytes, job.model.num_layers
    assert budget is not None
    options = all_options(job)
    costs = [layer_cost(job, option) for option in options]
    chosen = choose_cheapest(costs, layers, budget / job.tokens - beside_layers(job))
    if chosen is None:
        raise _too_small(job, layers, least_room(costs, layers), beside_layers(job))
    return tuple(options[number] for number in chosen)


def _within_budget_of(job: Job, rank: PipelineRank) -> tuple[LayerChoice, ...]:
    """Return the choices of the layers of a rank's largest stage, for as many activations as its schedule holds.

    Bound: all of them whole, and what one layer computes again. So for each limit of the latter the rest is a sum.
    """
    budget, layers = job.activation_budget_bytes, rank.largest_stage
    assert budget is not None
    options = all_options(job)
    costs = [layer_cost(job, option) for option in options]
    room, moments = budget / job.tokens - _beside_stages(job, rank), fullest_moments(job, rank)
    held = [Cost(held_of_layer(job, moments, cost.kept), 0.0, cost.work) for cost in costs]
    again = [cost.again + turning(job, cost.kept) for cost in costs]
    found: list[tuple[float, float, list[int]]] = []
    for limit in set(again):
        numbers = [number for number, most in enumerate(again) if most <= limit]
        chosen = choose_cheapest([held[number] for number in numbers], layers, room - limit)
        if chosen is not None:
            picked = [numbers[number] for number in chosen]
            found.append((sum(costs[number].work for number in picked), limit, picked))
    if not found:
        least = min(layers * one.kept + most for one, most in zip(held, again, strict=True))
        raise _too_small(job, rank.live_stages * layers, least, _beside_stages(job, rank))
    _, _, picked = min(found)
    picked.sort(key=lambda number: -costs[number].again)
    return tuple(options[number] for number in picked)


def _too_small(job: Job, layers: int, least: float, outside: float) -> BudgetTooSmall:
    """`layers`: times the micro-batches that are under way."""
    tokens, inputs = job.tokens, layer_cost(job, LAYER_AGAIN)
    needed = tokens * (least + outside)
    late = ""
    if job.layout.pipeline > 1 and job.layout.schedule == "ZeroBubble":
        late = f"late gradients of a layer read {late_bytes(job):,.0f}, "
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
