"""Lists of the kernels that training runs launch: a process of its own prints them as JSON.

A run here is whole: all its layers, micro-batches and steps, other documents in each, a validation between. What is
compiled ahead comes from a smaller one. Nothing is computed, so losses are whatever is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from stoker.model.config import ModelConfig
from stoker.trainer.errors import NonFinite
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.parallel_dims import check_supported
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.ahead.absent_ranks import absent_mesh
from stoker.trainer.rank.ahead.launch import ON_GPU, ON_HOST, launch_kernels, repeat_bitwise
from stoker.trainer.rank.ahead.variants import variants_of
from stoker.trainer.rank.build import RankContext, make_passes
from stoker.trainer.rank.context_share import share_batches
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.pipeline.slices import empty_model
from stoker.trainer.rank.run_inputs import lora_settings
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.train_step import TrainStep
from stoker.trainer.rank.validation import validate
from stoker.trainer.rank.zero_maker import make_zero
from testing.engine.launched_kernels import listing_launches
from testing.trainer.tiny_run import SyntheticBatches, tiny_config

DENSE = ModelConfig(
    architecture="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=192,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
)
EXPERTS = replace(
    DENSE,
    architecture="qwen3-moe",
    num_layers=4,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=96,
    decoder_sparse_step=2,
)
TWO, FOUR = {"gang__ranks_per_node": 2}, {"gang__ranks_per_node": 4}
RUNS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "tensor": (DENSE, {**TWO, "parallelism__tensor": 2, "parallelism__sequence_parallel": True}),
    "one stage a rank": (replace(DENSE, num_layers=7), {**FOUR, "parallelism__pipeline": 2}),
    "zero-bubble": (
        replace(DENSE, num_layers=7),
        {**TWO, "parallelism__pipeline": 2, "parallelism__pipeline_schedule": "ZeroBubble"},
    ),
    "stages in turn": (
        replace(DENSE, num_layers=13),
        {
            **TWO,
            "parallelism__pipeline": 2,
            "parallelism__pipeline_schedule": "Interleaved",
            "parallelism__stages_per_rank": 2,
        },
    ),
    "context": (DENSE, {**TWO, "parallelism__context": 2}),
    "ring": (DENSE, {**TWO, "parallelism__context": 2, "parallelism__context_method": "Ring"}),
    "exchange of heads": (DENSE, {**TWO, "parallelism__context": 2, "parallelism__context_method": "Ulysses"}),
    "replicas": (DENSE, {**FOUR, "parallelism__replicate": 2, "memory__zero_stage": 3}),
    "a budget": (
        DENSE,
        {"memory__activation_checkpointing": "selective", "memory__activation_budget_gib": 0.02},
    ),
    "state in a file": (DENSE, {**TWO, "memory__nvme_offload": {"path": "/nowhere"}, "memory__zero_stage": 1}),
    "fp8": (DENSE, {"memory__precision": "fp8", "training__sequence_length": 48}),
    "fp16": (DENSE, {"memory__precision": "fp16"}),
    "experts on ranks": (EXPERTS, {**FOUR, "parallelism__expert": 4}),
}
"""Runs in layouts of their own, whose configuration kernels are compiled from."""
DATA_PARALLEL: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "another length": (DENSE, {"training__sequence_length": 1008}),
    "several sequences": (
        DENSE,
        {"training__micro_batch_size": 4, "training__global_batch_size": 8, "training__sequence_length": 64},
    ),
    "bitwise": (DENSE, {**TWO, "training__deterministic": "AnyDataParallel", "training__global_batch_size": 8}),
    "full recompute": (DENSE, {**TWO, "memory__activation_checkpointing": "full"}),
    "selective recompute": (DENSE, {"memory__activation_checkpointing": "selective"}),
    "state on the host": (DENSE, {**FOUR, "memory__cpu_offload": True, "training__global_batch_size": 4}),
    "no sharding": (DENSE, {**TWO, "memory__zero_stage": 0}),
    "rowwise": (DENSE, {"memory__precision": "fp8", "memory__fp8_recipe": "Rowwise"}),
    "experts": (EXPERTS, {**TWO, "training__sequence_length": 2048}),
}
"""Runs whose kernels are those of the model's name."""


def main() -> None:
    torch.set_num_threads(1)
    named = {id(model): launches_of(model, list(variants_of(model))) for model in (DENSE, EXPERTS)}
    facts = {
        "layouts": {name: compared(model, config_of(changes)) for name, (model, changes) in RUNS.items()},
        "missing": {
            name: sorted(whole_run(model, config_of(changes)) - named[id(model)])
            for name, (model, changes) in DATA_PARALLEL.items()
        },
        "of tensor": len(launches_of(*RUNS_TENSOR) - named[id(DENSE)]),
        "kernels": sorted({name.rpartition(".")[2] for name, _ in named[id(EXPERTS)] | named[id(DENSE)]}),
    }
    print(json.dumps(facts))


def config_of(changes: dict[str, Any]) -> TrainerConfig:
    """Three micro-batches on each rank, six in a pipeline, unless changed."""
    cuts = {axis: changes.get(f"parallelism__{axis}", 1) for axis in ("tensor", "pipeline", "context")}
    batches = 3 if cuts["pipeline"] == 1 else 6
    plain = {
        "training__deterministic": "Off",
        "training__sequence_length": 160,
        "training__global_batch_size": batches * changes.get("gang__ranks_per_node", 1) // math.prod(cuts.values()),
        "memory__precision": "bf16",
    }
    return tiny_config(**{**plain, **changes})


RUNS_TENSOR = (DENSE, [config_of(RUNS["tensor"][1])])


def compared(model: ModelConfig, config: TrainerConfig) -> dict[str, list[Any]]:
    """What a whole run launches and the list lacks, and the other way round."""
    listed, whole = launches_of(model, [config]), whole_run(model, config)
    return {"missing": sorted(whole - listed), "more": sorted(listed - whole)}


def launches_of(model: ModelConfig, configs: list[TrainerConfig]) -> set[tuple[str, str]]:
    with listing_launches(90) as launches:
        for config in configs:
            launch_kernels(config, model)
    return set(launches)


def whole_run(model: ModelConfig, config: TrainerConfig) -> set[tuple[str, str]]:
    """What the first and the last rank of each stage launch in two steps and a validation."""
    dims = check_supported(config)
    repeat_bitwise(config)
    with listing_launches(90) as launches:
        ranks = dims.world_size // dims.pipeline
        for rank in sorted({stage * ranks + place for stage in range(dims.pipeline) for place in (0, ranks - 1)}):
            with absent_mesh(dims, rank, any_data_parallel=config.training.any_data_parallel) as mesh:
                run_rank(config, model, mesh)
    return set(launches)


def run_rank(config: TrainerConfig, model: ModelConfig, mesh: Mesh) -> None:
    ops, _ = make_ops(config, ON_GPU)
    length, cuts = config.training.sequence_length, config.parallelism.sequence_parallel
    held = empty_model(
        *(model, ops, mesh.dims, mesh.stage, length, mesh.tensor, cuts, mesh.expert), lora_settings(config)
    )
    context = RankContext(mesh=mesh, save_group=SaveGroup(0, 1, None), channel=RankChannel(None), device=ON_HOST)
    zero = make_zero(in_memory(config), held, mesh, ON_HOST, fill=lambda _: None)
    passes = make_passes(config, context, held, zero, attention="stoker")
    step = TrainStep(passes, zero, config.optimization.gradient_clipping)
    batches = share_batches(SyntheticBatches(config, model.vocab_size), mesh)
    mine, count = (mesh.data_index, mesh.data_size), mesh.dims.micro_batches_per_rank(config.training)
    for number in (1, 2):
        with contextlib.suppress(NonFinite):
            targets = batches.target_tokens(number)
            step(number, batches.micro_batches(number, *mine), count, targets, 1e-3 / number, StepSignals)
    validate(passes, zero, batches.validation(*mine), StepSignals)
    zero.wait_parameters()
    zero.close()


def in_memory(config: TrainerConfig) -> TrainerConfig:
    """State of a file in memory: the update of a piece is the same launch."""
    if config.memory.nvme_offload is None:
        return config
    memory = config.memory.model_copy(update={"nvme_offload": None, "cpu_offload": True})
    return config.model_copy(update={"memory": memory})


def in_a_process() -> Any:
    """Run this file in a process of its own, whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "testing.trainer.launched_kernels"],
        env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
