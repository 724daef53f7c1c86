"""The model's operations: one method per op, shapes checked here, computed by the implementation chosen at construction.

`Ops` is built once and given to the model and to `attend`. A kernel that this build lacks is an error, never a silent fallback.
T tokens, D input size, E output size, N heads, K kv heads, H head_dim, F ffn, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, NamedTuple, Protocol, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from stoker.model.kernels import deterministic, reference
from stoker.model.kernels.sequences import PackedSequences, PagedSequences

KernelsName = Literal["reference", "fused"]
AttentionName = Literal["stoker", "sdpa", "flash", "cudnn"]


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
    """What an implementation provides; the methods of `Ops` say what each does."""

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor: ...
    def pack(self, weight_ED: Tensor) -> Tensor: ...
    def embedding(self, tokens_T: Tensor, weight_VD: Tensor) -> Tensor: ...
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def swiglu(self, gate_up_TF: Tensor) -> Tensor: ...
    def rotate(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        cos_T1H: Tensor,
        sin_T1H: Tensor,
        q_norm_H: Tensor | None,
        k_norm_H: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]: ...
    def packed_attention(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: PackedSequences, scale: float, window: int | None
    ) -> Tensor: ...
    def paged_attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cache: Tensor,
        layer: int,
        sequences: PagedSequences,
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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Ops:
    """The operations with one set of kernels."""

    kernels: KernelsName = "reference"
    deterministic: bool = False
    """A row's result does not depend on its batch, chunk or place: bitwise parity of trainer and engine on the CPU, with one intra-op thread."""
    impl: Kernels = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "impl", cast("Kernels", choose_kernels(self.kernels, self.deterministic)))

    def attention(self, name: str) -> AttentionName:
        """Check the choice of attention; `auto` is `stoker` in deterministic mode, else `sdpa`."""
        if name == "auto":
            return "stoker" if self.deterministic else "sdpa"
        if name not in ("stoker", "sdpa"):
            raise MissingKernel(f"attention: not supported yet: {name!r}; allowed: auto, sdpa, stoker")
        if (name == "stoker") != self.deterministic:
            raise MissingKernel(
                f"attention: {name!r} is not built for kernels {self.kernels!r} with deterministic = {self.deterministic}; allowed: auto, {self.attention('auto')}"
            )
        return cast("AttentionName", name)

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """y_TE = x_TD @ weight_ED^T (+ bias): every matrix product of the model's weights."""
        if x_TD.shape[-1] != weight_ED.shape[-1]:
            raise ValueError(f"linear: weight {tuple(weight_ED.shape)} does not fit x {tuple(x_TD.shape)}")
        return self.impl.linear(x_TD, weight_ED, bias_E)

    def pack(self, weight_ED: Tensor) -> Tensor:
        """A copy of the weight in the order that `linear` reads fastest, which only `linear` without gradient can use; the weight itself where there is no such order."""
        return self.impl.pack(weight_ED)

    def embedding(self, tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of the table, x_TD."""
        if tokens_T.dim() != 1:
            raise ValueError(f"embedding: tokens must be packed in one dim, not {tuple(tokens_T.shape)}")
        return self.impl.embedding(tokens_T, weight_VD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise the last dim; statistics in float32, result in x's dtype."""
        if x_TD.shape[-1:] != weight_D.shape:
            raise ValueError(f"rms_norm: weight {tuple(weight_D.shape)} does not fit x {tuple(x_TD.shape)}")
        return self.impl.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        if x_TD.shape != residual_TD.shape or x_TD.shape[-1:] != weight_D.shape:
            raise ValueError(
                f"add_rms_norm: x {tuple(x_TD.shape)}, residual {tuple(residual_TD.shape)} and weight {tuple(weight_D.shape)} do not fit"
            )
        return self.impl.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def swiglu(self, gate_up_TF: Tensor) -> Tensor:
        """silu(gate) * up, where gate is the first half of the last dim and up the second."""
        if gate_up_TF.shape[-1] % 2:
            raise ValueError(f"swiglu: the last dim of {tuple(gate_up_TF.shape)} must hold gate and up")
        return self.impl.swiglu(gate_up_TF)

    def rotate(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        cos_T1H: Tensor,
        sin_T1H: Tensor,
        q_norm_H: Tensor | None = None,
        k_norm_H: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Normalise q and k per head where weights are given, then rotate them by their positions' rows of the RotaryTable."""
        if cos_T1H.shape != (q_TNH.shape[0], 1, q_TNH.shape[2]) or q_TNH.shape[::2] != k_TKH.shape[::2]:
            raise ValueError(
                f"rotate: q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)} and cos {tuple(cos_T1H.shape)} do not fit"
            )
        return self.impl.rotate(q_TNH, k_TKH, cos_T1H, sin_T1H, q_norm_H, k_norm_H, eps)

    def packed_attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        sequences: PackedSequences,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention within each packed sequence, out_TNH; differentiable."""
        check_attention(q_TNH, k_TKH, v_TKH)
        if sequences.bounds[-1] != q_TNH.shape[0]:
            raise ValueError(
                f"packed_attention: cu_seqlens ends at {sequences.bounds[-1]}, but there are {q_TNH.shape[0]} tokens"
            )
        return self.impl.packed_attention(q_TNH, k_TKH, v_TKH, sequences, scale, window)

    def paged_attention(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cache: Tensor,
        layer: int,
        sequences: PagedSequences,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Write k and v to their slots of the cache [blocks, layers, 2, block_size, K, H], then attend through the block tables: out_TNH. No gradient."""
        check_attention(q_TNH, k_TKH, v_TKH)
        if cache.shape[-2:] != k_TKH.shape[1:] or sequences.num_tokens != q_TNH.shape[0]:
            raise ValueError(
                f"paged_attention: k {tuple(k_TKH.shape)} does not fit cache {tuple(cache.shape)}, or {sequences.num_tokens} tokens were prepared"
            )
        return self.impl.paged_attention(q_TNH, k_TKH, v_TKH, cache, layer, sequences, scale, window)

    def log_softmax(self, logits_TV: Tensor) -> Tensor:
        """Log-probabilities in float32."""
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
    ) -> CrossEntropy:
        """Output layer and loss in chunks of tokens, so that the logits never exist as a whole. Tokens of weight 0 cost nothing; their target may be any number.

        With a group, `weight_VD` is this rank's rows of the table, from `first_token` on.
        """
        if hidden_TD.shape[-1] != weight_VD.shape[-1] or not hidden_TD.shape[:1] == targets_T.shape == weights_T.shape:
            raise ValueError(
                f"cross_entropy: hidden {tuple(hidden_TD.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_T.shape)} and weights {tuple(weights_T.shape)} do not fit"
            )
        return CrossEntropy(*self.impl.cross_entropy(hidden_TD, weight_VD, targets_T, weights_T, first_token, group))


def choose_kernels(kernels: str, is_deterministic: bool) -> ModuleType:
    """The implementation. Raises MissingKernel where there is none."""
    if kernels == "fused":
        raise MissingKernel("kernels: not supported yet: 'fused' (no fused kernel is built); allowed: reference")
    if kernels != "reference":
        raise MissingKernel(f"kernels: unknown {kernels!r}; allowed: reference")
    return deterministic if is_deterministic else reference


def resolve_kernels(name: str) -> KernelsName:
    """`auto` chooses the fastest built kernels: today the reference on every device."""
    return "reference" if name == "auto" else cast("KernelsName", name)


def check_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    if k_TKH.shape != v_TKH.shape or q_TNH.shape[::2] != k_TKH.shape[::2] or q_TNH.shape[1] % k_TKH.shape[1]:
        raise ValueError(
            f"attention: q {tuple(q_TNH.shape)}, k {tuple(k_TKH.shape)} and v {tuple(v_TKH.shape)} do not fit"
        )
