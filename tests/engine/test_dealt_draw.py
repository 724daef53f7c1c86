"""Samples dealt to tensor ranks: each draws its share of the rows, and all have the tokens of one rank.

The ranks are processes that interpret the fused kernels, which alone are dealt for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.load import load_output_kernels
from stoker.engine.execution.pass_shape import all_output_rows
from stoker.engine.execution.runner import Runner
from stoker.engine.sampling import SamplingParams
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sampling import SampledTokens, SampleRows
from stoker.model.paged_attend import KVCache
from testing.model.interpreted import Interpreted

REQUESTS = 16
SEATS = 20
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)


class RecordingOps(Ops):
    """Operations that note how many rows are sampled, and for how many the output layer is computed."""

    def __init__(self) -> None:
        super().__init__("fused")
        self.sampled: list[int] = []
        self.output: list[int] = []

    def sample(self, logits_BV: Tensor, rows: SampleRows, *arguments: Any) -> SampledTokens:
        self.sampled.append(len(logits_BV))
        return super().sample(logits_BV, rows, *arguments)

    def logits(self, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        self.output.append(len(hidden_TD))
        return super().logits(hidden_TD, weight_VD)


def decoder_on(ops: Ops, group: ProcessGroup | None) -> Decoder:
    decoder = Decoder(CONFIG, ops, group=group)
    decoder.init_weights(5)
    return decoder.requires_grad_(False).eval()


def engine_on(ops: Ops, group: ProcessGroup | None) -> LLMEngine:
    """An engine of one rank of the group; all ranks make the same steps."""
    decoder = decoder_on(ops, group)
    sums = None if group is None else GroupSums(group, ops)
    if sums is not None:
        decoder.defer_sums(sums)
    cache = KVCache(CONFIG, num_blocks=40, block_size=16, dtype=torch.float32, device="cpu", group=group)
    runner = Runner(
        decoder, cache, num_seats=SEATS, max_model_len=32, max_batch_tokens=64, attention="auto", graphs=False,
        sums=sums,
    )  # fmt: skip
    scheduler = Scheduler(BlockManager(40, 16), max_batch_tokens=64, max_requests=SEATS, max_queued_requests=99)
    return LLMEngine(InProcess(runner), scheduler, ModelLimits(CONFIG.vocab_size, 32, ()))


def answers(engine: LLMEngine) -> dict[str, list[int]]:
    """The tokens of requests of which each begins in the first step and decodes in the second."""
    for number in range(REQUESTS):
        params = SamplingParams(temperature=(0.0, 0.8)[number % 2], seed=number, max_tokens=2, ignore_eos=True)
        engine.add_request(str(number), [number + 3, number + 4, 7], params)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    return tokens


def joined(rank: int, folder: str) -> ProcessGroup:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_each_rank_draws_its_share(rank: int, folder: str) -> None:
    """Check a step of samples beside prompts and one of decodes."""
    ops, alone = RecordingOps(), RecordingOps()
    found = answers(engine_on(ops, joined(rank, folder)))
    dist.destroy_process_group()
    assert found == answers(engine_on(alone, None))
    assert alone.sampled == [REQUESTS, REQUESTS]
    assert ops.sampled == [REQUESTS // 2, REQUESTS // 2], "each rank draws half of a step's rows"


def check_output_kernels_are_loaded(rank: int, folder: str) -> None:
    """Check that every number of rows is computed before the first request, by each rank without the other."""
    ops = RecordingOps()
    decoder = decoder_on(ops, joined(rank, folder))
    if rank == 0:
        load_output_kernels(decoder, SEATS)
        assert tuple(ops.output) == all_output_rows(SEATS) == (24, 16, 8, 4, 3, 2, 1)
    dist.destroy_process_group()
    assert rank == 0 or not ops.output


def test_each_rank_draws_its_share_of_the_rows(interpreted: Interpreted, tmp_path: Path) -> None:
    interpreted.run([(check_each_rank_draws_its_share, (rank, str(tmp_path))) for rank in range(2)])


def test_output_kernels_are_loaded_by_each_rank_alone(interpreted: Interpreted, tmp_path: Path) -> None:
    interpreted.run([(check_output_kernels_are_loaded, (rank, str(tmp_path))) for rank in range(2)])
