"""The kernels and the attention that one run uses.

Pure; called by `run_inputs` and `build` at the start.
"""

from __future__ import annotations

import torch

from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.pod.capabilities import CONTEXT_ATTENTION, AttentionName
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.cheap_results import RecomputingOps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""`memory.precision` -> dtype of the parameters that forward and backward use; fp8 casts some of them further."""


def make_ops(config: TrainerConfig, device: torch.device) -> tuple[Ops, AttentionName]:
    """The kernels that the configuration chooses.

    The reference kernels repeat a run bitwise only in their deterministic form. The fused ones do so by themselves when
    torch is told to be deterministic (`set_threads`); their own deterministic form, whose results do not depend on a
    row's batch, is for comparing trainer and engine.

    Ranks that share sequences need an attention that their method of exchange can use.

    Raises:
        ConfigError: the kernels or the attention are not built for this device.
    """
    try:
        kernels = resolve_kernels(config.kernels, device.type)
        deterministic = config.training.deterministic != "Off" and kernels == "reference"
        is_selective = config.memory.activation_checkpointing == "selective"
        ops = RecomputingOps(kernels, deterministic) if is_selective else Ops(kernels, deterministic)
        parallelism = config.parallelism
        among = CONTEXT_ATTENTION[parallelism.context_method] if parallelism.context > 1 else None
        return ops, ops.attention(config.attention, DTYPES.get(config.memory.precision), among=among)
    except ValueError as error:
        raise ConfigError(str(error)) from error
