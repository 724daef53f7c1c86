"""The reference kernels, with C in place of what lies between a decoder's products in bfloat16 without gradient.

torch needs about forty operations per layer for it, each of which reads and writes its rows and costs some
microseconds; for one row that takes as long as the products. The C kernels need few calls, round where torch rounds
and read keys and values where they lie. Products are C, too, by what the processor has (`product_kinds`): with AMX
those of few rows, which read a weight as it is stored 1.3 to 1.5 times as fast as oneDNN reads a packed one; with AVX2
alone all of them, because neither oneDNN nor torch has a fast one. Their contract: a float sum, rounded once; a row's
bits depend neither on the other rows nor on the threads.

What the C kernels do not take (a gradient, another dtype, heads of more than 256) goes to `reference`, their slow twin.
So does prompts' attention where the processor has no product in C for any number of rows: torch's is faster there.

T tokens, D hidden, F ffn, N heads, K kv heads, H head_dim, S sequences, B blocks.

Chosen by `choose_kernels` as the set `compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from stoker.model.kernels import composed, reference
from stoker.model.kernels.block_weights import BlockWeights, PreparedBlocks
from stoker.model.kernels.compiled.blocks import CompiledBlocks
from stoker.model.kernels.compiled.library import load_library
from stoker.model.kernels.compiled.product_kinds import PRODUCTS, Product
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.sequences import CachedSequence, DecodeGroup, PagedSequences

MAX_HEAD = 256
"""Largest head that the C kernels take."""

_C = load_library()
PRODUCT = PRODUCTS[_C.stoker_product_kind()]
"""The processor's; None: products go to the reference."""

fp8_linear = reference.fp8_linear
embedding = reference.embedding
linear_swiglu = composed.linear_swiglu
experts = composed.experts
norm_experts = composed.norm_experts
route = reference.route
dispatch = reference.dispatch
grouped_linear = reference.grouped_linear
combine = reference.combine
rotate = reference.rotate
packed_attention = reference.packed_attention
attend_runs = reference.attend_runs
attend_runs_backward = reference.attend_runs_backward
log_softmax = reference.log_softmax
cross_entropy = reference.cross_entropy
sample = reference.sample
line_squares = reference.line_squares
sum_of_squares = reference.sum_of_squares
adam_ = reference.adam_


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the C kernels may read these tensors."""
    return (
        x.dtype is weight.dtype is torch.bfloat16
        and x.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
    )


def pack(weight_ED: Tensor) -> Tensor:
    """Leave a weight as it is that a product in C reads."""
    return weight_ED if reads(weight_ED) else reference.pack(weight_ED)


def reads(weight_ED: Tensor) -> bool:
    """Whether the processor has a product in C that reads this weight."""
    return (
        PRODUCT is not None
        and weight_ED.dtype is torch.bfloat16
        and weight_ED.is_cpu
        and PRODUCT.divides(*weight_ED.shape)
        and not weight_ED.is_mkldnn
        and weight_ED.is_contiguous()
    )


def takes_product(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> bool:
    return (
        reads(weight_ED)
        and x_TD.dim() == 2
        and cast("Product", PRODUCT).takes(x_TD.shape[0])
        and takes(x_TD, weight_ED)
        and (bias_E is None or bias_E.dtype is torch.bfloat16)
    )


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    if takes_product(x_TD, weight_ED, bias_E):
        return product(x_TD, weight_ED, bias_E)
    return reference.linear(x_TD, weight_ED, bias_E)


def product(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x @ weight^T (+ bias) from the weight as it is stored. Raises MemoryError."""
    (num_rows, in_size), out_size = x_TD.shape, weight_ED.shape[0]
    y_TE = torch.empty(num_rows, out_size, dtype=torch.bfloat16)
    bias = None if bias_E is None else bias_E.data_ptr()
    is_done = _C.stoker_product(
        x_TD.data_ptr(), weight_ED.data_ptr(), bias, y_TE.data_ptr(), num_rows, in_size, out_size
    )
    check_memory(is_done, num_rows)
    return y_TE


def check_memory(is_done: int, num_rows: int) -> None:
    if not is_done:
        raise MemoryError(f"a product of {num_rows} rows has no memory for their order")


def norm_linear(
    x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, weight_ED: Tensor, bias_E: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Norm and product in one call; None where one of the two is not C's."""
    if not takes_product(x_TD, weight_ED, bias_E) or not takes_sum(x_TD, update_TD, norm_D):
        return None
    (num_rows, in_size), out_size = x_TD.shape, weight_ED.shape[0]
    y_TE, total_TD = torch.empty(num_rows, out_size, dtype=torch.bfloat16), empty_total(x_TD, update_TD)
    is_done = _C.stoker_norm_product(
        *sum_pointers(x_TD, update_TD, norm_D),
        eps,
        weight_ED.data_ptr(),
        None if bias_E is None else bias_E.data_ptr(),
        total_TD.data_ptr(),
        y_TE.data_ptr(),
        num_rows,
        in_size,
        out_size,
    )
    check_memory(is_done, num_rows)
    return y_TE, total_TD


def norm_linear_swiglu(
    x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, gate_up_FD: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Norm, product and SwiGLU in one call; None where one of them is not C's."""
    if not takes_product(x_TD, gate_up_FD, None) or not takes_sum(x_TD, update_TD, norm_D):
        return None
    (num_rows, in_size), width = x_TD.shape, gate_up_FD.shape[0] // 2
    out_TF, total_TD = torch.empty(num_rows, width, dtype=torch.bfloat16), empty_total(x_TD, update_TD)
    pointers = (*sum_pointers(x_TD, update_TD, norm_D), eps, gate_up_FD.data_ptr())
    is_done = _C.stoker_norm_product_swiglu(*pointers, total_TD.data_ptr(), out_TF.data_ptr(), num_rows, in_size, width)
    check_memory(is_done, num_rows)
    return out_TF, total_TD


def sum_pointers(x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor) -> tuple[int, int | None, int]:
    return x_TD.data_ptr(), None if update_TD is None else update_TD.data_ptr(), norm_D.data_ptr()


def empty_total(x_TD: Tensor, update_TD: Tensor | None) -> Tensor:
    """Memory for x + update; x itself where there is no update."""
    return x_TD if update_TD is None else torch.empty_like(x_TD)


def takes_sum(x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor) -> bool:
    return takes(x_TD, norm_D) and (update_TD is None or takes(update_TD, norm_D))


def prepare_blocks(weights: Sequence[BlockWeights]) -> PreparedBlocks | None:
    """All blocks in one call; None where the processor, a size or a dtype is not one that this was built for."""
    if PRODUCT is None or not PRODUCT.has_blocks or any(of_block.head_dim > MAX_HEAD for of_block in weights):
        return None
    products = (weight for of_block in weights for weight in of_block.products)
    rows = (row for of_block in weights for row in of_block.rows)
    if not all(map(reads, products)) or not all(row.dtype is torch.bfloat16 and row.is_contiguous() for row in rows):
        return None
    return CompiledBlocks(_C, weights, takes_prompts=all(attends_prompts(of_block.head_dim) for of_block in weights))


def attends_prompts(head_dim: int) -> bool:
    """Whether prompts' attention is C's for such heads."""
    return PRODUCT is not None and PRODUCT.has_blocks and head_dim % 16 == 0 and head_dim <= MAX_HEAD


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return linear(hidden_TD, weight_VD, None)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if not takes(x_TD, weight_D):
        return reference.rms_norm(x_TD, weight_D, eps)
    out_TD, size = torch.empty_like(x_TD), len(weight_D)
    _C.stoker_rms_norm(x_TD.data_ptr(), weight_D.data_ptr(), eps, out_TD.data_ptr(), x_TD.numel() // size, size)
    return out_TD


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not takes(x_TD, weight_D) or not takes(residual_TD, weight_D):
        return reference.add_rms_norm(x_TD, residual_TD, weight_D, eps)
    out_TD, total_TD, size = torch.empty_like(x_TD), torch.empty_like(x_TD), len(weight_D)
    _C.stoker_add_rms_norm(
        x_TD.data_ptr(),
        residual_TD.data_ptr(),
        weight_D.data_ptr(),
        eps,
        out_TD.data_ptr(),
        total_TD.data_ptr(),
        x_TD.numel() // size,
        size,
    )
    return out_TD, total_TD


def swiglu(gate_up_TF: Tensor) -> Tensor:
    if not takes(gate_up_TF, gate_up_TF):
        return reference.swiglu(gate_up_TF)
    width = gate_up_TF.shape[-1] // 2
    out_TF = torch.empty((*gate_up_TF.shape[:-1], width), dtype=torch.bfloat16)
    if width:
        _C.stoker_swiglu(gate_up_TF.data_ptr(), out_TF.data_ptr(), out_TF.numel() // width, width)
    return out_TF


def rotate_and_write(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer) -> Tensor:
    cache, q_norm_H, k_norm_H = into.cache, rotation.q_norm, rotation.k_norm
    if not takes(cache, cache if q_norm_H is None else q_norm_H) or not are_parts(q_TNH, k_TKH, v_TKH, rotation):
        return reference.rotate_and_write(q_TNH, k_TKH, v_TKH, rotation, into)
    (num_tokens, num_heads, head_dim), num_kv_heads = q_TNH.shape, k_TKH.shape[1]
    out_TNH = torch.empty(q_TNH.shape, dtype=torch.bfloat16)
    slot_rows = cast("PagedSequences", into.sequences).slot_rows[into.layer]
    _C.stoker_rotate_and_write(
        q_TNH.data_ptr(),
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        q_TNH.stride(0),
        rotation.cos.data_ptr(),
        rotation.sin.data_ptr(),
        rotation.cos.stride(0),
        q_norm_H.data_ptr() if q_norm_H is not None else None,
        k_norm_H.data_ptr() if k_norm_H is not None else None,
        rotation.eps,
        out_TNH.data_ptr(),
        cache.data_ptr(),
        slot_rows.data_ptr(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    return out_TNH


def are_parts(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation) -> bool:
    """Whether heads lie one after the other in bfloat16 rows of one stride, and the table's rows in float32 ones."""
    head_dim, cos, sin = q_TNH.shape[2], rotation.cos, rotation.sin
    strides = (q_TNH.stride(0), head_dim, 1)
    return (
        head_dim <= MAX_HEAD
        and q_TNH.dtype is k_TKH.dtype is v_TKH.dtype is torch.bfloat16
        and q_TNH.stride() == k_TKH.stride() == v_TKH.stride() == strides
        and cos.dtype is sin.dtype is torch.float32
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
    )


def paged_attention(
    q_TNH: Tensor, cache: Tensor, layer: int, sequences: PagedSequences, scale: float, window: int | None
) -> Tensor:
    if not takes(q_TNH, cache) or q_TNH.shape[2] > MAX_HEAD:
        return reference.paged_attention(q_TNH, cache, layer, sequences, scale, window)
    out_TNH = torch.empty_like(q_TNH)
    for group in sequences.decode:
        attend_group(q_TNH, out_TNH, cache, layer, group, scale, window)
    attend = attend_prompt if attends_prompts(q_TNH.shape[2]) else reference.attend_sequence
    for sequence in sequences.prefill:
        attend(q_TNH, out_TNH, cache, layer, sequence, scale, window)
    return out_TNH


def attend_prompt(
    q_TNH: Tensor,
    out_TNH: Tensor,
    cache: Tensor,
    layer: int,
    sequence: CachedSequence,
    scale: float,
    window: int | None,
) -> None:
    """Attend for the last tokens of one sequence, straight from the cache's blocks, into their rows of `out_TNH`."""
    block_size, num_kv_heads, head_dim = cache.shape[3:]
    begin, end = sequence.query_start, sequence.query_end
    _C.stoker_attend_prompt(
        q_TNH[begin:end].data_ptr(),
        out_TNH[begin:end].data_ptr(),
        cache.data_ptr(),
        sequence.block_rows[layer].data_ptr(),
        end - begin,
        sequence.seq_len,
        -(-sequence.seq_len // block_size),
        block_size,
        q_TNH.shape[1],
        num_kv_heads,
        head_dim,
        scale,
        window or 0,
    )


def attend_group(
    q_TNH: Tensor, out_TNH: Tensor, cache: Tensor, layer: int, group: DecodeGroup, scale: float, window: int | None
) -> None:
    """Attend for one new token per sequence, straight from the cache's blocks."""
    block_size, num_kv_heads, head_dim = cache.shape[3:]
    _C.stoker_attend(
        q_TNH.data_ptr(),
        out_TNH.data_ptr(),
        cache.data_ptr(),
        None if group.token_rows is None else group.token_rows.data_ptr(),
        group.block_rows[layer].data_ptr(),
        group.seq_lens.data_ptr(),
        group.num_sequences,
        group.padded_len // block_size,
        block_size,
        q_TNH.shape[1],
        num_kv_heads,
        head_dim,
        scale,
        window or 0,
    )
