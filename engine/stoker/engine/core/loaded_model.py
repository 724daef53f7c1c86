"""What fronts are told of a model: its facts once it is loaded, or the cause why it could not be."""

from __future__ import annotations

from pathlib import Path

import torch

from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.engine.core.build import tokenizer_folder
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import ModelFacts
from stoker.engine.errors import ExecutorLost
from stoker.engine.plan import EnginePlan
from stoker.pod.causes import Cause, CauseRule, cause_of_error, mentions
from stoker.pod.config_file import ConfigError

LOADING_CAUSES = (
    CauseRule(RuntimeError, Cause.OUT_OF_MEMORY, mentions("can't allocate memory")),  # torch, on the CPU
    CauseRule(ConfigError, Cause.CONFIG_INVALID),
    CauseRule(CheckpointCorrupt, Cause.CHECKPOINT_CORRUPT),
    CauseRule(ExecutorLost, Cause.RANK_FAILED),
    CauseRule(torch.OutOfMemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(MemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(ValueError, Cause.MODEL_ERROR),
    CauseRule(OSError, Cause.MODEL_ERROR),
)
"""Causes of a model that could not be loaded; any other error is Internal."""


def cause_of_loading(error: Exception) -> Cause:
    """Why a model could not be loaded."""
    return cause_of_error(error, LOADING_CAUSES, Cause.INTERNAL)


def facts_of(engine: LLMEngine, plan: EnginePlan, work_dir: Path) -> ModelFacts:
    """The facts of a loaded model; `work_dir`: where the files of its tokenizer are put for fronts."""
    return ModelFacts(
        path=plan.model_path,
        tokenizer_folder=str(tokenizer_folder(plan, work_dir)),
        digest=plan.digest or plan.source_digest,
        dtype=str(plan.dtype).removeprefix("torch."),
        vocab_size=engine.limits.vocab_size,
        max_model_len=engine.limits.max_model_len,
        eos_token_ids=engine.limits.eos_token_ids,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        mixed_tokens=plan.mixed_tokens,
        step_tokens=plan.max_batch_tokens,
    )
