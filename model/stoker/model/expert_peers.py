"""The exchange of ranks that have tokens of their own and share every layer's experts, for serving.

In each layer a rank's tokens, with the experts that they have chosen, go to all ranks; each computes its own experts
for all of them; their parts go back and are added. Messages to the others are padded to the largest number of tokens,
which all ranks know before the step: one gather, whatever the router chooses, and no number is read from the device.
What goes back is not padded. Each message begins with the number of the step and of the exchange, so that a rank which
is elsewhere is named.

T tokens of this rank, N tokens of all ranks, R ranks, D hidden, K experts of a token. Made by the engine; called by
`experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.group_sums import ordered_sum
from stoker.model.kernels.expert_rows import Routes

HEADER = 3
"""Numbers before the rows: of the step, of the exchange in it, and of the rank's tokens."""
ALIGNED = 16
"""A message is a multiple of so many bytes, so that every part of every message can be viewed as numbers."""


class PeersParted(RuntimeError):
    """The ranks are not in the same exchange."""


class ExpertCut(NamedTuple):
    """This rank's run of the experts, and the number of runs."""

    run: int
    runs: int


class Gathered(NamedTuple):
    """All ranks' tokens, in the order of ranks."""

    x: Tensor
    """[N, D]"""
    routes: Routes


class ExpertPeers:
    """One rank's side of the exchanges."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.number = -1
        self.counts: tuple[int, ...] = ()
        self.calls = 0
        """Exchanges of this step that have begun."""
        self.is_open = False
        """Whether an exchange has begun and not ended."""
        self._headers: list[Tensor] = []
        """Of exchanges on a GPU, which are read when the step ends."""

    def begin(self, number: int, counts: Sequence[int]) -> None:
        """Begin a step. `counts`: each rank's tokens."""
        self.number, self.counts, self.calls, self.is_open = number, tuple(counts), 0, False
        self._headers.clear()

    def gather(self, x_TD: Tensor, routes: Routes) -> Gathered:
        """Return the tokens and choices of all ranks. Raises PeersParted."""
        if len(x_TD) != self.counts[self.rank]:
            raise PeersParted(f"step {self.number} was to have {self.counts[self.rank]} tokens, got {len(x_TD)}")
        self.is_open = True
        most = max(self.counts)
        mine_B = _message(self._header(x_TD), x_TD, routes, most)
        all_RB = mine_B.new_empty(self.size, len(mine_B))
        dist.all_gather_into_tensor(all_RB.view(-1), mine_B, group=self.group)
        headers_RH = all_RB[:, : HEADER * 8].contiguous().view(torch.int64)
        if headers_RH.device.type == "cpu":
            self._check(headers_RH)
        else:
            self._headers.append(headers_RH)
        parts = [_parts(row_B, x_TD, routes, most, count) for row_B, count in zip(all_RB, self.counts, strict=True)]
        x, weights, experts = (torch.cat(part) for part in zip(*parts, strict=True))
        return Gathered(x, Routes(weights, experts.long()))

    def give_back(self, y_ND: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of this rank's tokens, y_TD: in the order of ranks and in float32."""
        own, width = self.counts[self.rank], y_ND.shape[1]
        parts_RTD = y_ND.new_empty(self.size, own, width)
        rows = _as_bytes(y_ND.contiguous())
        dist.all_to_all_single(
            _as_bytes(parts_RTD.view(-1, width)), rows, [own] * self.size, list(self.counts), group=self.group
        )
        self.calls, self.is_open = self.calls + 1, False
        return ordered_sum(parts_RTD)

    def check(self) -> None:
        """Compare what the others have sent in this step, where that was not done at once. Waits for the device."""
        for headers_RH in self._headers:
            self._check(headers_RH.cpu())
        self._headers.clear()

    def abort(self) -> None:
        """End all waiting for other ranks with an error; the group is of no use afterwards. Called by any thread.

        Gloo's waits end with the other ranks' processes.
        """
        if dist.get_backend(self.group) == "nccl":
            self.group._get_backend(torch.device("cuda")).abort()

    def _header(self, x_TD: Tensor) -> Tensor:
        return torch.tensor([self.number, self.calls, len(x_TD)], dtype=torch.int64).to(x_TD.device)

    def _check(self, headers_RH: Tensor) -> None:
        (_, call, _), found = headers_RH[self.rank].tolist(), headers_RH.tolist()
        for rank, (number, other_call, tokens) in enumerate(found):
            if (number, other_call, tokens) != (self.number, call, self.counts[rank]):
                raise PeersParted(
                    f"data rank {rank} is in exchange {other_call} of step {number} with {tokens} tokens, this rank in "
                    f"exchange {call} of step {self.number}, for which it told {self.counts[rank]}"
                )


def _message(header_H: Tensor, x_TD: Tensor, routes: Routes, rows: int) -> Tensor:
    """Return header, weights, experts and rows as bytes, padded to so many rows, uint8 [B]."""
    parts = header_H, routes.weights.float(), routes.experts.int(), x_TD
    pieces = [_as_bytes(part.contiguous()).view(-1) for part in parts]
    sizes = _sizes(x_TD, routes, rows)
    message_B = pieces[0].new_zeros(-(-sum(sizes) // ALIGNED) * ALIGNED)
    begin = 0
    for piece, size in zip(pieces, sizes, strict=True):
        message_B[begin : begin + len(piece)] = piece
        begin += size
    return message_B


def _parts(message_B: Tensor, x_TD: Tensor, routes: Routes, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [count, D], weights [count, K] and experts of a message that is padded to so many rows."""
    sizes = _sizes(x_TD, routes, rows)
    _, weights, experts, x = torch.split(message_B[: sum(sizes)], sizes)
    shape = rows, routes.weights.shape[1]
    return (
        x.view(x_TD.dtype).view(rows, x_TD.shape[1])[:count],
        weights.view(torch.float32).view(shape)[:count],
        experts.view(torch.int32).view(shape)[:count],
    )


def _sizes(x_TD: Tensor, routes: Routes, rows: int) -> list[int]:
    """Return the bytes of header, weights, experts and rows in a message of so many rows."""
    width = routes.weights.shape[1]
    return [HEADER * 8, 4 * rows * width, 4 * rows * width, rows * x_TD.shape[1] * x_TD.element_size()]


def _as_bytes(values: Tensor) -> Tensor:
    """View the numbers of each row as bytes: Gloo knows fewer dtypes than there are."""
    return values.view(torch.uint8)
