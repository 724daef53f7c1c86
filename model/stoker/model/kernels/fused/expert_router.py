"""Choice of experts for serving: the router's product, softmax and the most probable experts, on the device.

Of equal probabilities the lower expert comes first. Logits that are no numbers still choose experts that exist. Without
gradient only; `experts.route` is the differentiable choice. T tokens, D hidden, E experts, K experts of a token.

Called by `expert_layer`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fused.few_rows import RowNorm, normed_row, summed_row
from stoker.model.kernels.fused.launch import overlap, wait_for_last

FEW_EXPERTS = 2
"""Experts of one program where rows are few."""
MOST_SPLIT = 1024
"""Most rows whose logits are made by several programs each: one program would read the router for as long."""
SPLIT_EXPERTS = 32
MAX_COLUMNS = 256
STAGE_BYTES = 32768
"""Most bytes of the router in one of the product's stages."""


class Choices(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """int32 [T, K], the most probable first; E for a row of padding, where slots say so."""
    weights: Tensor
    """float32 [T, K]"""


class FewLogits(NamedTuple):
    logits: Tensor
    """float32 [T, E]"""
    normed: Tensor
    """[T, D]"""
    total: Tensor
    """[T, D]: x + update"""


def route_rows(x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Choices:
    """Choose each row's experts; many rows in one kernel, others by more programs that each have some experts."""
    if x_TD.shape[0] <= MOST_SPLIT:
        return choose_experts(split_logits(x_TD, weights.router), weights, slots_T)
    return route_whole(x_TD, weights, slots_T)


def route_whole(x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Choices:
    """Compute product, softmax and choice in one kernel."""
    num_tokens, num_experts = x_TD.shape[0], weights.num_experts
    choices = empty_choices(num_tokens, weights.num_choices, x_TD.device)
    experts = max(16, triton.next_power_of_2(num_experts))
    route_rows_kernel[(triton.cdiv(num_tokens, 64),)](
        x_TD,
        weights.router,
        slots_T,
        choices.experts,
        choices.weights,
        num_tokens,
        num_experts,
        x_TD.shape[1],
        CHOICES=weights.num_choices,
        PLACES=triton.next_power_of_2(weights.num_choices),
        NORMALISE=weights.normalise,
        HAS_SLOTS=slots_T is not None,
        ROWS=64,
        EXPERTS=experts,
        **columns_of(experts, x_TD),
        enable_fp_fusion=True,
        num_warps=8,
        num_stages=3,
        **overlap(),
    )
    return choices


def split_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """Return the router's logits, float32 [T, E]."""
    (num_tokens, depth), num_experts = x_TD.shape, router_ED.shape[0]
    logits_TE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    split_logits_kernel[(triton.cdiv(num_tokens, 16), triton.cdiv(num_experts, SPLIT_EXPERTS))](
        x_TD,
        router_ED,
        logits_TE,
        num_tokens,
        num_experts,
        depth,
        ROWS=16,
        EXPERTS=SPLIT_EXPERTS,
        **columns_of(SPLIT_EXPERTS, x_TD),
        enable_fp_fusion=True,
        num_warps=4,
        num_stages=4,
        **overlap(),
    )
    return logits_TE


def columns_of(experts: int, x_TD: Tensor) -> dict[str, Any]:
    """Return the columns of one stage of a product with so many rows of the router."""
    columns = max(16, min(MAX_COLUMNS, STAGE_BYTES // (experts * x_TD.element_size())))
    return {"COLUMNS": columns, "WHOLE": x_TD.shape[1] % columns == 0}


def route_few(x_TD: Tensor, norm: RowNorm | None, weights: ExpertWeights) -> tuple[Choices, FewLogits]:
    """Compute norm and product of few rows by many programs, then choose."""
    few = few_logits(x_TD, norm, weights.router)
    return choose_experts(few.logits, weights), few


def choose_experts(logits_TE: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Choices:
    num_tokens, num_experts = logits_TE.shape
    choices = empty_choices(num_tokens, weights.num_choices, logits_TE.device)
    choose_kernel[(num_tokens,)](
        logits_TE,
        slots_T,
        choices.experts,
        choices.weights,
        num_experts,
        CHOICES=weights.num_choices,
        PLACES=triton.next_power_of_2(weights.num_choices),
        NORMALISE=weights.normalise,
        HAS_SLOTS=slots_T is not None,
        EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=1,
        **overlap(),
    )
    return choices


def few_logits(x_TD: Tensor, norm: RowNorm | None, router_ED: Tensor) -> FewLogits:
    """Return the logits of norm(x + update), and both sums. Without a norm x is normed already."""
    num_rows, depth = x_TD.shape
    x, update = x_TD.contiguous(), None if norm is None or norm.update is None else norm.update.contiguous()
    logits_TE = torch.empty(num_rows, router_ED.shape[0], dtype=torch.float32, device=x.device)
    normed_TD = x if norm is None else torch.empty_like(x)
    total_TD = x if update is None else torch.empty_like(x)
    few_logits_kernel[(triton.cdiv(router_ED.shape[0], FEW_EXPERTS),)](
        x,
        update,
        None if norm is None else norm.weight,
        router_ED,
        logits_TE,
        normed_TD,
        total_TD,
        router_ED.shape[0],
        depth,
        0.0 if norm is None else norm.eps,
        ROWS=num_rows,
        HAS_UPDATE=update is not None,
        HAS_NORM=norm is not None,
        EXPERTS=FEW_EXPERTS,
        DEPTH=max(512, triton.next_power_of_2(depth)),
        enable_fp_fusion=True,
        num_warps=4,
        **overlap(),
    )
    return FewLogits(logits_TE, normed_TD, total_TD)


def empty_choices(num_tokens: int, num_choices: int, device: torch.device) -> Choices:
    experts = torch.empty(num_tokens, num_choices, dtype=torch.int32, device=device)
    return Choices(experts, torch.empty(num_tokens, num_choices, dtype=torch.float32, device=device))


@triton.jit
def choose(
    logits_RE, num_experts,
    CHOICES: tl.constexpr, PLACES: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Softmax, then repeated maximum: experts and their weights, [ROWS, PLACES]."""
    expert_E = tl.arange(0, EXPERTS)[None, :]
    place_K = tl.arange(0, PLACES)[None, :]
    inside = expert_E < num_experts
    exponentials = tl.where(
        inside, tl.exp(logits_RE - tl.max(tl.where(inside, logits_RE, -float("inf")), 1)[:, None]), 0.0
    )
    left = tl.where(inside, exponentials / tl.sum(exponentials, 1)[:, None], -1.0)
    experts = tl.zeros([ROWS, PLACES], dtype=tl.int32)
    weights = tl.zeros([ROWS, PLACES], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        best_R = tl.max(left, 1)[:, None]
        chosen_R = tl.min(tl.where(left == best_R, expert_E, EXPERTS), 1)[:, None]
        chosen_R = tl.minimum(chosen_R, num_experts - 1)
        left = tl.where(expert_E == chosen_R, -1.0, left)
        experts = tl.where(place_K == choice, chosen_R, experts)
        weights = tl.where(place_K == choice, best_R, weights)
    if NORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    return experts, weights


@triton.jit
def real_experts(experts_RK, slots, row, num_tokens, num_experts, HAS_SLOTS: tl.constexpr):
    """The experts of rows that are no padding; of others one that no rank holds."""
    if HAS_SLOTS:
        slot_R = tl.load(slots + row, mask=row < num_tokens, other=-1)
        experts_RK = tl.where((slot_R >= 0)[:, None], experts_RK, num_experts)
    return experts_RK


@triton.jit
def store_choices(
    experts_RK, weights_RK, row, num_tokens, experts, weights, CHOICES: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    place_K = tl.arange(0, PLACES)[None, :]
    inside = (row < num_tokens)[:, None] & (place_K < CHOICES)
    place = row.to(tl.int64)[:, None] * CHOICES + place_K
    tl.store(experts + place, experts_RK, mask=inside)
    tl.store(weights + place, weights_RK, mask=inside)


@triton.jit
def multiply_rows(
    x, router, row, expert, num_tokens, num_experts, depth,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The logits of rows and experts; those beyond the end repeat the last one."""
    column = tl.arange(0, COLUMNS)
    inputs = x + tl.minimum(row, num_tokens - 1).to(tl.int64)[:, None] * depth + column[None, :]
    own = router + tl.minimum(expert, num_experts - 1)[:, None] * depth + column[None, :]
    logits_RE = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    for begin in range(0, depth, COLUMNS):
        if WHOLE:
            x_RC = tl.load(inputs + begin)
            router_EC = tl.load(own + begin)
        else:
            inside = (begin + column < depth)[None, :]
            x_RC = tl.load(inputs + begin, mask=inside, other=0.0)
            router_EC = tl.load(own + begin, mask=inside, other=0.0)
        logits_RE = tl.dot(x_RC, tl.trans(router_EC), logits_RE, input_precision="ieee")
    return logits_RE


@triton.jit(do_not_specialize=["num_tokens"])
def split_logits_kernel(
    x, router, logits, num_tokens, num_experts, depth,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    logits_RE = multiply_rows(
        x, router, row, expert, num_tokens, num_experts, depth, ROWS, EXPERTS, COLUMNS, WHOLE
    )  # fmt: skip
    inside = (row < num_tokens)[:, None] & (expert < num_experts)[None, :]
    tl.store(logits + row.to(tl.int64)[:, None] * num_experts + expert[None, :], logits_RE, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def route_rows_kernel(
    x, router, slots, experts, weights, num_tokens, num_experts, depth,
    CHOICES: tl.constexpr, PLACES: tl.constexpr, NORMALISE: tl.constexpr, HAS_SLOTS: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logits_RE = multiply_rows(
        x, router, row, tl.arange(0, EXPERTS), num_tokens, num_experts, depth, ROWS, EXPERTS, COLUMNS, WHOLE
    )  # fmt: skip
    experts_RK, weights_RK = choose(logits_RE, num_experts, CHOICES, PLACES, NORMALISE, ROWS, EXPERTS)
    experts_RK = real_experts(experts_RK, slots, row, num_tokens, num_experts, HAS_SLOTS)
    store_choices(experts_RK, weights_RK, row, num_tokens, experts, weights, CHOICES, PLACES)


@triton.jit
def choose_kernel(
    logits, slots, experts, weights, num_experts,
    CHOICES: tl.constexpr, PLACES: tl.constexpr, NORMALISE: tl.constexpr, HAS_SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAPS)
    row = tl.program_id(0) + tl.arange(0, 1)
    expert = tl.arange(0, EXPERTS)
    place = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
    logits_RE = tl.load(logits + place, mask=(expert < num_experts)[None, :], other=0.0)
    experts_RK, weights_RK = choose(logits_RE, num_experts, CHOICES, PLACES, NORMALISE, 1, EXPERTS)
    experts_RK = real_experts(experts_RK, slots, row, tl.num_programs(0), num_experts, HAS_SLOTS)
    store_choices(experts_RK, weights_RK, row, tl.num_programs(0), experts, weights, CHOICES, PLACES)


@triton.jit
def few_logits_kernel(
    x, update, norm, router, logits, normed, total, num_experts, depth, eps,
    ROWS: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_NORM: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Read weights before waiting for the last kernel, as `few_rows` does; the first program keeps the rows."""
    if OVERLAPS:
        gdc_launch_dependents()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, DEPTH)
    has_expert, inside = expert < num_experts, column < depth
    place = router + expert[:, None] * depth + column[None, :]
    router_ED = tl.load(place, mask=has_expert[:, None] & inside[None, :], other=0.0)
    if HAS_NORM:
        scaling_D = tl.load(norm + column, mask=inside, other=0.0)
    if OVERLAPS:
        gdc_wait()
    for row in tl.static_range(ROWS):
        row_D = summed_row(x, update, total, row, depth, column, inside, HAS_UPDATE)
        if HAS_NORM:
            scaled = normed_row(row_D, scaling_D, depth, eps).to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(normed + row * depth + column, scaled, mask=inside)
            row_D = scaled.to(tl.float32)
        result_E = tl.sum(router_ED.to(tl.float32) * row_D[None, :], 1)
        tl.store(logits + row * num_experts + expert, result_E, mask=has_expert)
