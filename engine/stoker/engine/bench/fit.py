"""Workloads that an engine cannot take, refused before a request runs. Pure: numbers in, messages that name options."""

from __future__ import annotations

from stoker.engine.bench.workload import Workload
from stoker.pod.config_file import ConfigError


def check_length(workload: Workload, max_model_len: int) -> None:
    """Raises ConfigError where a request may be longer than the engine takes."""
    if workload.longest > max_model_len:
        parts = f"{workload.shared} shared + {workload.own.high} input + {workload.output.high} output"
        raise ConfigError(
            f"the longest request has {parts} = {workload.longest} tokens; "
            f"allowed are {max_model_len} (--max-model-len)"
        )


def check_batch(workload: Workload, num_seats: int, num_blocks: int, block_size: int) -> None:
    """Raises ConfigError where some requests of a batch would wait for others."""
    if workload.count > num_seats:
        raise ConfigError(
            f"--batch {workload.count} is more than the {num_seats} sequences of one step; "
            "--max-requests allows more, up to --max-batch-tokens"
        )
    needed = workload.count * -(-(workload.longest - 1) // block_size)  # the last token is not stored
    if needed > num_blocks:
        raise ConfigError(
            f"--batch {workload.count} of {workload.longest} tokens each needs {needed} blocks of the cache, "
            f"which has {num_blocks} (of {block_size} tokens)"
        )
