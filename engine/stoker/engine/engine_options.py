"""The options of an engine on a command line, and the sections of its configuration that they give.

What concerns HTTP is not among them. Used by `serve` and `bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def add_engine_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], help="default: bfloat16 where it is fast")
    add("--device", choices=["auto", "cpu", "cuda"], help="default: the GPU if there is one")
    add("--threads", type=int, help="threads on the CPU (default: its cores)")
    add(
        "--deterministic",
        action="store_true",
        default=None,
        help="compute log-probabilities that equal the trainer's bit for bit",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output")
    add("--max-batch-tokens", type=int, metavar="TOKENS", help="token budget of one step")
    add("--max-requests", type=int, metavar="N", help="sequences in one step")
    add("--num-blocks", type=int, metavar="N", help="blocks of the cache")
    add("--block-size", type=int, metavar="TOKENS", help="tokens in one block (default: 64 on a GPU, 16 on a CPU)")
    add("--cache-bytes", type=int, metavar="BYTES", help="size of the cache")
    add(
        "--host-memory-bytes",
        type=int,
        metavar="BYTES",
        help="main memory for cold and preempted blocks (default: none)",
    )
    add(
        "--experts-on-device",
        type=int,
        metavar="N",
        help="experts of each layer on a rank's device; the others wait in main memory (default: all)",
    )
    add("--disk-path", metavar="DIR", help="folder for blocks that the host memory has no room for (default: none)")
    add("--disk-bytes", type=int, metavar="BYTES", help="most bytes in it")
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    add(
        "--data",
        "--data-parallel-size",
        type=int,
        metavar="CORES",
        help="copies of the model behind one port; on GPUs with --device cuda (default 1)",
    )
    add(
        "--tensor",
        "--tensor-parallel-size",
        type=int,
        metavar="RANKS",
        help="ranks that share each layer, one per GPU (default 1)",
    )
    add(
        "--pipeline",
        "--pipeline-parallel-size",
        type=int,
        metavar="STAGES",
        help="stages of neighbouring layers, each of --tensor ranks (default 1)",
    )
    add(
        "--expert",
        "--expert-parallel-size",
        type=int,
        metavar="RUNS",
        help="runs of whole experts over the tensor ranks, or over as many data-parallel ones (default 1: no runs)",
    )


def engine_sections(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sections that the options give, but for the model."""
    return {
        "device": arguments.device,
        "deterministic": arguments.deterministic,
        "threads": arguments.threads,
        "cache": given(
            {
                "num_blocks": arguments.num_blocks,
                "block_size": arguments.block_size,
                "memory_bytes": arguments.cache_bytes,
                "prefix_cache": not arguments.no_prefix_cache,
                "host_memory_bytes": arguments.host_memory_bytes,
                "disk": given({"path": arguments.disk_path, "bytes": arguments.disk_bytes}) or None,
            }
        ),
        "experts": given({"on_device": arguments.experts_on_device}),
        "scheduler": given(
            {
                "max_model_len": arguments.max_model_len,
                "max_batch_tokens": arguments.max_batch_tokens,
                "max_requests": arguments.max_requests,
            }
        ),
        "parallelism": given({name: getattr(arguments, name) for name in ("tensor", "pipeline", "expert", "data")}),
    }


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given; the configuration's own defaults hold for the rest."""
    return {key: value for key, value in values.items() if value is not None}
