"""Products, and output layer with loss, against their twins; rows of the deterministic product in any batch."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from stoker.model.kernels import reference
from stoker.model.kernels.grad_destination import set_grad_destination
from testing.model.interpreted import Interpreted
from testing.model.leave import leave

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Shape = tuple[int, int, int]
GPU_PRODUCTS: list[Shape] = [(0, 64, 64), (1, 4096, 1024), (3, 6144, 512), (17, 100, 96), (64, 1000, 256), (65, 257,
    320), (300, 520, 1024), (1000, 96, 48)]  # fmt: skip
SMALL_PRODUCTS: list[Shape] = [(0, 4, 16), (3, 5, 40), (66, 7, 32)]


def fresh(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    drawn: Tensor = torch.randn(shape, dtype=F32) / shape[-1] ** 0.25
    return drawn.to(dtype).to(device)


def whole_numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randint(-8, 9, shape).to(dtype).to(device)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}[dtype]
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(result.double(), expected.double(), rtol=0, atol=tolerance * scale)


def check_tiled(device: str, shape: Shape, dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import tiled_linear

    rows, outputs, depth = shape
    x, weight = fresh(rows, depth, dtype=dtype, device=device), fresh(outputs, depth, dtype=dtype, device=device)
    result = tiled_linear.linear(x.requires_grad_(), weight.requires_grad_(), None)
    close(result, exact(x, weight), dtype)
    outer = fresh(rows, outputs, dtype=dtype, device=device)
    found = torch.autograd.grad(result, (x, weight), outer)
    close(found[0], outer.double() @ weight.double(), dtype)
    close(found[1], outer.double().t() @ x.double(), dtype)


def check_invariance(device: str, outputs: int, depth: int, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that each row has the same bits alone, in any batch and at any place.

    Whole numbers where the kernel is interpreted: the BLAS adds in an order that depends on the rows beside.
    """
    from stoker.model.kernels.fused import tiled_linear

    drawn = whole_numbers if device == "cpu" else fresh
    x = drawn(max(counts), depth, dtype=dtype, device=device)
    weight = drawn(outputs, depth, dtype=dtype, device=device)
    whole = tiled_linear.product(x, weight)
    odd = torch.empty(weight.numel() + 1, dtype=dtype, device=device)[1:].view_as(weight).copy_(weight)
    assert torch.equal(tiled_linear.product(x, odd), whole), "weight at an odd address"
    for count in counts:
        assert torch.equal(tiled_linear.product(x[:count], weight), whole[:count]), f"first {count} rows"
        assert torch.equal(tiled_linear.product(x[-count:], weight), whole[-count:]), f"last {count} rows"


def check_gradient_places(device: str) -> None:
    """Check that weights' gradients go into the buffers of their owner, and are those very buffers."""
    from stoker.model.kernels.fused import kernels

    x = fresh(6, 32, dtype=F32, device=device)
    weights = [torch.nn.Parameter(fresh(rows, 32, dtype=F32, device=device)) for rows in (32, 9)]
    places = [torch.full_like(weight, float("nan"), requires_grad=False) for weight in weights]
    for weight, place in zip(weights, places, strict=True):
        set_grad_destination(weight, place.detach)
    hidden = kernels.linear(x, weights[0], None)
    targets, ones = torch.arange(6, device=device), torch.ones(6, device=device)
    kernels.cross_entropy(hidden, weights[1], targets, ones, 0, None)[0].backward()
    twins = [weight.detach().double().requires_grad_() for weight in weights]
    F.cross_entropy(x.double() @ twins[0].t() @ twins[1].t(), targets, reduction="sum").backward()
    for weight, place, twin in zip(weights, places, twins, strict=True):
        assert weight.grad is not None
        assert weight.grad.data_ptr() == place.data_ptr()
        close(place, twin.grad, F32)  # type: ignore[arg-type]


def check_cross_entropy(
    device: str, shape: Shape, dtype: torch.dtype, deterministic: bool, rows_each: int, on_host: bool
) -> None:
    """Check loss and gradients; every third token has weight 0 and an invalid target.

    `shape`: tokens, vocabulary, hidden size.
    """
    from stoker.model.kernels.fused import cross_entropy, linear, tiled_linear

    tokens, vocab_size, depth = shape
    leaves = [fresh(tokens, depth, dtype=dtype, device=device), fresh(vocab_size, depth, dtype=dtype, device=device)]
    weights = (torch.arange(tokens) % 3).float()
    targets = torch.randint(vocab_size, (tokens,)).masked_fill(weights == 0, -100)
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    each = F.cross_entropy(wide[0] @ wide[1].t(), targets.to(device), reduction="none", ignore_index=-100)
    expected = (each * weights.to(device)).sum()
    wanted = torch.autograd.grad(expected / 7, wide)
    if not on_host:
        targets, weights = targets.to(device), weights.to(device)
    product = tiled_linear.product if deterministic else linear.plain_product
    leaves = [leaf.requires_grad_() for leaf in leaves]
    chunk_bytes = rows_each * dtype.itemsize * vocab_size
    loss, count, logprobs = cross_entropy.chunked_cross_entropy(
        product, leaves[0], leaves[1], targets, weights, 0, None, chunk_bytes
    )
    found = torch.autograd.grad(loss / 7, leaves, retain_graph=True)
    assert count.item() == weights.sum().item()
    close(logprobs, -each.detach(), dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5 if dtype is F32 else 1e-2, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)
    with pytest.raises(RuntimeError, match="backward ran before"):
        torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        again = cross_entropy.chunked_cross_entropy(
            product, leaves[0], leaves[1], targets, weights, 0, None, chunk_bytes
        )
    assert torch.equal(again[2], logprobs)


def check_parity(device: str, tokens: int, vocab_size: int, depth: int, dtype: torch.dtype) -> None:
    """Check that the trainer's logprobs have the bits of the engine's."""
    from stoker.model.kernels.fused import deterministic

    hidden = fresh(tokens, depth, dtype=dtype, device=device)
    table = fresh(vocab_size, depth, dtype=dtype, device=device)
    targets = torch.randint(vocab_size, (tokens,)).to(device)
    ones = torch.ones(tokens, device=device)
    trained = deterministic.cross_entropy(hidden.requires_grad_(), table, targets, ones, 0, None)[2]
    with torch.no_grad():
        for row in range(tokens):
            logits = deterministic.linear(hidden[row : row + 1], table, None)
            assert torch.equal(deterministic.log_softmax(logits)[0, targets[row]], trained[row])


def half_of_the_vocabulary(rank: int, folder: str, tokens: int, vocab_size: int, depth: int, device: str) -> None:
    """Run one of two ranks and write its loss, logprobs and gradients to a file."""
    from stoker.model.kernels.fused import cross_entropy, linear

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    half = vocab_size // 2
    hidden, table, targets, weights = torch.load(f"{folder}/inputs.pt")
    leaves = [hidden.to(device), table[rank * half : (rank + 1) * half].to(device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    loss, _, logprobs = cross_entropy.chunked_cross_entropy(
        linear.plain_product, leaves[0], leaves[1], targets, weights, rank * half, torch.distributed.group.WORLD
    )
    gradients = torch.autograd.grad(loss, leaves)
    torch.save([x.cpu() for x in (loss.detach(), logprobs, *gradients)], f"{folder}/{rank}.pt")
    leave()


def check_group(device: str, tokens: int, vocab_size: int, depth: int) -> None:
    """Check that two ranks with half of the table each give the results of one rank."""
    hidden, table = fresh(tokens, depth, dtype=F32, device="cpu"), fresh(vocab_size, depth, dtype=F32, device="cpu")
    targets, weights = torch.randint(vocab_size, (tokens,)), torch.rand(tokens)
    leaves = [hidden.double().requires_grad_(), table.double().requires_grad_()]
    each = F.cross_entropy(leaves[0] @ leaves[1].t(), targets, reduction="none")
    wanted = torch.autograd.grad((each * weights).sum(), leaves)
    with tempfile.TemporaryDirectory() as folder:
        torch.save([hidden, table, targets, weights], f"{folder}/inputs.pt")
        arguments = (folder, tokens, vocab_size, depth, device)
        spawn(half_of_the_vocabulary, arguments, nprocs=2)
        both = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    for loss, logprobs, grad_hidden, _ in both:
        close(loss, (each * weights).sum(), F32)
        close(logprobs, -each, F32)
        close(grad_hidden, wanted[0], F32)
    close(torch.cat([gradients[3] for gradients in both]), wanted[1], F32)


LOSSES: list[Shape] = [(0, 64, 64), (1, 100, 64), (70, 1000, 128), (513, 5003, 96), (300, 32000, 256)]
SMALL_LOSSES: list[Shape] = [(0, 4, 16), (1, 5, 16), (140, 9, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_tiled_products_and_their_gradients_agree(shape: Shape, dtype: torch.dtype) -> None:
    check_tiled("cuda", shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 328), (20000, 512)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_a_row_of_a_tiled_product_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_invariance("cuda", *shape, (1, 2, 7, 16, 63, 64, 65, 128, 200, 1024, 2050), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("rows_each", [128, 10000])
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("shape", LOSSES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_output_layer_and_loss_agree(
    shape: Shape, dtype: torch.dtype, deterministic: bool, rows_each: int, on_host: bool
) -> None:
    check_cross_entropy("cuda", shape, dtype, deterministic, rows_each, on_host)


@pytest.mark.gpu
def test_gradients_of_weights_go_where_their_owner_wants_them() -> None:
    check_gradient_places("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_logprobs_of_loss_and_of_log_softmax_have_the_same_bits(dtype: torch.dtype) -> None:
    check_parity("cuda", 150, 32003, 256, dtype)


def test_products_agree_when_interpreted(interpreted: Interpreted) -> None:
    tiled = [(check_tiled, ("cpu", shape, F32)) for shape in SMALL_PRODUCTS]
    tiled.append((check_tiled, ("cpu", (40, 24, 64), F16)))
    interpreted.run([*tiled, (check_invariance, ("cpu", 7, 40, (1, 2, 66), F32))])


def test_losses_agree_when_interpreted(interpreted: Interpreted) -> None:
    calls = [
        (check_cross_entropy, ("cpu", shape, F32, deterministic, 128, True))
        for shape in SMALL_LOSSES
        for deterministic in (False, True)
    ]
    calls.append((check_gradient_places, ("cpu",)))  # type: ignore[arg-type]
    calls.append((check_group, ("cpu", 5, 12, 16)))  # type: ignore[arg-type]
    interpreted.run([*calls, (check_parity, ("cpu", 3, 9, 16, F32))])


def test_the_twin_of_products_is_torch() -> None:
    x, weight = fresh(3, 8, dtype=F32, device="cpu"), fresh(5, 8, dtype=F32, device="cpu")
    close(reference.linear(x, weight, None), exact(x, weight), F32)
