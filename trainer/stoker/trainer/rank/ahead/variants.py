"""The runs that stand for a model without a configuration: data parallel, in 16 and in 8 bits. Pure.

A run in another layout has kernels of its own shapes; its configuration is what they are compiled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from stoker.model.config import ModelConfig
from stoker.pod.config_file import ConfigError, parse
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.ahead.launch import ON_HOST
from stoker.trainer.rank.fp8_weights import check_fp8

RANKS = (1, 2, 4, 8)
"""Ranks whose gradients one kernel sums."""
STAGES = (1, 2, 3)
"""ZeRO stages; at 0 the kernels are those of 1."""
MICRO_BATCHES = (1, 2)
"""Of a step: the sum of a single one is written, that of a later one is added."""
MOST_TOKENS = 8192
RECIPES = ("Tensorwise", "Rowwise")


def variants_of(model: ModelConfig) -> Iterator[TrainerConfig]:
    """Yield runs of a model that together launch what its data-parallel runs launch."""
    for ranks in RANKS:
        for stage, batches in product(STAGES, MICRO_BATCHES):
            yield run_of(model, ranks, batches, memory={"zero_stage": stage})
        if ranks > 1 and model.num_experts is not None and model.num_experts % ranks == 0:
            yield run_of(model, ranks, 2, parallelism={"expert": ranks})
    for recipe in RECIPES:
        run = run_of(model, 1, 2, memory={"precision": "fp8", "fp8_recipe": recipe})
        if takes_fp8(run, model):
            yield run


def takes_fp8(run: TrainerConfig, model: ModelConfig) -> bool:
    try:
        check_fp8(run, model, ON_HOST)
    except ConfigError:
        return False
    return True


def run_of(model: ModelConfig, ranks: int, batches: int, **sections: dict[str, Any]) -> TrainerConfig:
    """A run in bf16 with AdamW, `batches` a step and rank; what it would read and write is not there."""
    fields: dict[str, Any] = {
        "job": {"name": "kernels", "uid": "none", "writer": "00000000"},
        "gang": {"ranks_per_node": ranks},
        "termination_log": "none",
        "work_dir": "none",
        "model": {},
        "training": {
            "total_steps": 1,
            "global_batch_size": batches * ranks,
            "sequence_length": min(MOST_TOKENS, model.max_position_embeddings),
        },
        "data": {"sources": [{"name": "none", "path": "none"}]},
        "checkpoint": {"root": "none"},
    }
    memory = {"precision": "bf16"} | sections.pop("memory", {})
    return parse(TrainerConfig, {**fields, **sections, "memory": memory})
