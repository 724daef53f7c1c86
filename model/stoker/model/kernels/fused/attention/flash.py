"""Attention by flash-attn-4, an optional package: imported at the first call only, which takes seconds, and compiled
for each new kind of call. Its compiled kernels are kept beside Triton's.

Called by `packed` and `prompts`.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stoker.model.kernels.sequences import PackedSequences

ONE_KERNEL_QUERIES = 256
"""Least bound on the queries of a sequence that is stated: with one below a tile the package compiles another kernel,
in the middle of a request. Bounds may be too large."""


def attend_flash(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Attend by flash-attn-4. Its backward adds gradients of q in any order, unless torch must be deterministic."""
    flash = import_flash()
    out = flash.flash_attn_varlen_func(
        q_TNH,
        k_TKH,
        v_TKH,
        cu_seqlens_q=sequences.cu_seqlens,
        cu_seqlens_k=sequences.cu_seqlens,
        max_seqlen_q=sequences.max_seqlen,
        max_seqlen_k=sequences.max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return cast("Tensor", out[0] if isinstance(out, tuple) else out)


def attend_varlen(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKH: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend for the last queries of each sequence of keys (`VarlenAttention`). No gradient."""
    out = import_flash().flash_attn_varlen_func(
        q_TNH,
        k_LKH,
        v_LKH,
        cu_seqlens_q=query_start,
        cu_seqlens_k=key_start,
        max_seqlen_q=max(longest[0], ONE_KERNEL_QUERIES),
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
    )
    return cast("Tensor", out[0] if isinstance(out, tuple) else out)


@functools.cache
def import_flash() -> Any:
    keep_kernels(os.environ)
    with warnings.catch_warnings():  # the packages below it use each other's deprecated names
        warnings.simplefilter("ignore")
        return importlib.import_module("flash_attn.cute.interface")


def keep_kernels(environment: MutableMapping[str, str]) -> None:
    """Make the package keep what it compiles, which else takes each process 10 seconds and more.

    The folder is `flash-attn` beside Triton's cache, unless the environment names one. Where it cannot be made,
    nothing is kept.
    """
    triton = environment.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    folder = Path(environment.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") or Path(triton).parent / "flash-attn")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
