"""The model's operations: one method per op.

Each method checks shapes, then calls the implementation that was chosen at construction.

`Ops` is built once and given to the model and to `attend`. A kernel that this build lacks is an error, never a silent
fallback. T tokens, D input size, E output size, N heads, K kv heads, H head_dim, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels.adam import AdamStep
from stoker.model.kernels.block_weights import BlockWeights, PreparedBlocks
from stoker.model.kernels.expert_ops import ExpertOps
from stoker.model.kernels.fp8 import fp8_of
from stoker.model.kernels.kernel_set import CrossEntropy, MissingKernel, choose_kernels, obstacle
from stoker.model.kernels.operand_checks import (
    check_adam,
    check_attention,
    check_cache_write,
    check_cross_entropy,
    check_norm_linear,
    check_rotate,
    check_runs,
    check_sample,
)  # fmt: skip
from stoker.model.kernels.rotation import CacheLayer, Rotation
from stoker.model.kernels.runs import AttentionRuns
from stoker.model.kernels.sampling import Adjustments, SampledTokens, SampleRows, SamplingTable
from stoker.model.kernels.sequences import DeviceSequences, PackedSequences, PagedSequences
from stoker.pod.capabilities import ATTENTION, PAGED_ATTENTION, AttentionName, KernelsName


class Ops(ExpertOps):
    """The operations with one set of kernels. Nothing changes after construction; equal where the choice is equal."""

    keeps_casts = True
    """Backward of a product in eight bits keeps its input in eight bits; else the input itself."""

    def __init__(self, kernels: KernelsName = "reference", deterministic: bool = False) -> None:
        """Choose the kernels.

        `deterministic`: a row's result does not depend on its batch, chunk or place, so trainer and engine agree
        bitwise (on the CPU with one intra-op thread).

        Raises:
            MissingKernel: there are no such kernels, or Triton is not installed.
        """
        self.kernels: KernelsName = kernels
        self.deterministic = deterministic
        self.impl = choose_kernels(kernels, deterministic)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ops) and self.impl is other.impl

    def __hash__(self) -> int:
        return hash((self.kernels, self.deterministic))

    def __repr__(self) -> str:
        return f"Ops({self.kernels!r}, deterministic={self.deterministic})"

    def attention(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        program: Literal["packed", "paged"] = "packed",
        among: Sequence[AttentionName] | None = None,
    ) -> AttentionName:
        """Check the choice of attention, and resolve `auto` for the compute dtype (None: two bytes wide).

        `program`: attention over packed sequences (the trainer's) or over the cache (`paged`, the engine's). `among`:
        what the caller can use of it; None: all.
        """
        key = self.kernels, self.deterministic
        allowed = PAGED_ATTENTION[key] if program == "paged" else ATTENTION[key]
        if among is not None:
            allowed = tuple(choice for choice in allowed if choice in among)
        if name == "auto":
            return next(choice for choice in allowed if obstacle(choice, dtype) is None)
        if name not in allowed:
            raise MissingKernel(
                f"attention: {name!r} is not built for kernels {self.kernels!r} with deterministic = "
                f"{self.deterministic}; allowed: auto, {', '.join(allowed)}"
            )
        if (reason := obstacle(name, dtype)) is not None:
            raise MissingKernel(f"attention: {name!r} {reason}; allowed: auto, stoker")
        return name

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """Return y_TE = x_TD @ weight_ED^T (+ bias): every matrix product of the model's weights.

        Fused kernels write the weight's gradient to the place that `set_grad_destination` sets. A weight with `set_fp8`
        is multiplied in eight bits.
        """
        if x_TD.shape[-1] != weight_ED.shape[-1]:
            raise ValueError(f"linear: weight {tuple(weight_ED.shape)} does not fit x {tuple(x_TD.shape)}")
        if (fp8 := fp8_of(weight_ED)) is not None:
            return self.impl.fp8_linear(x_TD, weight_ED, bias_E, fp8, self.keeps_casts)
        return self.impl.linear(x_TD, weight_ED, bias_E)

    def is_plain(self, weight_ED: Tensor) -> bool:
        """Return whether `linear` with this weight is one product of any number of rows, so that it may be split."""
        return not self.deterministic and fp8_of(weight_ED) is None

    def logits(self, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Compute the output layer: `linear`, without gradient in float32 where that costs little.

        In deterministic mode it is exactly `linear`, which the trainer's loss computes as well.
        """
        if hidden_TD.shape[-1] != weight_VD.shape[-1]:
            raise ValueError(f"logits: weight {tuple(weight_VD.shape)} does not fit hidden {tuple(hidden_TD.shape)}")
        return self.impl.logits(hidden_TD, weight_VD)

    def pack(self, weight_ED: Tensor) -> Tensor:
        """Return a copy of the weight in the order that `linear` reads fastest, or the weight itself.

        Only `linear` without gradient can use such a copy.
        """
        return self.impl.pack(weight_ED)

    def embedding(self, tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the tokens' rows of the table, x_TD."""
        if tokens_T.dim() != 1:
            raise ValueError(f"embedding: tokens must be packed in one dim, not {tuple(tokens_T.shape)}")
        return self.impl.embedding(tokens_T, weight_VD)

    def note_gathered(self, x_TD: Tensor, x_tD: Tensor, group: ProcessGroup) -> None:
        """Called before tokens x_tD are used gathered, as x_TD: operations that save memory may free those again."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise the last dim; statistics in float32, result in x's dtype."""
        if x_TD.shape[-1:] != weight_D.shape:
            raise ValueError(f"rms_norm: weight {tuple(weight_D.shape)} does not fit x {tuple(x_TD.shape)}")
        return self.impl.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        if x_TD.shape != residual_TD.shape or x_TD.shape[-1:] != weight_D.shape:
            raise ValueError(
                f"add_rms_norm: x {tuple(x_TD.shape)}, residual {tuple(residual_TD.shape)} and weight "
                f"{tuple(weight_D.shape)} do not fit"
            )
        return self.impl.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def swiglu(self, gate_up_TF: Tensor) -> Tensor:
        """Return silu(gate) * up; gate is the first half of the last dim and up the second."""
        if gate_up_TF.shape[-1] % 2:
            raise ValueError(f"swiglu: the last dim of {tuple(gate_up_TF.shape)} must hold gate and up")
        return self.impl.swiglu(gate_up_TF)

    def norm_of_sum(self, x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm(x + update), x + update); without an update x is the sum."""
        if update_TD is None:
            return self.rms_norm(x_TD, norm_D, eps), x_TD
        return self.add_rms_norm(update_TD, x_TD, norm_D, eps)

    def norm_linear(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        norm_D: Tensor,
        eps: float,
        weight_ED: Tensor,
        bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (linear(norm(x + update)), x + update), in one kernel where that is faster."""
        check_norm_linear(x_TD, update_TD, norm_D, weight_ED)
        if fp8_of(weight_ED) is None:
            fused = self.impl.norm_linear(x_TD, update_TD, norm_D, eps, weight_ED, bias_E)
            if fused is not None:
                return fused
        normed_TD, total_TD = self.norm_of_sum(x_TD, update_TD, norm_D, eps)
        return self.linear(normed_TD, weight_ED, bias_E), total_TD

    def norm_linear_swiglu(
        self, x_TD: Tensor, update_TD: Tensor | None, norm_D: Tensor, eps: float, gate_up_FD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (swiglu(linear(norm(x + update))), x + update); the weight holds the rows of gate, then of up."""
        check_norm_linear(x_TD, update_TD, norm_D, gate_up_FD)
        if gate_up_FD.shape[0] % 2:
            raise ValueError(f"swiglu: the rows of {tuple(gate_up_FD.shape)} must hold gate and up")
        if fp8_of(gate_up_FD) is None:
            fused = self.impl.norm_linear_swiglu(x_TD, update_TD, norm_D, eps, gate_up_FD)
            if fused is not None:
                return fused
        normed_TD, total_TD = self.norm_of_sum(x_TD, update_TD, norm_D, eps)
        return self.linear_swiglu(normed_TD, gate_up_FD), total_TD

    def linear_swiglu(self, x_TD: Tensor, gate_up_FD: Tensor) -> Tensor:
        """Return swiglu(linear(x)), in one kernel where that is faster; the weight holds gate's rows, then up's."""
        fused = self.impl.linear_swiglu(x_TD, gate_up_FD) if fp8_of(gate_up_FD) is None else None
        return self.swiglu(self.linear(x_TD, gate_up_FD)) if fused is None else fused

    def prepare_blocks(self, weights: Sequence[BlockWeights]) -> PreparedBlocks | None:
        """Return a decoder's blocks as one call for passes of decodes; None: the caller computes block by block.

        The result is that of the single operations. The weights must not be replaced afterwards.
        """
        return self.impl.prepare_blocks(weights)

    def rotate(self, q_TNH: Tensor, k_TKH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Normalise q and k per head where the rotation has norms, then rotate them."""
        check_rotate(q_TNH, k_TKH, rotation)
        return self.impl.rotate(q_TNH, k_TKH, rotation)

    def rotate_and_write(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, into: CacheLayer
    ) -> Tensor:
        """`rotate`, write k and v to the sequences' slots of the cache, and return the rotated q_TNH. No gradient.

        A token whose slot is -1 is padding: nothing of it is written.
        """
        check_cache_write(q_TNH, k_TKH, v_TKH, rotation, into)
        return self.impl.rotate_and_write(q_TNH, k_TKH, v_TKH, rotation, into)

    def packed_attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        sequences: PackedSequences,
        scale: float,
        window: int | None = None,
        attention: AttentionName | None = None,
    ) -> Tensor:
        """Attend causally within each packed sequence, out_TNH; differentiable.

        `attention`: what `Ops.attention` gave.
        """
        check_attention(q_TNH, k_TKH, v_TKH)
        if sequences.bounds[-1] != q_TNH.shape[0]:
            raise ValueError(
                f"packed_attention: cu_seqlens ends at {sequences.bounds[-1]}, but there are {q_TNH.shape[0]} tokens"
            )
        attention = attention or self.attention("auto", q_TNH.dtype)
        return self.impl.packed_attention(q_TNH, k_TKH, v_TKH, sequences, scale, window, attention)

    def attend_runs(
        self,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        runs: AttentionRuns,
        scale: float,
        window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from each run of queries to its run of keys. Autograd does not see it; see `attend_runs_backward`.

        Return out_TNH in `dtype` (q's) and the logarithm of each softmax's sum, lse_TN in float32. A query that sees no
        key has zeros, and a number below every other.
        """
        check_runs(q_TNH, k_LKH, v_LKH, runs)
        return self.impl.attend_runs(q_TNH, k_LKH, v_LKH, runs, scale, window, dtype or q_TNH.dtype)

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
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of `attend_runs`, in float32.

        `out_TNH` and `lse_TN` may be those over more keys than these: the result is then these keys' part.
        """
        check_runs(q_TNH, k_LKH, v_LKH, runs)
        return self.impl.attend_runs_backward(grad_TNH, q_TNH, k_LKH, v_LKH, out_TNH, lse_TN, runs, scale, window)

    def paged_attention(
        self,
        q_TNH: Tensor,
        cache: Tensor,
        layer: int,
        sequences: PagedSequences | DeviceSequences,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend through the block tables over the cache, the pass's own keys included: out_TNH. No gradient.

        `cache`: [blocks, layers, 2, block_size, K, H].
        """
        if cache.shape[-1] != q_TNH.shape[-1] or q_TNH.shape[1] % cache.shape[-2]:
            raise ValueError(f"paged_attention: q {tuple(q_TNH.shape)} does not fit cache {tuple(cache.shape)}")
        if not sequences.fit(q_TNH.shape[0]):
            raise ValueError(
                f"paged_attention: {sequences.num_tokens} tokens were prepared, q has {tuple(q_TNH.shape)}"
            )
        return self.impl.paged_attention(q_TNH, cache, layer, sequences, scale, window)

    def log_softmax(self, logits_TV: Tensor) -> Tensor:
        """Return log-probabilities in float32."""
        return self.impl.log_softmax(logits_TV)

    def cross_entropy(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        *,
        first_token: int = 0,
        group: ProcessGroup | None = None,
        most_rows: int | None = None,
    ) -> CrossEntropy:
        """Compute output layer and loss in chunks of tokens, so that the logits never exist as a whole.

        Tokens of weight 0 cost nothing; their target may be any number. A token with a weight whose target is not in
        the whole table makes the loss NaN.

        With a group, `weight_VD` is this rank's rows of the table, from `first_token` on. `most_rows`: of the ranks'
        parts, where they differ; all ranks cut their chunks by it.
        """
        check_cross_entropy(hidden_TD, weight_VD, targets_T, weights_T)
        found = self.impl.cross_entropy(hidden_TD, weight_VD, targets_T, weights_T, first_token, group, most_rows)
        return CrossEntropy(*found)

    def sample(
        self,
        logits_BV: Tensor,
        rows: SampleRows,
        table: SamplingTable,
        adjustments: Adjustments | None = None,
        into_SL: Tensor | None = None,
    ) -> SampledTokens:
        """Choose one token per row. Nothing waits for the device.

        Adjustments, temperature, min-p, top-k, top-p, then one draw keyed by (seed, choice, position).

        With `into_SL` (int [S, L]) the token is also written to its seat's row at its position.
        """
        check_sample(logits_BV, rows)
        return self.impl.sample(logits_BV, rows, table, adjustments, into_SL)

    def line_squares(self, flat: Tensor, line: int) -> Tensor:
        """Return the sum of squares of each run of `line` elements, float32, in an order set by `line` alone."""
        if flat.dim() != 1 or flat.numel() % line:
            raise ValueError(f"line_squares: {tuple(flat.shape)} is not a flat buffer of whole lines of {line}")
        return self.impl.line_squares(flat, line)

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Return a float64 scalar on the buffer's device, added in an order set by the buffer's length alone."""
        if flat.dim() != 1:
            raise ValueError(f"sum_of_squares: {tuple(flat.shape)} is not a flat buffer")
        return self.impl.sum_of_squares(flat)

    @torch.no_grad()
    def adam_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        parameters: Tensor | None,
        rule: AdamStep,
        scale: Tensor | None = None,
    ) -> None:
        """Take one Adam step over flat buffers in place.

        The gradient is multiplied by `scale` (float32 scalar on the device); moments and fp32 masters are updated, and
        the masters are cast into `parameters`.

        Where `scale` is not finite nothing is written: the caller may learn of it later, and the weights are still
        those before the step. `grad` is not changed.
        """
        check_adam(master, grad, exp_avg, exp_avg_sq, parameters)
        self.impl.adam_(master, grad, exp_avg, exp_avg_sq, parameters, rule, scale)
