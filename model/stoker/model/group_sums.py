"""Sums and gathers of a tensor-parallel group without gradient, for serving: what ranks exchange within a pass.

With deferred sums (`Decoder.defer_sums`) the row-parallel products leave partial values, and the norm that follows adds
the ranks' parts, the residual stream and normalises at once. `GroupSums` does it through the process group, and is the
twin of `kernels.fused.peer_sum` and `two_shot_sum`.

A sum is rounded to its dtype before anything is added to it, on every rank. T tokens, D hidden, V vocabulary, v
columns of one rank; B rows, b of them one rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.ops import Ops


class GroupSums:
    """The group's sums. `ordered`: in the order of ranks and in float32, so that no bit depends on the batch; the
    collectives' own sums choose an order by the length of the message."""

    def __init__(self, group: ProcessGroup, ops: Ops, *, ordered: bool = False) -> None:
        self.group, self.ops, self.ordered = group, ops, ordered
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._beside = False
        self._begun: dict[int, Any] = {}
        """Address of a tensor -> its sum, which has begun."""
        self.calls = 0
        """Exchanges so far, the same on all ranks that are in step."""
        self.dealt_rows = 0
        """Rows of which this rank got the whole logits as its share so far; a graph's count when it is captured."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within the block, sums begin as soon as their parts are there, beside what is computed next."""
        self._beside = True
        try:
            yield
        finally:
            self._beside = False
            self._begun.clear()

    def begin(self, partial_TD: Tensor) -> Tensor:
        """Begin a sum, where that is of use; the tensor is for `sum` or `sum_norm` alone."""
        if self._beside and not self.ordered:
            self.calls += 1
            partial_TD = partial_TD.contiguous()
            self._begun[partial_TD.data_ptr()] = dist.all_reduce(partial_TD, group=self.group, async_op=True)
        return partial_TD

    def sum(self, partial_TD: Tensor) -> Tensor:
        """Return the sum over the ranks, in place where possible."""
        begun = self._begun.pop(partial_TD.data_ptr(), None)
        if begun is not None:
            begun.wait()  # on a GPU the stream waits
            return partial_TD
        self.calls += 1
        partial_TD = partial_TD.contiguous()
        if self.ordered:
            return self._ordered_sum(partial_TD)
        dist.all_reduce(partial_TD, group=self.group)
        return partial_TD

    def sum_norm(self, partial_TD: Tensor, x_TD: Tensor, norm_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm(x + sum), x + sum)."""
        return self.ops.add_rms_norm(self.sum(partial_TD), x_TD, norm_D, eps)

    def gather_columns(self, part_Tv: Tensor) -> Tensor:
        """Return the ranks' columns side by side, whole_TV."""
        self.calls += 1
        tokens, columns = part_Tv.shape
        parts_RTv = part_Tv.new_empty(self.size, tokens, columns)
        dist.all_gather_into_tensor(parts_RTv.view(-1, columns), part_Tv.contiguous(), group=self.group)
        return parts_RTv.transpose(0, 1).reshape(tokens, self.size * columns)

    def deal_rows(self, part_Bv: Tensor) -> Tensor:
        """Return this rank's share of the rows with the columns of all ranks, own_bV; the share is `own_rows`."""
        self.calls += 1
        rows, columns = part_Bv.shape
        self.dealt_rows += rows // self.size
        parts_Rbv = part_Bv.new_empty(self.size, rows // self.size, columns)
        dist.all_to_all_single(parts_Rbv.view(-1, columns), part_Bv.contiguous(), group=self.group)
        return parts_Rbv.transpose(0, 1).reshape(-1, self.size * columns)

    def own_rows(self, num_rows: int) -> slice:
        """The rows that `deal_rows` gives this rank; their number is a multiple of the ranks'."""
        share, rest = divmod(num_rows, self.size)
        if rest:
            raise ValueError(f"{num_rows} rows cannot be dealt to {self.size} ranks: a multiple is needed")
        return slice(self.rank * share, (self.rank + 1) * share)

    def collect_rows(self, own_b: Tensor) -> Tensor:
        """Return the ranks' shares one behind the other, whole_B."""
        self.calls += 1
        whole_B = own_b.new_empty(self.size * len(own_b))
        dist.all_gather_into_tensor(whole_B, own_b.contiguous(), group=self.group)
        return whole_B

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank. Waits for the device."""
        self.calls += 1
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        votes = torch.tensor([int(holds)], dtype=torch.int32, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.group)
        return bool(votes.item())

    def abort(self) -> None:
        """End all waiting for other ranks with an error; the group is of no use afterwards. Called by any thread.

        Gloo's waits end with the other ranks' processes.
        """
        if self._on_gpu:
            self.group._get_backend(torch.device("cuda")).abort()

    @property
    def _on_gpu(self) -> bool:
        return dist.get_backend(self.group) == "nccl"

    def _ordered_sum(self, partial_TD: Tensor) -> Tensor:
        parts_RTD = partial_TD.new_empty(self.size, *partial_TD.shape)
        dist.all_gather_into_tensor(parts_RTD.view(-1, *partial_TD.shape[1:]), partial_TD, group=self.group)
        return ordered_sum(parts_RTD)


def ordered_sum(parts_RTD: Tensor) -> Tensor:
    """Add the ranks' parts in float32, in their order, and round once."""
    total_TD = parts_RTD[0].float()
    for part_TD in parts_RTD[1:]:
        total_TD = total_TD + part_TD.float()
    return total_TD.to(parts_RTD.dtype)
