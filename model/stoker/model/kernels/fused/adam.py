"""Adam and AdamW over flat buffers in one pass: clip factor, moments, masters and their cast.

30 bytes per element with bfloat16 parameters.

Changes masters and moments in place. Called through `Ops` by the trainer's optimizer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.adam import AdamStep

BLOCK = 2048


def adam_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameters: Tensor | None,
    rule: AdamStep,
    scale: Tensor | None,
) -> None:
    if not master.numel():
        return
    adam_kernel[(triton.cdiv(master.numel(), BLOCK),)](
        master,
        grad,
        exp_avg,
        exp_avg_sq,
        parameters,
        scale,
        master.numel(),
        rule.decay_end,
        rule.learning_rate / (1.0 - rule.beta1**rule.step),
        (1.0 - rule.learning_rate * rule.weight_decay) if rule.decoupled else rule.weight_decay,
        rule.beta2,
        1.0 - rule.beta1,
        1.0 - rule.beta2,
        1.0 / (1.0 - rule.beta2**rule.step) ** 0.5,
        rule.epsilon,
        DECOUPLED=rule.decoupled,
        HAS_SCALE=scale is not None,
        HAS_PARAMETERS=parameters is not None,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["decay_end"])
def adam_kernel(
    master, grad, exp_avg, exp_avg_sq, parameters, scale,
    size, decay_end, step_size, decay, beta2, one_minus_beta1, one_minus_beta2, inverse_root, eps,
    DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_PARAMETERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if HAS_SCALE:
        factor = tl.load(scale)
        if tl.abs(factor) >= float("inf"):
            return
        if factor != factor:
            return
    weights = tl.load(master + place, mask=inside, other=0.0)
    gradient = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        gradient *= factor
    if DECOUPLED:
        weights = tl.where(place < decay_end, weights * decay, weights)
    else:
        gradient = tl.where(place < decay_end, gradient + decay * weights, gradient)
    first = tl.load(exp_avg + place, mask=inside, other=0.0)
    second = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    first += one_minus_beta1 * (gradient - first)
    second = beta2 * second + one_minus_beta2 * gradient * gradient
    weights -= step_size * first / (tl.sqrt_rn(second) * inverse_root + eps)
    tl.store(exp_avg + place, first, mask=inside)
    tl.store(exp_avg_sq + place, second, mask=inside)
    tl.store(master + place, weights, mask=inside)
    if HAS_PARAMETERS:
        tl.store(parameters + place, weights.to(parameters.dtype.element_ty), mask=inside)
