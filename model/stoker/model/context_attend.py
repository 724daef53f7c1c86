"""The trainer's attention where the ranks of a group share the tokens of a micro-batch (context parallelism).

Three ways to bring queries and keys together. `AllGather`: each rank gets the keys and values of all tokens, and its
own queries attend to those that they see; backward gathers again, so that nothing of other ranks is kept. `Ring`: keys
and values go round the ranks, and results are merged in float32 by their log-sums (Ring Attention, arXiv 2310.01889).
`Ulysses`: an all-to-all gives each rank all tokens of a part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Documents keep to themselves and windows hold whatever piece a token is in. T tokens of all ranks, t of this one, N
heads, K kv heads, H head_dim, L keys.

Every rank of the group makes the same calls (collective). Built once per micro-batch by the training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.attend import LayerAttention, RotaryRows
from stoker.model.context_cut import ContextCut, Documents, SeenKeys, runs_between
from stoker.model.context_exchange import (
    RingShift,
    gather_rows,
    heads_to_tokens,
    sum_rows,
    tokens_to_heads,
)
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.rotation import Rotation
from stoker.model.kernels.runs import AttentionRuns, pack_runs
from stoker.model.kernels.sequences import PackedSequences, pack_sequences, upload
from stoker.pod.capabilities import AttentionName, ContextMethod


class Exchange(Protocol):
    """One way to bring the ranks' queries and keys together."""

    def attend(self, spec: LayerAttention, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor) -> Tensor:
        """Return out_tNH for rotated q and k; differentiable."""
        ...


class ContextAttend:
    """Attention of this rank's tokens, which `ContextCut` gives it, over the documents of all ranks."""

    def __init__(
        self,
        ops: Ops,
        attention: AttentionName,
        method: ContextMethod,
        group: ProcessGroup,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`attention`: what `Ops.attention` gave. `cu_seqlens`: int [S + 1], from 0 to T, as in `PackedAttend`."""
        self.ops = ops
        self.rotary = RotaryRows()
        self.slots = None
        sequences = pack_sequences(cu_seqlens, max_seqlen, device)
        shared = Shared(ops, group, sequences, torch.device(device or cu_seqlens.device))
        self.exchange = make_exchange(method, shared, attention)

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        """See `Attend`: here the tokens are those of this rank."""
        cos, sin = self.rotary.of(spec.rope, positions_T)
        q_tNH, k_tKH = self.ops.rotate(q_TNH, k_TKH, Rotation(cos, sin, spec.q_norm, spec.k_norm, spec.norm_eps))
        return self.exchange.attend(spec, q_tNH, k_tKH, v_TKH)


@dataclass(frozen=True)
class Shared:
    """A micro-batch that the ranks of a group share."""

    ops: Ops
    group: ProcessGroup
    sequences: PackedSequences
    device: torch.device

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def documents(self) -> Documents:
        return Documents(self.sequences.bounds)

    @cached_property
    def cut(self) -> ContextCut:
        return ContextCut(self.sequences.bounds[-1], dist.get_world_size(self.group))

    @cached_property
    def places(self) -> Tensor:
        return upload(self.cut.places(), self.device)

    @cached_property
    def order(self) -> Tensor:
        return upload(self.cut.order(), self.device)


def make_exchange(method: ContextMethod, shared: Shared, attention: AttentionName) -> Exchange:
    if method == "Ulysses":
        return SharedHeads(shared, attention)
    return GatheredKeys(shared) if method == "AllGather" else KeyRing(shared)


class GatheredKeys:
    """AllGather: the keys and values of all ranks, laid out run by run."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._planned: dict[int | None, tuple[list[SeenKeys], AttentionRuns, Tensor]] = {}

    def attend(self, spec: LayerAttention, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor) -> Tensor:
        """See `Exchange`."""
        out_tNH: Tensor = AttendGathered.apply(q_tNH, k_tKH, v_tKH, self, spec.scale, spec.window)
        return out_tNH

    def plan(self, window: int | None) -> tuple[list[SeenKeys], AttentionRuns, Tensor]:
        """Return this rank's runs, and int64 [L]: where their keys stand among the gathered ones."""
        if window not in self._planned:
            shared = self.shared
            seen = shared.cut.seen_keys(shared.documents, shared.rank, window)
            places = shared.cut.places()
            rows = torch.cat([places[keys.tokens.start : keys.tokens.stop] for keys in seen])
            runs = pack_runs([keys.run for keys in seen], shared.device)
            self._planned[window] = seen, runs, upload(rows, shared.device)
        return self._planned[window]

    def gather(self, k_tKH: Tensor, v_tKH: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the runs, k_LKH and v_LKH: views of one buffer."""
        rows = self.plan(window)[2]
        whole = gather_rows(torch.cat([k_tKH, v_tKH], 1), self.shared.group)
        k_LKH, v_LKH = torch.split(whole.index_select(0, rows), k_tKH.shape[1], 1)
        return k_LKH, v_LKH

    def fold(self, grad_k_LKH: Tensor, grad_v_LKH: Tensor, window: int | None) -> Tensor:
        """Return the gradients of all tokens' keys and values, float32 [T, 2 K, H]."""
        shared, heads = self.shared, grad_k_LKH.shape[1]
        whole = grad_k_LKH.new_zeros(shared.cut.num_tokens, 2 * heads, grad_k_LKH.shape[2])
        begin = 0
        for keys in self.plan(window)[0]:
            # Runs of one document share keys: added one after the other, in a fixed order.
            tokens, own = slice(keys.tokens.start, keys.tokens.stop), slice(begin, begin + keys.run.keys)
            whole[tokens, :heads] += grad_k_LKH[own]
            whole[tokens, heads:] += grad_v_LKH[own]
            begin += keys.run.keys
        return whole


class AttendGathered(torch.autograd.Function):
    """Keeps this rank's q, k, v, the result and one number per row; backward gathers keys and values again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_tNH: Tensor,
        k_tKH: Tensor,
        v_tKH: Tensor,
        gathered: GatheredKeys,
        scale: float,
        window: int | None,
    ) -> Tensor:
        runs = gathered.plan(window)[1]
        k_LKH, v_LKH = gathered.gather(k_tKH, v_tKH, window)
        out_tNH, lse_tN = gathered.shared.ops.attend_runs(q_tNH, k_LKH, v_LKH, runs, scale, window)
        ctx.save_for_backward(q_tNH, k_tKH, v_tKH, out_tNH, lse_tN)
        ctx.gathered, ctx.scale, ctx.window = gathered, scale, window
        return out_tNH

    @staticmethod
    def backward(ctx: Any, grad_tNH: Tensor) -> tuple[Tensor | None, ...]:
        # detach: a product of several dims chooses its kernel by `requires_grad`, which hooks on saved tensors change
        q, k, v, out, lse = (saved.detach() for saved in ctx.saved_tensors)
        gathered, window = ctx.gathered, ctx.window
        k_LKH, v_LKH = gathered.gather(k, v, window)
        grad_q, grad_k, grad_v = gathered.shared.ops.attend_runs_backward(
            grad_tNH, q, k_LKH, v_LKH, out, lse, gathered.plan(window)[1], ctx.scale, window
        )
        whole = gathered.fold(grad_k, grad_v, window)
        del k_LKH, v_LKH, grad_k, grad_v
        sent = whole.to(k.dtype).index_select(0, gathered.shared.order)
        own = sum_rows(sent, gathered.shared.group).to(k.dtype)
        return grad_q.to(q.dtype), *torch.split(own, k.shape[1], 1), None, None, None


class KeyRing:
    """Ring: at step s this rank has the keys and values of the rank s places before it."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._planned: dict[int, list[tuple[slice, slice, AttentionRuns]]] = {}

    def attend(self, spec: LayerAttention, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor) -> Tensor:
        """See `Exchange`."""
        out_tNH: Tensor = AttendRing.apply(q_tNH, k_tKH, v_tKH, self, spec.scale, spec.window)
        return out_tNH

    def steps(self) -> Iterator[tuple[int, list[tuple[slice, slice, AttentionRuns]]]]:
        """Yield for each step its number, and this rank's rows, the owner's rows and their runs for each pair of pieces
        of which one sees the other.
        """
        for step in range(self.shared.cut.ranks):
            owner = (self.shared.rank - step) % self.shared.cut.ranks
            if owner not in self._planned:
                self._planned[owner] = self._pairs(owner)
            yield step, self._planned[owner]

    def _pairs(self, owner: int) -> list[tuple[slice, slice, AttentionRuns]]:
        shared = self.shared
        found = []
        for rows, queries in rows_of(shared.cut.pieces(shared.rank)):
            for columns, keys in rows_of(shared.cut.pieces(owner)):
                runs = runs_between(shared.documents, queries, keys)
                if keys.start <= queries.start and any(run.queries and run.keys for run in runs):
                    found.append((rows, columns, pack_runs(runs, shared.device)))
        return found


def rows_of(pieces: tuple[range, range]) -> list[tuple[slice, range]]:
    """Return where each piece that is not empty stands among its rank's tokens."""
    head, tail = pieces
    places = [(slice(0, len(head)), head), (slice(len(head), len(head) + len(tail)), tail)]
    return [(rows, piece) for rows, piece in places if piece]


class AttendRing(torch.autograd.Function):
    """Keeps this rank's q, k, v, the merged result and one number per row.

    Forward: keys and values go round while the block at hand is computed. Backward: they go round again, with the
    gradients that the ranks have added so far; after the last step these go on to their owner.
    """

    @staticmethod
    def forward(
        ctx: Any, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor, ring: KeyRing, scale: float, window: int | None
    ) -> Tensor:
        shared = ring.shared
        out_tNH = torch.zeros(q_tNH.shape, dtype=torch.float32, device=q_tNH.device)
        lse_tN = torch.full(q_tNH.shape[:2], -torch.inf, dtype=torch.float32, device=q_tNH.device)
        block = torch.cat([k_tKH, v_tKH], 1)
        for step, pairs in ring.steps():
            is_last = step == shared.cut.ranks - 1
            shift = None if is_last else RingShift([block], shared.group)
            k, v = torch.split(block, k_tKH.shape[1], 1)
            for rows, columns, runs in pairs:
                part, lse = shared.ops.attend_runs(
                    q_tNH[rows], k[columns], v[columns], runs, scale, window, torch.float32
                )
                out_tNH[rows], lse_tN[rows] = merged(out_tNH[rows], lse_tN[rows], part, lse)
            if shift is not None:
                (block,) = shift.wait()
        out = out_tNH.to(q_tNH.dtype)
        ctx.save_for_backward(q_tNH, k_tKH, v_tKH, out, lse_tN)
        ctx.ring, ctx.scale, ctx.window = ring, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad_tNH: Tensor) -> tuple[Tensor | None, ...]:
        q, k_own, v_own, out, lse = (saved.detach() for saved in ctx.saved_tensors)
        ring, heads = ctx.ring, k_own.shape[1]
        shared = ring.shared
        grad_tNH = grad_tNH.contiguous()
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        block = torch.cat([k_own, v_own], 1)
        coming: RingShift | None = None
        for step, pairs in ring.steps():
            is_last = step == shared.cut.ranks - 1
            shift = None if is_last else RingShift([block], shared.group)
            k, v = torch.split(block, heads, 1)
            added = torch.zeros(block.shape, dtype=torch.float32, device=block.device)
            for rows, columns, runs in pairs:
                parts = shared.ops.attend_runs_backward(
                    grad_tNH[rows], q[rows], k[columns], v[columns], out[rows], lse[rows], runs, ctx.scale, ctx.window
                )
                grad_q[rows] += parts[0]
                added[columns] += torch.cat(parts[1:], 1)
            if coming is not None:
                (received,) = coming.wait()
                added = received + added
            coming = RingShift([added], shared.group)
            if shift is not None:
                (block,) = shift.wait()
        assert coming is not None
        (total,) = coming.wait()
        return grad_q.to(q.dtype), *torch.split(total.to(k_own.dtype), heads, 1), None, None, None


def merged(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return result and log-sum over the keys of both, in float32."""
    total_TN = torch.logaddexp(lse_TN, part_lse_TN)
    old, new = (torch.exp(one - total_TN).unsqueeze(-1) for one in (lse_TN, part_lse_TN))
    return out_TNH * old + part_TNH * new, total_TN


class SharedHeads:
    """Ulysses: each rank computes whole documents for a part of the heads, by the kernels of one rank."""

    def __init__(self, shared: Shared, attention: AttentionName) -> None:
        self.shared, self.attention = shared, attention

    def attend(self, spec: LayerAttention, q_tNH: Tensor, k_tKH: Tensor, v_tKH: Tensor) -> Tensor:
        """See `Exchange`. Kv heads of which there are fewer than ranks are sent to several.

        Raises:
            ValueError: the heads cannot be shared by the ranks; the message shows the arithmetic.
        """
        shared, ranks = self.shared, self.shared.cut.ranks
        check_shared_heads(q_tNH.shape[1], k_tKH.shape[1], ranks)
        if k_tKH.shape[1] < ranks:
            k_tKH, v_tKH = (x.repeat_interleave(ranks // x.shape[1], 1) for x in (k_tKH, v_tKH))
        q, k, v = (ToAllTokens.apply(x, shared) for x in (q_tNH, k_tKH, v_tKH))
        out = shared.ops.packed_attention(q, k, v, shared.sequences, spec.scale, spec.window, self.attention)
        out_tNH: Tensor = ToAllHeads.apply(out, shared)
        return out_tNH


def check_shared_heads(num_heads: int, num_kv_heads: int, ranks: int) -> None:
    """Raise ValueError with the arithmetic where Ulysses cannot share a rank's heads over the ranks of `context`."""
    if num_heads % ranks:
        raise ValueError(f"contextMethod Ulysses: {num_heads} heads are not a multiple of context {ranks}")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(
            f"contextMethod Ulysses: {num_kv_heads} kv heads are neither a multiple nor a divisor of context {ranks}"
        )


class ToAllTokens(torch.autograd.Function):
    """All heads of some tokens to some heads of all tokens, in the order of the documents."""

    @staticmethod
    def forward(ctx: Any, x_tNH: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        return heads_to_tokens(x_tNH, shared.group).index_select(0, shared.places)

    @staticmethod
    def backward(ctx: Any, grad_TnH: Tensor) -> tuple[Tensor, None]:
        return tokens_to_heads(grad_TnH.index_select(0, ctx.shared.order), ctx.shared.group), None


class ToAllHeads(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x_TnH: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        return tokens_to_heads(x_TnH.index_select(0, shared.order), shared.group)

    @staticmethod
    def backward(ctx: Any, grad_tNH: Tensor) -> tuple[Tensor, None]:
        return heads_to_tokens(grad_tNH, ctx.shared.group).index_select(0, ctx.shared.places), None
