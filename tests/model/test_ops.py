from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.model.kernels import reference
from stoker.model.kernels.cross_entropy import ChunkBytes, chunked_cross_entropy
from stoker.model.kernels.kernel_set import MissingKernel, resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import Rotation
from stoker.model.kernels.sequences import group_by_length, pack_sequences

BOTH = pytest.mark.parametrize("ops", [Ops(), Ops(deterministic=True)], ids=["reference", "deterministic"])


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_kernels_that_are_not_built_are_an_error() -> None:
    name: Any = "fast"
    with pytest.raises(MissingKernel, match="unknown 'fast'; allowed: auto, reference, fused"):
        Ops(name)


@pytest.mark.parametrize("name", ["flash", "cudnn", "stoker", "quick"])
def test_an_attention_that_is_not_built_is_an_error(name: str) -> None:
    with pytest.raises(MissingKernel, match=f"attention: .*'{name}'"):
        Ops().attention(name)


def test_auto_follows_the_table() -> None:
    assert (resolve_kernels("auto", "cpu"), resolve_kernels("auto", "cuda")) == ("reference", "fused")
    assert (Ops().attention("auto"), Ops(deterministic=True).attention("auto")) == ("sdpa", "stoker")


def test_fused_kernels_on_a_cpu_are_refused() -> None:
    with pytest.raises(MissingKernel, match="'fused' needs a CUDA device, not 'cpu'"):
        resolve_kernels("fused", "cpu")


def test_ops_with_the_same_choice_are_equal() -> None:
    assert Ops() == Ops()
    assert Ops() != Ops(deterministic=True)


CASES: dict[str, tuple[Callable[[Ops], object], str]] = {
    "linear": (lambda ops: ops.linear(seeded(3, 4), seeded(5, 6)), r"weight \(5, 6\) does not fit x \(3, 4\)"),
    "embedding": (
        lambda ops: ops.embedding(torch.zeros(2, 2, dtype=torch.int64), seeded(5, 6)),
        r"packed in one dim, not \(2, 2\)",
    ),
    "rms_norm": (lambda ops: ops.rms_norm(seeded(3, 4), seeded(5), 1e-5), r"weight \(5,\) does not fit"),
    "add_rms_norm": (lambda ops: ops.add_rms_norm(seeded(3, 4), seeded(2, 4), seeded(4), 1e-5), r"residual \(2, 4\)"),
    "swiglu": (lambda ops: ops.swiglu(seeded(3, 5)), "must hold gate and up"),
    "rotate": (
        lambda ops: ops.rotate(seeded(3, 2, 4), seeded(3, 1, 4), Rotation(seeded(2, 1, 4), seeded(2, 1, 4))),
        r"cos \(2, 1, 4\) do not fit",
    ),
    "packed_attention": (
        lambda ops: ops.packed_attention(
            seeded(3, 2, 4), seeded(3, 1, 4), seeded(3, 1, 4), pack_sequences(torch.tensor([0, 2])), 1.0
        ),
        "cu_seqlens ends at 2, but there are 3 tokens",
    ),
    "heads": (
        lambda ops: ops.packed_attention(
            seeded(3, 3, 4), seeded(3, 2, 4), seeded(3, 2, 4), pack_sequences(torch.tensor([0, 3])), 1.0
        ),
        r"q \(3, 3, 4\), k \(3, 2, 4\)",
    ),
    "cross_entropy": (
        lambda ops: ops.cross_entropy(seeded(3, 4), seeded(5, 4), torch.zeros(2), torch.ones(3)),
        r"targets \(2,\)",
    ),
}


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES.keys())
def test_shapes_that_do_not_fit_are_named(call: Callable[[Ops], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Ops())


@pytest.mark.parametrize("bounds", [[0], [1, 3], [0, 2, 2], [0, 3, 2]])
def test_bounds_that_do_not_rise_from_zero_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        pack_sequences(torch.tensor(bounds))


def naive_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds: list[int], scale: float, window: int | None
) -> Tensor:
    outputs = []
    for begin, end in itertools.pairwise(bounds):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        group = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        place = torch.arange(end - begin)
        hidden = place[None, :] > place[:, None]
        if window is not None:
            hidden |= place[None, :] <= place[:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs)


@BOTH
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("bounds", [[0, 20], [0, 10, 20], [0, 3, 20, 21, 90]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_and_its_gradients_follow_the_formula(
    ops: Ops, window: int | None, bounds: list[int], dtype: torch.dtype
) -> None:
    leaves = [seeded(bounds[-1], heads, 10, dtype=dtype).requires_grad_() for heads in (6, 2, 2)]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = naive_attention(exact[0], exact[1], exact[2], bounds, 0.3, window)
    q, k, v = leaves
    result = ops.packed_attention(q, k, v, pack_sequences(torch.tensor(bounds)), 0.3, window)
    grad = seeded(*result.shape)
    result.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).float())
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=tolerance)
    for leaf, other in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.float(), other.grad, rtol=tolerance, atol=tolerance)


def test_sequences_too_long_for_products_take_the_other_way() -> None:
    q, k, v = (seeded(1100, heads, 16, dtype=torch.bfloat16) for heads in (2, 1, 1))
    result = Ops().packed_attention(q, k, v, pack_sequences(torch.tensor([0, 1100])), 0.3)
    expected = naive_attention(q.float(), k.float(), v.float(), [0, 1100], 0.3, None)
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=0.03)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_swiglu_follow_their_formulas(ops: Ops, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    x, residual, weight = seeded(7, 20, dtype=dtype), seeded(7, 20, dtype=dtype).flip(0), seeded(20, dtype=dtype)
    total = (x + residual).float()
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected = total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    torch.testing.assert_close(normed.float(), expected, rtol=0, atol=tolerance)
    assert torch.equal(summed, x + residual)
    gate, up = x.float().chunk(2, -1)
    torch.testing.assert_close(ops.swiglu(x).float(), F.silu(gate) * up, rtol=0, atol=tolerance)


@BOTH
def test_rotation_keeps_lengths_and_position_zero(ops: Ops) -> None:
    q, k = seeded(2, 4, 8), seeded(2, 2, 8)
    angles = torch.tensor([[0.0, 0, 0, 0], [1.0, 0.5, 0.1, 3]])
    cos, sin = (
        torch.cat((angles.cos(), angles.cos()), -1)[:, None],
        torch.cat((-angles.sin(), angles.sin()), -1)[:, None],
    )
    rotated, _ = ops.rotate(q, k, Rotation(cos, sin))
    assert torch.equal(rotated[0], q[0])
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(rotated[1, :, 0], q[1, :, 0] * angles[1, 0].cos() - q[1, :, 4] * angles[1, 0].sin())


def test_neighbours_in_one_product_rotate_as_they_do_apart() -> None:
    both = seeded(5, 6, 8)
    q, k = both[:, :4], both[:, 4:]
    cos, sin = seeded(5, 1, 8), seeded(5, 1, 8).flip(0)
    with torch.inference_mode():
        together = Ops().rotate(q, k, Rotation(cos, sin))
        apart = Ops().rotate(q.clone(), k.clone(), Rotation(cos, sin))
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


CHUNKS = [ChunkBytes(), ChunkBytes(1, 1), ChunkBytes(1 << 20, 33 * 4 * 16)]


@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=["one", "16 rows each", "16 rows of softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_equals_torch_whatever_the_chunk(chunk_bytes: ChunkBytes, dtype: torch.dtype) -> None:
    leaves = [seeded(70, 12, dtype=dtype).requires_grad_(), seeded(33, 12, dtype=dtype).requires_grad_()]
    exact = [leaf.detach().float().clone().requires_grad_() for leaf in leaves]
    targets, weights = torch.arange(70) % 33, (torch.arange(70) % 3).float()
    expected = F.cross_entropy(exact[0] @ exact[1].t(), targets, reduction="none")
    (expected * weights).sum().div(10).backward()
    hidden, table = leaves
    known = targets.masked_fill(weights == 0, -100)
    loss_sum, num_targets, logprobs = chunked_cross_entropy(
        F.linear, reference.sum_rows, hidden, table, known, weights, 0, None, chunk_bytes
    )
    loss_sum.div(10).backward()
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    assert num_targets.item() == weights.sum().item()
    torch.testing.assert_close(
        loss_sum, (expected * weights).sum(), rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0
    )
    torch.testing.assert_close(logprobs, -(expected * (weights > 0)).detach(), rtol=0, atol=tolerance)
    for leaf, other in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.float(), other.grad, rtol=0, atol=tolerance * 5)


def test_a_small_scale_reaches_bfloat16_gradients_unrounded() -> None:
    """1 / (number of tokens) in bfloat16 would be wrong by up to 0.4 %, for every gradient alike."""
    leaves = [
        seeded(40, 12, dtype=torch.bfloat16).requires_grad_(),
        seeded(33, 12, dtype=torch.bfloat16).requires_grad_(),
    ]
    result = Ops().cross_entropy(leaves[0], leaves[1], torch.arange(40) % 33, torch.ones(40))
    plain = torch.autograd.grad(result.loss_sum, leaves[0], retain_graph=True)[0].float()
    (result.loss_sum / 1234.5).backward()
    assert leaves[0].grad is not None
    assert (leaves[0].grad.float() * 1234.5).sum().item() == pytest.approx(plain.sum().item(), rel=1e-2)
    assert (leaves[0].grad.float().abs().sum() * 1234.5 / plain.abs().sum()).item() == pytest.approx(1, abs=3e-4)


def test_ranks_with_unlike_parts_of_the_table_cut_the_same_chunks() -> None:
    """Each chunk has sums over the ranks."""

    def chunks(rows: int, most_rows: int | None = None) -> list[int]:
        found: list[int] = []

        def product(a: Tensor, b: Tensor) -> Tensor:
            found.append(len(a))
            return a @ b.t()

        hidden, table, targets = seeded(100, 4), seeded(rows, 4), torch.zeros(100, dtype=torch.int64)
        sizes = ChunkBytes(logits=4 * 20 * 48, softmax=4 * 20 * 16)
        row_sum = partial(torch.sum, dim=-1, keepdim=True)
        rest: Any = torch.ones(100), 0, None, sizes, most_rows
        chunked_cross_entropy(product, row_sum, hidden, table, targets, *rest)
        return found

    assert chunks(20) == chunks(7, most_rows=20) == [48, 48, 4]
    assert chunks(7) != chunks(20)


def test_cross_entropy_of_no_target_is_zero_with_gradients_of_zero() -> None:
    leaves = [seeded(4, 6).requires_grad_(), seeded(9, 6).requires_grad_()]
    result = Ops().cross_entropy(leaves[0], leaves[1], torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    result.loss_sum.backward()
    assert (result.loss_sum.item(), result.num_targets.item()) == (0.0, 0.0)
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_cross_entropy_without_gradient_gives_the_same_numbers() -> None:
    hidden, table = seeded(40, 6).requires_grad_(), seeded(9, 6).requires_grad_()
    targets, weights = torch.arange(40) % 9, torch.ones(40)
    with_grad = Ops().cross_entropy(hidden, table, targets, weights)
    with torch.no_grad():
        without = Ops().cross_entropy(hidden, table, targets, weights)
    assert not without.loss_sum.requires_grad
    assert torch.equal(with_grad.logprobs, without.logprobs)


def test_sequences_of_similar_length_are_padded_together() -> None:
    lengths = [100, 30, 60, 5, 90, 3]
    assert group_by_length([0, 1, 2, 4, 5], lengths) == [[0, 2, 4], [1], [5]]
    packed = pack_sequences(torch.tensor([0, 3, 8, 9]))
    assert [(group.num_sequences, group.padded_len) for group in packed.padded.groups] == [(2, 5), (1, 1)]
    assert packed.padded.groups[0].token_rows is not None
    assert packed.padded.groups[0].token_rows.tolist() == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7]
    assert packed.padded.places is not None
    assert packed.padded.places.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert pack_sequences(torch.tensor([0, 4, 8])).padded.places is None
