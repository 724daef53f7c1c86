"""Norms, SwiGLU, rotation with and without cache writes, embedding and log-softmax against their twins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import reference
from stoker.model.kernels.rotation import CacheLayer, Rotation
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
GPU_ROWS = [(0, 64), (1, 1), (1, 4096), (3, 100), (130, 1024), (257, 2560), (4097, 128), (33, 5120), (7, 16384)]
SMALL_ROWS = [(0, 8), (1, 1), (3, 20), (5, 33)]
GPU_HEADS = [
    (0, 4, 2, 64),
    (1, 32, 8, 128),
    (5, 3, 1, 64),
    (129, 16, 8, 128),
    (33, 9, 3, 80),
    (7, 12, 12, 12),
    (6, 6, 2, 10),
]
SMALL_HEADS = [(0, 4, 2, 8), (3, 9, 3, 8), (2, 1, 1, 10), (19, 2, 1, 4)]


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return new random numbers at each call."""
    return torch.randn(shape, dtype=F32).to(dtype).to(device)


def poison(device: str) -> None:
    """Fill the memory of the next results with nans, so that values which a kernel does not write are detected."""
    if device == "cuda":
        blocks = [torch.full((2**k,), float("nan"), device=device) for k in range(6, 24)]
        del blocks


def close(result: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    scale = max(1.0, float(expected.detach().float().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        result.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype] * factor * scale, check_device=False
    )
    assert result.shape == expected.shape


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor], outer: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, leaves, outer))


def check_rms_norm(device: str, rows: tuple[int, int], dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import norm

    x, weight = fresh(*rows, dtype=dtype, device=device), fresh(rows[1], dtype=dtype, device=device)
    poison(device)
    with torch.no_grad():
        close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5), dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    outer = fresh(*rows, dtype=dtype, device=device)
    result, expected = norm.rms_norm(leaves[0], leaves[1], 1e-5), reference.rms_norm(exact[0], exact[1], 1e-5)
    found, wanted = gradients((result,), leaves, [outer]), gradients((expected,), exact, [outer.float()])
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)


def check_add_rms_norm(device: str, rows: tuple[int, int], dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import norm

    leaves = [fresh(*rows, dtype=dtype, device=device) for _ in range(2)] + [fresh(rows[1], dtype=dtype, device=device)]
    total = leaves[0] + leaves[1]
    expected = reference.rms_norm(total.float(), leaves[2].float(), 1e-6)
    poison(device)
    with torch.no_grad():
        normed, summed = norm.add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-6)
    assert torch.equal(summed, total)
    close(normed, expected, dtype)
    outer = [fresh(*rows, dtype=dtype, device=device) for _ in range(2)]
    for used in (slice(0, 2), slice(0, 1), slice(1, 2)):  # the norm, the sum, or both have a gradient
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        poison(device)
        results = norm.add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-6)
        wanted = reference.add_rms_norm(exact[0], exact[1], exact[2], 1e-6)
        both = 2 if used == slice(1, 2) else 3  # the weight has no gradient from the sum
        found = gradients(tuple(results[used]), leaves[:both], outer[used])
        others = gradients(tuple(wanted[used]), exact[:both], [grad.float() for grad in outer[used]])
        for one, other in zip(found, others, strict=True):
            close(one, other, dtype, 2)


def check_swiglu(device: str, rows: tuple[int, int], dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import swiglu

    gate_up = fresh(rows[0], 2 * rows[1], dtype=dtype, device=device)
    exact = gate_up.float().requires_grad_()
    expected = reference.swiglu(exact)
    poison(device)
    with torch.no_grad():
        close(swiglu.swiglu(gate_up), expected, dtype)
    outer = fresh(*rows, dtype=dtype, device=device)
    result = swiglu.swiglu(gate_up.requires_grad_())
    (found,) = gradients((result,), [gate_up], [outer])
    (wanted,) = gradients((expected,), [exact], [outer.float()])
    close(found, wanted, dtype, 2)


@dataclass(frozen=True)
class Rotated:
    """Inputs of one rotation: q, k and v are slices of one product."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    heads: tuple[int, int, int]

    @staticmethod
    def make(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool) -> Rotated:
        tokens, num_heads, num_kv_heads, head_dim = shape
        angles = torch.rand(tokens, 1, head_dim // 2, device=device) * 6
        norms = [fresh(head_dim, dtype=dtype, device=device) if has_norm else None for _ in range(2)]
        halves = (angles.cos(), angles.cos(), -angles.sin(), angles.sin())
        cos, sin = torch.cat(halves, -1).view(tokens, 2, head_dim).split(1, 1)  # as one gather of the table gives them
        return Rotated(
            fresh(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device),
            cos,
            sin,
            (norms[0], norms[1]),
            (num_heads, num_kv_heads, num_kv_heads),
        )

    def exact(self) -> Rotated:
        norms = [None if norm is None else norm.detach().float() for norm in self.norms]
        return Rotated(self.qkv.detach().float(), self.cos, self.sin, (norms[0], norms[1]), self.heads)

    def leaves(self) -> list[Tensor]:
        return [leaf.requires_grad_() for leaf in (self.qkv, *self.norms) if leaf is not None]

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.split(self.heads, 1)
        return q, k, v


def check_rotate(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool) -> None:
    from stoker.model.kernels.fused import rotation

    case = Rotated.make(device, shape, dtype, has_norm)
    exact = case.exact()
    leaves, exact_leaves = case.leaves(), exact.leaves()
    poison(device)
    results = rotation.rotate(*case.parts()[:2], Rotation(case.cos, case.sin, *case.norms, 1e-6))
    wanted = reference.rotate(*exact.parts()[:2], Rotation(exact.cos, exact.sin, *exact.norms, 1e-6))
    for one, other in zip(results, wanted, strict=True):
        close(one, other, dtype)
    outer = [fresh(*result.shape, dtype=dtype, device=device) for result in results]
    found = gradients(results, leaves, outer)
    others = gradients(wanted, exact_leaves, [grad.float() for grad in outer])
    for one, other in zip(found, others, strict=True):
        close(one, other, dtype, 2)


@dataclass(frozen=True)
class Written:
    slots: Tensor
    slot_rows: Tensor
    num_tokens: int


def check_rotate_and_write(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool, block_size: int
) -> None:
    from stoker.model.kernels.fused import rotation

    case = Rotated.make(device, shape, dtype, has_norm)
    tokens, _, num_kv_heads, head_dim = shape
    num_blocks, layers, layer = tokens // block_size + 3, 3, 1
    slots = torch.randperm(num_blocks * block_size)[:tokens].to(torch.int32)
    slots[1::3] = -1
    kept = slots >= 0
    cache = torch.full((num_blocks, layers, 2, block_size, num_kv_heads, head_dim), float("nan")).to(device, dtype)
    expected_cache = cache.clone()
    exact = case.exact()
    with torch.no_grad():
        wanted_q, wanted_k = reference.rotate(*exact.parts()[:2], Rotation(exact.cos, exact.sin, *exact.norms, 1e-6))
        poison(device)
        on_device = slots.to(device)
        q, k, v = case.parts()
        into = CacheLayer(cache, layer, Written(on_device, on_device, tokens))  # type: ignore[arg-type]
        result = rotation.rotate_and_write(q, k, v, Rotation(case.cos, case.sin, *case.norms, 1e-6), into)
        block, offset = slots[kept].long() // block_size, slots[kept].long() % block_size
        expected_cache[block, layer, 0, offset] = wanted_k[kept.to(device)].to(dtype)
        expected_cache[block, layer, 1, offset] = v[kept.to(device)]
    close(result[kept.to(device)], wanted_q[kept.to(device)], dtype)
    close(cache.nan_to_num(-7.0), expected_cache.nan_to_num(-7.0), dtype)


def check_log_softmax(device: str, rows: tuple[int, int], dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import log_softmax

    logits = fresh(*rows, dtype=dtype, device=device) * 4
    poison(device)
    close(log_softmax.log_softmax(logits), reference.log_softmax(logits), F32)


DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
ROWS = pytest.mark.parametrize("rows", GPU_ROWS, ids=str)
HEADS = pytest.mark.parametrize("shape", GPU_HEADS, ids=str)
NORM = pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])


@pytest.mark.gpu
@DTYPES
@ROWS
def test_rms_norm_and_its_gradients_agree(rows: tuple[int, int], dtype: torch.dtype) -> None:
    check_rms_norm("cuda", rows, dtype)


@pytest.mark.gpu
@DTYPES
@ROWS
def test_the_norm_of_a_sum_and_its_gradients_agree(rows: tuple[int, int], dtype: torch.dtype) -> None:
    check_add_rms_norm("cuda", rows, dtype)


@pytest.mark.gpu
@DTYPES
@ROWS
def test_swiglu_and_its_gradients_agree(rows: tuple[int, int], dtype: torch.dtype) -> None:
    check_swiglu("cuda", rows, dtype)


@pytest.mark.gpu
@DTYPES
@HEADS
@NORM
def test_rotation_and_its_gradients_agree(shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool) -> None:
    check_rotate("cuda", shape, dtype, has_norm)


@pytest.mark.gpu
@DTYPES
@HEADS
@NORM
@pytest.mark.parametrize("block_size", [1, 16])
def test_rotated_keys_and_values_go_to_their_slots_alone(
    shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool, block_size: int
) -> None:
    check_rotate_and_write("cuda", shape, dtype, has_norm, block_size)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("rows", [*GPU_ROWS, (3, 128256), (2, 151936)], ids=str)
def test_log_softmax_agrees(rows: tuple[int, int], dtype: torch.dtype) -> None:
    check_log_softmax("cuda", rows, dtype)


def test_kernels_of_rows_agree_when_interpreted(interpreted: Interpreted) -> None:
    checks = (check_rms_norm, check_add_rms_norm, check_swiglu, check_log_softmax)
    dtypes = {check_swiglu: F32, check_log_softmax: BF16}
    interpreted.run((check, ("cpu", rows, dtypes.get(check, F32))) for check in checks for rows in SMALL_ROWS)


def test_rotations_agree_when_interpreted(interpreted: Interpreted) -> None:
    calls = [(check_rotate, ("cpu", shape, F32, norm)) for shape in SMALL_HEADS for norm in (False, True)]
    writes = [(check_rotate_and_write, ("cpu", shape, F32, norm, 4)) for shape in SMALL_HEADS for norm in (False, True)]
    interpreted.run([*calls, *writes])
