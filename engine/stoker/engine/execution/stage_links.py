"""What one rank of a pipeline exchanges with the stages beside it: rows forward, sampled tokens back.

Stage 0 embeds, the last one samples. A rank sends its rows to the rank of the same place in the next stage: the
residual stream and its update, as they would go from layer to layer, so that a cut model has the bits of a whole one.
The last stage sends the tokens of each step to the first one, which needs them to embed the next; other stages have no
tokens. Each pair of neighbours has a group of its own, because messages of one group run in their order.

Both ends post every message when they launch the step, so none waits for a later step. T rows, D hidden, B samples.

Made by `load`, called by the runner.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.engine.execution.step import Opening
from stoker.engine.execution.step_rows import StepRows


class Arrival(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Wait until the tensor may be used; on a GPU the stream waits, and the host goes on."""
        ...


class Edge:
    """One direction between two ranks, whose messages arrive in their order."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        """`peer`: the other rank, as all ranks are numbered."""
        self.group, self.peer = group, peer

    def begin_send(self, tensor: Tensor) -> Arrival:
        return _work(dist.isend(tensor, self.peer, group=self.group))

    def begin_receive(self, tensor: Tensor) -> Arrival:
        return _work(dist.irecv(tensor, self.peer, group=self.group))

    def abort(self) -> None:
        """End what is under way on GPUs. For any thread."""
        with suppress(RuntimeError):  # half made, or aborted before
            self.group._get_backend(torch.device("cuda")).abort()


class _Sent(NamedTuple):
    arrival: Arrival
    tensor: Tensor


class _Expected(NamedTuple):
    """Tokens of a step that are under way to the first stage."""

    step: int
    seats: np.ndarray
    positions: np.ndarray
    arrival: Arrival
    tokens: Tensor


class TokenWrite(NamedTuple):
    """Tokens that have arrived, and the rows of the seats that they belong to."""

    seats: np.ndarray
    positions: np.ndarray
    tokens: Tensor
    """int32, as many as `seats`."""


class StageLinks:
    """The exchanges of one rank; steps are counted from 0, alike on all ranks."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int,
        num_seats: int,
        before: Edge | None,
        behind: Edge | None,
        tokens: Edge | None,
    ) -> None:
        """`before`, `behind`: to the neighbouring stages; `tokens`: from the last stage to the first, at both."""
        self.stage, self.num_stages = stage, num_stages
        self.device, self.dtype, self.hidden_size = device, dtype, hidden_size
        self.before, self.behind, self.tokens = before, behind, tokens
        self.steps = 0
        """Steps begun."""
        self._sent: deque[_Sent] = deque()
        self._expected: deque[_Expected] = deque()
        self._opened_at = np.full(num_seats, -1, dtype=np.int64)
        """The step in which a seat was opened last."""
        self._sampled_at = np.full(num_seats, -1, dtype=np.int64)
        """The step in which the seat's sequence was sampled last."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def warm_up(self) -> None:
        """Exchange one message over every edge, which connects the ranks. Called by all of them."""
        message = torch.zeros(1, dtype=torch.int32, device=self.device)
        if self.before is not None:
            self.before.begin_receive(message).wait()
        if self.behind is not None:
            self.behind.begin_send(message).wait()
        if self.tokens is not None:
            (self.tokens.begin_receive if self.is_first else self.tokens.begin_send)(message).wait()

    # The first stage's tokens.

    def begin(self, rows: StepRows, openings: tuple[Opening, ...]) -> list[TokenWrite]:
        """Begin a step, before its seats are opened: return what has to be written for it.

        Tokens of the step that ran a whole pipeline before are waited for in any case; later ones only where this step
        continues their sequences. Those of seats that another sequence has taken since are dropped.
        """
        step, self.steps = self.steps, self.steps + 1
        opened = [opening.seat for opening in openings]
        self._sampled_at[opened] = -1
        needed = int(self._sampled_at[rows.seats].max(initial=-1))
        writes = []
        while self._expected and self._expected[0].step <= max(needed, step - self.num_stages):
            writes += self._arrived(self._expected.popleft())
        self._opened_at[opened] = step
        self._sampled_at[rows.sample_seats] = step
        return writes

    def _arrived(self, expected: _Expected) -> list[TokenWrite]:
        expected.arrival.wait()
        kept = np.flatnonzero(self._opened_at[expected.seats] <= expected.step)
        if not len(kept):
            return []
        tokens = expected.tokens
        if len(kept) < len(expected.seats):
            tokens = tokens.index_select(0, torch.from_numpy(kept).to(self.device))
        return [TokenWrite(expected.seats[kept], expected.positions[kept], tokens)]

    def expect_tokens(self, rows: StepRows) -> None:
        """Begin to receive the tokens of the step that was launched."""
        if self.tokens is None or not len(rows.sample_seats):
            return
        tokens = torch.empty(len(rows.sample_seats), dtype=torch.int32, device=self.device)
        arrival = self.tokens.begin_receive(tokens)
        self._expected.append(_Expected(self.steps - 1, rows.sample_seats, rows.sample_positions, arrival, tokens))

    def send_tokens(self, tokens_B: Tensor) -> None:
        """Send the step's sampled tokens to the first stage. The tensor must not change any more."""
        assert self.tokens is not None, "the last stage has a way to the first"
        self._send(tokens_B.to(torch.int32).contiguous(), self.tokens)

    # Rows.

    def receive(self, num_tokens: int) -> Tensor | None:
        """Return the rows of the stage before, stream_2TD; None on the first stage."""
        if self.before is None:
            return None
        stream_2TD = torch.empty(2, num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        self.before.begin_receive(stream_2TD).wait()
        return stream_2TD

    def send(self, stream_2TD: Tensor) -> None:
        """Send rows to the next stage. The tensor must not change any more."""
        assert self.behind is not None, "the last stage has none behind it"
        self._send(stream_2TD.contiguous(), self.behind)

    def _send(self, tensor: Tensor, edge: Edge) -> None:
        self._sent.append(_Sent(edge.begin_send(tensor), tensor))
        while len(self._sent) > self.num_stages + 1:
            self._sent.popleft().arrival.wait()

    def abort(self) -> None:
        """End all exchanges, because a rank is lost; for any thread. Gloo's end with the ranks' sockets."""
        if self.device.type != "cuda":
            return
        for edge in (self.before, self.behind, self.tokens):
            if edge is not None:
                edge.abort()


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "both ranks belong to the edge's group"
    return work
