"""A check of attention over runs of queries and keys against the plain formula, for any kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stoker.model.kernels.runs import Run, pack_runs

SCALE = 0.3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def plain(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, runs: list[Run], window: int | None) -> tuple[Tensor, Tensor]:
    """Return out_TNH and lse_TN in float64, of queries that all see a key."""
    outs, sums = [], []
    queries, keys = [run.queries for run in runs], [run.keys for run in runs]
    pieces = zip(runs, q_TNH.split(queries), k_LKH.split(keys), v_LKH.split(keys), strict=True)
    for run, q, k, v in pieces:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        away_TL = run.distance + torch.arange(run.queries)[:, None] - torch.arange(run.keys)
        hidden_TL = (away_TL < 0) | (away_TL >= (window or 10**6))
        scores_NTL = (torch.einsum("tnh,lnh->ntl", q, k) * SCALE).masked_fill(hidden_TL, -torch.inf)
        outs.append(torch.einsum("ntl,lnh->tnh", scores_NTL.softmax(-1), v))
        sums.append(scores_NTL.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(sums)


RUNS = [
    ([Run(5, 5, 0), Run(20, 35, 15), Run(1, 9, 8)], None),
    ([Run(18, 50, 32), Run(9, 12, 3)], 11),
    ([Run(18, 33, 40), Run(3, 9, 8)], 60),
]


def check_runs(runs: list[Run], window: int | None, kernels: str) -> None:
    """Check forward and backward; runs without queries and runs without keys change nothing."""
    impl: Any = import_module(f"stoker.model.kernels.{kernels}")  # the fused ones need Triton
    torch.manual_seed(len(runs))
    queries, keys = sum(run.queries for run in runs), sum(run.keys for run in runs)
    shapes = ((queries, HEADS, HEAD_DIM), (keys, KV_HEADS, HEAD_DIM), (keys, KV_HEADS, HEAD_DIM))
    leaves = [torch.randn(shape) for shape in shapes]
    q, k, v = (x.double().requires_grad_() for x in leaves)
    expected, sums = plain(q, k, v, runs, window)
    grad = torch.randn(expected.shape)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad.double())
    padded = [Run(0, 6, 0), *runs, Run(7, 0, 0), Run(0, 0, 0)]
    more = [torch.cat(parts) for parts in (
        (leaves[0], torch.randn(7, HEADS, HEAD_DIM)),
        (torch.randn(6, KV_HEADS, HEAD_DIM), leaves[1]),
        (torch.randn(6, KV_HEADS, HEAD_DIM), leaves[2]),
    )]  # fmt: skip
    packed = pack_runs(padded)
    out, lse = impl.attend_runs(*more, packed, SCALE, window, torch.float32)
    assert not out[queries:].any()
    assert (lse[queries:] < -1e29).all()
    wide_grad = torch.cat([grad, torch.randn(7, HEADS, HEAD_DIM)])
    grads = impl.attend_runs_backward(wide_grad, *more, out, lse, packed, SCALE, window)
    torch.testing.assert_close(out[:queries].double(), expected.detach(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse[:queries].double(), sums.detach(), atol=2e-5, rtol=2e-5)
    parts = (slice(0, queries), slice(6, None), slice(6, None))
    for found, wanted, skipped in zip(grads, expected_grads, parts, strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found[skipped].double(), wanted, atol=5e-5, rtol=5e-5)
    assert not any(part[:6].any() for part in grads[1:])
