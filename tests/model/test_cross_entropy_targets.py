"""Targets outside of the vocabulary: their logprob is NaN, and so is the loss.

A target of weight 0 may be any number.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stoker.model.kernels.ops import Ops
from testing.model.interpreted import Interpreted
from testing.model.leave import leave

TOKENS, VOCAB, DEPTH = 6, 10, 5
NO_TOKENS = [-1, -100, VOCAB, 2**31, 2**32 + 3, -(2**32) + 3]
"""The last two have the lower half of a token's bits."""


def loss_of(
    ops: Ops, rank: int, group: dist.ProcessGroup | None, target: int, weight: float, device: str
) -> torch.Tensor:
    """Return logprobs and loss where one of the targets is `target`."""
    torch.manual_seed(0)
    hidden, table = torch.randn(TOKENS, DEPTH), torch.randn(VOCAB, DEPTH)
    if group is not None:
        half = VOCAB // 2
        table = table[rank * half : (rank + 1) * half]
    hidden, table = hidden.to(device).requires_grad_(), table.contiguous().to(device).requires_grad_()
    targets, weights = torch.arange(TOKENS) + 2, torch.ones(TOKENS)
    targets[3], weights[3] = target, weight
    result = ops.cross_entropy(hidden, table, targets, weights, first_token=rank * VOCAB // 2, group=group)
    return torch.cat([result.logprobs.detach().cpu(), result.loss_sum.detach().cpu().reshape(1)])


def check(found: torch.Tensor, plain: torch.Tensor) -> None:
    """Check `found` with a wrong target in row 3 against `plain` with a right one."""
    assert found[3].isnan()
    assert found[TOKENS].isnan()
    for row in (0, 1, 2, 4, 5):
        assert found[row] == plain[row]


def check_alone(kernels: str, device: str) -> None:
    for deterministic in (False, True):
        ops = Ops(kernels, deterministic)  # type: ignore[arg-type]
        plain = loss_of(ops, 0, None, 5, 1.0, device)
        assert plain.isfinite().all()
        ignored = loss_of(ops, 0, None, 5, 0.0, device)
        assert ignored[3] == 0
        for target in NO_TOKENS:
            check(loss_of(ops, 0, None, target, 1.0, device), plain)
            assert torch.equal(loss_of(ops, 0, None, target, 0.0, device), ignored)


def one_of_two(rank: int, folder: str, kernels: str, device: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ops, group = Ops(kernels), dist.group.WORLD  # type: ignore[arg-type]
    plain = loss_of(ops, rank, group, 5, 1.0, device)
    whole = loss_of(ops, 0, None, 5, 1.0, device)
    torch.testing.assert_close(plain, whole, rtol=1e-5, atol=1e-5)
    for target in NO_TOKENS:
        check(loss_of(ops, rank, group, target, 1.0, device), plain)
        assert loss_of(ops, rank, group, target, 0.0, device).isfinite().all()
    leave()


def check_two_ranks(kernels: str, device: str) -> None:
    """Check two ranks with half of the table each: a target of the other rank is right, one of neither is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_of_two, (folder, kernels, device), nprocs=2)


def test_reference() -> None:
    check_alone("reference", "cpu")


def test_reference_on_two_ranks() -> None:
    check_two_ranks("reference", "cpu")


def test_fused_interpreted(interpreted: Interpreted) -> None:
    interpreted.run([(check_alone, ("fused", "cpu")), (check_two_ranks, ("fused", "cpu"))])


@pytest.mark.gpu
def test_fused() -> None:
    check_alone("fused", "cuda")


@pytest.mark.gpu
def test_fused_on_two_ranks() -> None:
    check_two_ranks("fused", "cuda")
