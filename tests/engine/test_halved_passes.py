"""Long passes as two halves: every row in one of them, and the answers of whole passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step_rows import StepRows, rows_between
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache
from testing.engine.rank_engines import PROMPTS, answers, tokens_of
from tests.engine.conftest import MAX_LEN, VOCAB, decoder_of


@given(
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6),
    num_decodes=st.integers(0, 6),
    data=st.data(),
)
def test_each_row_is_in_one_half(chunks: list[tuple[int, int]], num_decodes: int, data: st.DataObject) -> None:
    num_decodes = min(num_decodes, len(chunks))
    starts, lengths = np.array(chunks, dtype=np.int64).T
    lengths[:num_decodes] = 1
    seats = np.arange(len(chunks)) + 7
    rows = StepRows(seats, starts, lengths, num_decodes, seats - 7, np.empty(0, dtype=np.int64), seats[:0])
    middle = data.draw(st.integers(1, rows.num_tokens))
    halves = rows_between(rows, 0, middle), rows_between(rows, middle, rows.num_tokens)
    assert tokens_in(halves[0]) + tokens_in(halves[1]) == tokens_in(rows)
    assert halves[0].num_tokens == middle
    assert sum(half.num_decodes for half in halves) == num_decodes


def tokens_in(rows: StepRows) -> list[tuple[int, int]]:
    """(seat, position) by row."""
    return [
        (int(seat), int(start + place))
        for seat, start, length in zip(rows.seats, rows.starts, rows.lengths, strict=True)
        for place in range(length)
    ]


class SumOfOne:
    """The sums of a group of one rank."""

    rank, calls = 0, 0

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.halved = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.halved += 1
        yield

    def begin(self, partial_TD: Tensor) -> Tensor:
        return partial_TD

    def sum(self, partial_TD: Tensor) -> Tensor:
        return partial_TD

    def sum_norm(self, partial_TD: Tensor, x_TD: Tensor, norm_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.ops.add_rms_norm(partial_TD, x_TD, norm_D, eps)

    def gather_columns(self, part_Tv: Tensor) -> Tensor:
        return part_Tv

    def agree(self, holds: bool) -> bool:
        return holds


def test_halves_answer_as_the_whole(twins: dict[str, Any]) -> None:
    """Prompts are cut within their chunks and beside decodes, with a cache and without."""
    names = tuple(name for name in PROMPTS if name != "grammar")
    found = []
    for halved in (False, True):
        ops = Ops("reference", deterministic=True)
        sums: Any = SumOfOne(ops) if halved else None
        decoder = decoder_of(twins["llama"], ops)
        if sums is not None:
            decoder.defer_sums(sums)
        cache = KVCache(decoder.config, num_blocks=100, block_size=4, dtype=torch.float32)
        runner = Runner(
            decoder,
            cache,
            num_seats=6,
            max_model_len=MAX_LEN,
            max_batch_tokens=16,
            attention="auto",
            sums=sums,
            halved=2,
        )
        scheduler = Scheduler(BlockManager(100, 4), max_batch_tokens=16, max_requests=6, max_queued_requests=100)
        engine = LLMEngine(InProcess(runner), scheduler, ModelLimits(VOCAB, MAX_LEN, (2,)))
        found.append(tokens_of(answers(engine, names)))
        assert (sums.halved if sums is not None else 1) > 0
    assert found[0] == found[1]
