"""Attention of ranks that share documents equals that of one rank, forward and backward, for every method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.model.attend import Attend, LayerAttention, PackedAttend
from stoker.model.context_attend import ContextAttend, check_shared_heads
from stoker.model.context_cut import ContextCut
from stoker.model.kernels.ops import Ops
from stoker.model.rotary import RotaryTable
from stoker.pod.capabilities import ContextMethod
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import TINY

RANKS = 4
HEAD_DIM = 8
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
Groups = dict[int, Any]


@dataclass(frozen=True)
class Case:
    method: ContextMethod
    ranks: int = 2
    lengths: tuple[int, ...] = (11, 1, 20, 8)
    heads: tuple[int, int] = (4, 4)
    window: int | None = None
    dtype: torch.dtype = torch.float32
    deterministic: bool = False


METHODS: tuple[ContextMethod, ...] = ("AllGather", "Ring", "Ulysses")
CASES = [
    replace(case, method=method)
    for case in (
        Case("Ring", ranks=4),
        Case("Ring", ranks=4, lengths=(40,), window=13),
        Case("Ring", ranks=4, lengths=(3, 1), window=2),  # one token a rank: no tails
        Case("Ring", ranks=4, lengths=(5, 15)),  # heads of three tokens, tails of two
        Case("Ring", heads=(4, 2), window=5),
        Case("Ring", ranks=4, heads=(8, 2)),
        Case("Ring", heads=(4, 2), dtype=torch.bfloat16),
        Case("Ring", deterministic=True),
    )
    for method in METHODS
]


def open_groups(_rank: int, _size: int) -> Groups:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}


def make_inputs(case: Case) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return q, k and v of all tokens, the gradient of the result, positions and bounds."""
    generator = torch.Generator().manual_seed(sum(case.lengths))
    total = sum(case.lengths)
    counts = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    made = [torch.randn(total, count, HEAD_DIM, generator=generator).to(case.dtype) for count in counts]
    positions_T = torch.cat([torch.arange(length) for length in case.lengths])
    return made[:3], made[3], positions_T, torch.tensor([0, *itertools.accumulate(case.lengths)])


def attend_with(attend: Attend, case: Case, leaves: list[Tensor], grad: Tensor, positions_T: Tensor) -> list[Tensor]:
    """Return the result, and the gradients of q, k and v."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    rope = RotaryTable(replace(TINY, head_dim=HEAD_DIM))
    spec = LayerAttention(0, *case.heads, HEAD_DIM, HEAD_DIM**-0.5, 1e-6, rope, case.window)
    q, k, v = leaves
    out = attend(spec, q, k, v, positions_T)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend_shared(groups: Groups, case: Case) -> tuple[list[int], list[Tensor]]:
    """Return this rank's tokens, and the result and the gradients of those."""
    leaves, grad, positions_T, bounds = make_inputs(case)
    group, ops = groups[case.ranks], Ops(deterministic=case.deterministic)
    tokens = ContextCut(sum(case.lengths), case.ranks).tokens(dist.get_rank(group))
    attend = ContextAttend(ops, ops.attention("auto"), case.method, group, bounds)
    own = [leaf[tokens] for leaf in leaves]
    found = [attend_with(attend, case, own, grad[tokens], positions_T[tokens]) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), "a second pass has other bits"
    return tokens, found[0]


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS, open_groups) as world:
        yield world


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_documents_equal_one_rank(world: RankWorld, case: Case) -> None:
    answers = world.call(attend_shared, case)[: case.ranks]
    leaves, grad, positions_T, bounds = make_inputs(case)
    wide = [leaf.float() for leaf in leaves]
    whole = attend_with(PackedAttend(Ops(), "auto", bounds), case, wide, grad.float(), positions_T)
    order = [token for tokens, _ in answers for token in tokens]
    assert sorted(order) == list(range(sum(case.lengths)))
    for index, expected in enumerate(whole):
        found = torch.cat([parts[index] for _, parts in answers])
        assert found.dtype is case.dtype
        error = (found.float() - expected[order]).norm() / expected.norm()
        assert error <= TOLERANCES[case.dtype], (index, float(error))


def test_heads_that_ranks_cannot_share_are_refused_with_the_arithmetic() -> None:
    check_shared_heads(8, 2, 4)
    with pytest.raises(ValueError, match="Ulysses: 6 heads are not a multiple of context 4"):
        check_shared_heads(6, 2, 4)
    with pytest.raises(ValueError, match="Ulysses: 3 kv heads are neither a multiple nor a divisor of context 2"):
        check_shared_heads(6, 3, 2)
