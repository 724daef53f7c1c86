"""The feed-forward part of a layer with experts: a router chooses a few of them for each token.

All choices of all tokens are computed; no expert has a capacity. T tokens, D hidden, E experts, K experts of a token,
S = T * K rows, F width of an expert.

Made by `block`. Parameters change by the trainer's optimizer and by the loaders of `weights`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.kernels.expert_rows import count_rows, sort_rows
from stoker.model.kernels.ops import Ops
from stoker.model.parallel import Norm
from stoker.model.parameter import Part
from stoker.model.tensor_group import (
    copy_to_group,
    counted_once,
    gather_tokens_of_whole,
    group_rank,
    reduce_from_group,
    scatter_tokens,
    shard_size,
)

BALANCE, Z, TOKENS = "router balance loss", "router z loss", "tokens per expert"
"""Names of what leaves through `aux`: two scalars with gradient, and int64 [E]."""


class Experts(nn.Module):
    """Router and experts of layer `layer`. With a tensor-parallel group every rank holds a slice of every expert."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        names = config.family.experts
        assert names is not None
        assert config.num_experts is not None
        assert config.num_experts_per_token is not None
        self.ops, self.group, self.layer, self.names = ops, group, layer, names
        self.sequence_parallel = sequence_parallel
        self.hf_name = f"model.layers.{layer}.{names.part}"
        self.num_experts, self.num_choices = config.num_experts, config.num_experts_per_token
        self.normalise, self.hidden, self.width = config.norm_topk_prob, config.hidden_size, config.expert_size
        self.local_width = shard_size(self.width, group, f"{self.hf_name}.experts")

        def parameter(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device))

        self.router = parameter(self.num_experts, self.hidden)
        self.gate_up = parameter(self.num_experts * 2 * self.local_width, self.hidden)
        """Rows of gate, then of up, expert by expert."""
        self.down = parameter(self.num_experts * self.hidden, self.local_width)

    def forward(self, norm: Norm, x_TD: Tensor, attended_TD: Tensor, aux: Aux | None = None) -> tuple[Tensor, Tensor]:
        """Return (experts(norm(x + attended)), x + attended)."""
        normed_TD, x_TD = norm.of_sum(x_TD, attended_TD)
        if self.sequence_parallel:
            normed_TD = gather_tokens_of_whole(normed_TD, self.group)
        return self.compute(normed_TD, aux), x_TD

    def compute(self, x_TD: Tensor, aux: Aux | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, y_TD."""
        # Two bytes would make many logits equal: the router's product is in float32 whatever the model's dtype.
        logits_TE = self.ops.linear(x_TD.float(), counted_once(self.router, self.group).float())
        weights_TK, experts_TK = self.ops.route(logits_TE, self.num_choices, self.normalise)
        if aux is not None:
            note_routing(aux, self.layer, logits_TE, experts_TK)
        # Each rank computes a slice of every expert: gradients of tokens and weights are sums over tp.
        x_TD, weights_TK = copy_to_group(x_TD, self.group), copy_to_group(weights_TK, self.group)
        rows = sort_rows(experts_TK, self.num_experts)
        gate_up_SF = self.ops.grouped_linear(self.ops.dispatch(x_TD, rows), self.gate_up, rows.ends)
        y_SD = self.ops.grouped_linear(self.ops.swiglu(gate_up_SF), self.down, rows.ends)
        leave = scatter_tokens if self.sequence_parallel else reduce_from_group
        return leave(self.ops.combine(y_SD, weights_TK, rows), self.group)

    def parts(self, prefix: str) -> Iterator[Part]:
        """Yield the router, then gate, up and down of each expert."""
        shape = (self.num_experts, self.hidden)
        yield Part(f"{self.hf_name}.gate.weight", f"{prefix}.router", self.router, 0, shape[0], shape, (0, 0), None)
        for expert in range(self.num_experts):
            yield from self.gate_up_parts(prefix, expert)
        for expert in range(self.num_experts):
            yield self.down_part(prefix, expert)

    def gate_up_parts(self, prefix: str, expert: int) -> Iterator[Part]:
        begin = self.local_width * group_rank(self.group)
        for number, name in enumerate((self.names.gate, self.names.up)):
            row = (2 * expert + number) * self.local_width
            yield Part(
                f"{self.hf_name}.experts.{expert}.{name}.weight",
                f"{prefix}.gate_up",
                self.gate_up,
                row,
                row + self.local_width,
                (self.width, self.hidden),
                (begin, 0),
                0,
            )

    def down_part(self, prefix: str, expert: int) -> Part:
        return Part(
            f"{self.hf_name}.experts.{expert}.{self.names.down}.weight",
            f"{prefix}.down",
            self.down,
            expert * self.hidden,
            (expert + 1) * self.hidden,
            (self.hidden, self.width),
            (0, self.local_width * group_rank(self.group)),
            1,
        )


def note_routing(aux: Aux, layer: int, logits_TE: Tensor, experts_TK: Tensor) -> None:
    """Put the router's losses and the tokens of each expert into `aux`.

    The balance loss is the one of Switch Transformer (arXiv 2101.03961, equations 4 to 6): E times the sum over experts
    of the share of tokens times the mean probability; K where both are even. The z loss is the one of ST-MoE
    (arXiv 2202.08906, equation 5): the mean square of the logarithm of the softmax's normaliser.
    """
    num_tokens, num_experts = logits_TE.shape
    tokens_E = count_rows(experts_TK.flatten(), num_experts)
    probabilities_E = logits_TE.softmax(-1).mean(0)
    aux.put(layer, TOKENS, tokens_E)
    aux.put(layer, BALANCE, (tokens_E * probabilities_E).sum() * (num_experts / num_tokens))
    aux.put(layer, Z, logits_TE.logsumexp(-1).square().mean())
