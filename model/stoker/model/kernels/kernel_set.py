"""A set of kernels: its interface, which sets there are, and what this machine lacks for one.

T tokens, D input size, E output size, N heads, K kv heads, H head_dim, F ffn, V vocab. Called by `ops`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.block_weights import BlockWeights, PreparedBlocks
from stoker.model.kernels.compiled.library import CompileError, load_library
from stoker.model.kernels.expert_rows import ExpertRows, Routes
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.fp8 import Fp8Weight
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.runs import AttentionRuns
from stoker.model.kernels.sampling import Adjustments, SampledTokens, SampleRows, SamplingTable
from stoker.model.kernels.sequences import DeviceSequences, PackedSequences, PagedSequences
from stoker.pod.capabilities import AttentionName, KernelsName

log = logging.getLogger("stoker.model")


class MissingKernel(ValueError):
    """The configuration asks for a kernel that this build does not have."""


class CrossEntropy(NamedTuple):
    """Result of the last layer and the loss together."""

    loss_sum: Tensor
    """Scalar, float32, differentiable: sum over tokens of weight * -logprob."""
    num_targets: Tensor
    """Scalar, float32: sum of the weights."""
    logprobs: Tensor
    """float32, no gradient: log-probability of each target; 0 where the weight is 0."""


class Kernels(Protocol):
    """The interface of an implementation; the methods of `Ops` document each operation.

    None as a result: there is no fused kernel for the whole, so `Ops` calls the single operations.
    """

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor: ...
    def fp8_linear(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, fp8: Fp8Weight, keeps_casts: bool
    ) -> Tensor: ...
    def logits(self, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor: ...
    def pack(self, weight_ED: Tensor) -> Tensor: ...
    def embedding(self, tokens_T: Tensor, weight_VD: Tensor) -> Tensor: ...
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def swiglu(self, gate_up_TF: Tensor) -> Tensor: ...
    def norm_linear(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        norm_D: Tensor,
        eps: float,
        weight_ED: Tensor,
        bias_E: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None: ...
    def norm_linear_swiglu(
        self, x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, gate_up_FD: Tensor
    ) -> tuple[Tensor, Tensor] | None: ...
    def linear_swiglu(self, x_TD: Tensor, gate_up_FD: Tensor) -> Tensor | None: ...
    def prepare_blocks(self, weights: Sequence[BlockWeights]) -> PreparedBlocks | None: ...
    def route(self, logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes: ...
    def dispatch(self, x_TD: Tensor, rows: ExpertRows) -> Tensor: ...
    def grouped_linear(self, x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor: ...
    def combine(self, y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor: ...
    def experts(self, x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None) -> Tensor | None: ...
    def norm_experts(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        norm_D: Tensor,
        eps: float,
        weights: ExpertWeights,
        slots_T: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None: ...
    def rotate(self, q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]: ...
    def rotate_and_write(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer
    ) -> Tensor: ...
    def packed_attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        sequences: PackedSequences,
        scale: float,
        window: int | None,
        attention: AttentionName,
    ) -> Tensor: ...
    def attend_runs(
        self,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        runs: AttentionRuns,
        scale: float,
        window: int | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...
    def attend_runs_backward(
        self,
        grad_TNH: Tensor,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        out_TNH: Tensor,
        lse_TN: Tensor,
        runs: AttentionRuns,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def paged_attention(
        self,
        q_TNH: Tensor,
        cache: Tensor,
        layer: int,
        sequences: PagedSequences | DeviceSequences,
        scale: float,
        window: int | None,
    ) -> Tensor: ...
    def log_softmax(self, logits_TV: Tensor) -> Tensor: ...
    def cross_entropy(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        first_token: int,
        group: ProcessGroup | None,
        most_rows: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def sample(
        self,
        logits_BV: Tensor,
        rows: SampleRows,
        table: SamplingTable,
        adjustments: Adjustments | None,
        into_SL: Tensor | None,
    ) -> SampledTokens: ...
    def line_squares(self, flat: Tensor, line: int) -> Tensor: ...
    def sum_of_squares(self, flat: Tensor) -> Tensor: ...
    def adam_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        parameters: Tensor | None,
        rule: AdamStep,
        scale: Tensor | None,
    ) -> None: ...


IMPLEMENTATIONS: dict[tuple[str, bool], str] = {
    ("reference", False): "stoker.model.kernels.reference",
    ("reference", True): "stoker.model.kernels.deterministic",
    ("compiled", False): "stoker.model.kernels.compiled.kernels",
    ("fused", False): "stoker.model.kernels.fused.kernels",
    ("fused", True): "stoker.model.kernels.fused.deterministic",
}
"""Modules, imported when they are chosen: the fused ones need Triton, the compiled ones a C compiler."""


def choose_kernels(kernels: str, is_deterministic: bool) -> Kernels:
    """Return the implementation. Raises MissingKernel where there is none."""
    if (kernels, is_deterministic) not in IMPLEMENTATIONS:
        raise MissingKernel(f"kernels: unknown {kernels!r}; allowed: auto, reference, fused")
    try:
        return cast("Kernels", importlib.import_module(IMPLEMENTATIONS[kernels, is_deterministic]))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingKernel(f"kernels: {kernels!r} needs Triton, which is not installed") from error
    except CompileError as error:
        raise MissingKernel(f"kernels: {kernels!r}: {error}") from error


def resolve_kernels(name: str, device: str = "cpu") -> KernelsName:
    """Resolve the kernels' name: `auto` is `fused` on CUDA, else `reference`.

    Raises MissingKernel where the device cannot run them.
    """
    is_cuda = torch.device(device).type == "cuda"
    if name == "auto":
        return "fused" if is_cuda else "reference"
    if name == "fused" and not is_cuda:
        raise MissingKernel(f"kernels: 'fused' needs a CUDA device, not {device!r}; allowed there: auto, reference")
    return cast("KernelsName", name)


def resolve_serving_kernels(
    name: str, device: str, dtype: torch.dtype, *, deterministic: bool, load: Callable[[], object] = load_library
) -> KernelsName:
    """Resolve the kernels' name for an engine: as `resolve_kernels`, but `auto` in bfloat16 on a CPU is `compiled`.

    Where these cannot be compiled, `auto` is `reference`, and the log names the reason. Raises MissingKernel as
    `resolve_kernels`. `load`: loads the C kernels, or raises CompileError.
    """
    resolved = resolve_kernels(name, device)
    if name != "auto" or resolved != "reference" or dtype is not torch.bfloat16 or deterministic:
        return resolved
    try:
        load()
    except CompileError as error:
        log.warning(
            "kernels: reference, which takes up to twice as long as C kernels, without AVX-512 up to six times: %s",
            error,
        )
        return resolved
    return "compiled"


def obstacle(attention: str, dtype: torch.dtype | None) -> str | None:
    """Return why this attention is not available here, or None. Nothing is imported: that takes seconds."""
    if attention not in ("flash", "cudnn"):
        return None
    if dtype not in (None, torch.bfloat16, torch.float16):
        return f"does not take {dtype}"
    if attention == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "has no backward pass that repeats bitwise"
    if attention == "flash" and not has_flash():
        return "needs flash-attn-4, which is not installed: pip install 'stoker[flash]'"
    return None


def has_flash() -> bool:
    """Whether flash-attn-4 and the compiler that it needs are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn.cute", "cutlass"))
