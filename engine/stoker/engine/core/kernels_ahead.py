"""The kernels of an engine, launched by an engine: every kernel that it may launch for a model, on one layer of it.

The steps are those of the kernel warm-up, in the sizes of a server and with every way of sampling. Nothing is computed:
the caller has entered `compiling_into`, so a launch compiles. Tokens are assumed.

Called by `kernels_main`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.engine.core.kernel_warmup import AT_START, WarmupLoad, compile_kernels
from stoker.engine.execution.executor import InProcess
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.plan import BLOCK_SIZES, EnginePlan
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.layout import ONE_CELL
from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache

LENGTHS = (1, 2, 3, 4, 5, 8, 48, 300, 700, 1100, 2600)
"""Lengths of prompts: a pass of each number of rows that has a kernel of its own, up to one without a graph."""
SAMPLINGS = (
    SamplingParams(seed=0, top_k=5),
    SamplingParams(seed=0, min_p=0.1),
    SamplingParams(seed=0, presence_penalty=1.0, frequency_penalty=1.0),
    SamplingParams(seed=0, repetition_penalty=1.2, top_p=0.9),
    SamplingParams(seed=0, logit_bias={3: 1.0}),
    SamplingParams(seed=0, min_tokens=2, stop_token_ids=(4,), bad_token_ids=(5,)),
    SamplingParams(seed=0, allowed_token_ids=(1, 2, 3)),
    SamplingParams(seed=0, logprobs=5),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(seed=0, prompt_logprobs=3),
)
"""Every way of sampling that launches other kernels than those of the warm-up at the start."""


@dataclass(frozen=True)
class ServerSizes:
    """What a server's configuration chooses; the defaults are its own."""

    dtype: torch.dtype = torch.bfloat16
    attention: str = "auto"
    block_size: int = BLOCK_SIZES["cuda"]
    max_batch_tokens: int = 8192
    max_requests: int = 256
    max_model_len: int = 8192


def launch_kernels(config: ModelConfig, sizes: ServerSizes) -> None:
    """Launch the kernels of a server's start, then those of its requests."""
    plan, ops, device = plan_ahead(config, sizes), Ops("fused"), torch.device("cpu")
    for load in (AT_START, server_load(plan)):
        compile_kernels(plan, config, ops, device, None, load, lambda runner: InProcess(AssumedTokens(runner)))
    launch_checksums(KVCache.block_bytes(config, block_size=plan.block_size, dtype=plan.dtype))


def launch_checksums(block_bytes: int) -> None:
    """Launch the sums of blocks that leave the GPU: to the host tier, and to another engine, also of other widths."""
    from stoker.engine.transfer import cell_kernel, checksum_kernel  # import triton

    blocks_BN, rows_B = torch.empty(2, block_bytes, dtype=torch.uint8), torch.arange(2)
    checksum_kernel.sums(blocks_BN, rows_B, rows_B)
    checksum_kernel.copy_and_sum(blocks_BN, rows_B, blocks_BN, rows_B, rows_B)
    whole = cell_kernel.CellShape(ONE_CELL, 1, 1, block_bytes // 4)
    cell_kernel.sum_cells(blocks_BN, rows_B, rows_B, whole)
    cell_kernel.join_cells(blocks_BN, rows_B, blocks_BN, rows_B, rows_B, whole)


def plan_ahead(config: ModelConfig, sizes: ServerSizes) -> EnginePlan:
    """The plan of an engine on a GPU, with tensors on the CPU."""
    return EnginePlan(
        model_path="",
        digest=None,
        device="cpu",
        dtype=sizes.dtype,
        kernels="fused",
        attention=sizes.attention,
        deterministic=False,
        threads=1,
        block_size=sizes.block_size,
        num_blocks=1,
        max_model_len=min(sizes.max_model_len, config.max_position_embeddings),
        max_batch_tokens=sizes.max_batch_tokens,
        num_seats=sizes.max_requests,
        tensor=1,
        graphs=False,
    )


def server_load(plan: EnginePlan) -> WarmupLoad:
    """Requests of every kind, with memory for all of them at once."""
    plain = SamplingParams(seed=0)
    requests = (*((length, plain) for length in LENGTHS), *((48, params) for params in SAMPLINGS))
    longest = max(length for length, _ in requests)
    return WarmupLoad(
        requests,
        num_seats=plan.num_seats,
        max_batch_tokens=plan.max_batch_tokens,
        num_blocks=len(requests) * (longest // plan.block_size + 2),
        max_model_len=plan.max_model_len,
    )


class AssumedTokens:
    """A runner whose kernels compute nothing: each sample is token 0, with the log-probabilities that are in memory."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, step: StepInput) -> StepOutput:
        output = self.runner.run(step)
        count = len(step.sample_seats)
        return StepOutput(step.number, (0,) * count, (True,) * count, output.logprobs, output.prompt_logprobs)
