"""One decoder block: attention and the feed-forward part around a residual stream.

T tokens, t tokens of this rank (sequence parallel), D hidden, N heads, K kv heads, H head_dim.

Owns the parameters of its layer; made by `decoder`. Independent of caches and of the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.attend import Attend, LayerAttention
from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.expert_peers import ExpertCut
from stoker.model.experts import Experts
from stoker.model.feed_forward import DenseFeedForward
from stoker.model.kernels.block_weights import BlockWeights
from stoker.model.kernels.ops import Ops
from stoker.model.lora import LoraAdapter
from stoker.model.parallel import ColumnParallelLinear, Norm, RowParallelLinear
from stoker.model.parameter import Part, Section
from stoker.model.rotary import RotaryTable
from stoker.model.tensor_group import group_size, kv_head_shard, shard_size


class Block(nn.Module):
    """`layer` is the index in the whole model. `copies_kv_heads`: a group larger than the number of heads of keys and
    values may have copies of them, for serving."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: Ops,
        rope: RotaryTable,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        expert_group: ProcessGroup | None = None,
        expert_runs: int = 1,
        expert_cut: ExpertCut | None = None,
        experts_on_device: int | None = None,
        copies_kv_heads: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.layer, self.rope = ops, layer, rope
        self.head_dim, self.norm_eps, self.window = config.head_dim, config.norm_eps, config.window(layer)
        self.num_heads = shard_size(config.num_heads, group, "num_heads")
        shard = kv_head_shard(config.num_kv_heads, group_size(group)) if copies_kv_heads else None
        self.num_kv_heads = shard.heads if shard is not None else shard_size(config.num_kv_heads, group, "num_kv_heads")
        copies = shard.copies if shard is not None else 1
        name, heads, kv_heads = (
            f"model.layers.{layer}",
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        hidden = config.hidden_size

        cut: Any = {"group": group, "sequence_parallel": sequence_parallel}

        def norm(suffix: str, size: int) -> Norm:
            return Norm(f"{name}.{suffix}", size, config.norm_eps, ops, dtype=dtype, device=device, **cut)

        def column(sections: list[Section], has_bias: bool) -> ColumnParallelLinear:
            return ColumnParallelLinear(sections, hidden, ops, bias=has_bias, dtype=dtype, device=device, **cut)

        def row(suffix: str, in_features: int, has_bias: bool) -> RowParallelLinear:
            return RowParallelLinear(
                Section(f"{name}.{suffix}", hidden),
                in_features,
                ops,
                bias=has_bias,
                dtype=dtype,
                device=device,
                **cut,
            )

        self.attention_norm = norm("input_layernorm", hidden)
        self.qkv_proj = column(
            [
                Section(f"{name}.self_attn.q_proj", heads),
                Section(f"{name}.self_attn.k_proj", kv_heads, copies),
                Section(f"{name}.self_attn.v_proj", kv_heads, copies),
            ],
            config.qkv_bias,
        )
        self.q_norm = norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None
        self.o_proj = row("self_attn.o_proj", heads, config.attention_bias)
        self.mlp_norm = norm("post_attention_layernorm", hidden)
        feed_forward = Experts if config.has_experts(layer) else DenseFeedForward
        self.feed_forward = feed_forward(
            config,
            layer,
            ops,
            dtype=dtype,
            device=device,
            expert_group=expert_group,
            expert_runs=expert_runs,
            expert_cut=expert_cut,
            experts_on_device=experts_on_device,
            **cut,
        )

    @property
    def kind(self) -> tuple[int | None, type[nn.Module]]:
        """What blocks of one model differ in besides their numbers: window and feed-forward part."""
        return self.window, type(self.feed_forward)

    @property
    def attention(self) -> LayerAttention:
        """Return this layer's attention, built anew because parameters may have been replaced or gathered."""
        # Each rank norms its own heads with the same weight: its gradient is a part, as that of any replicated weight.
        return LayerAttention(
            self.layer,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.norm_eps,
            self.rope,
            self.window,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
        )

    def forward(
        self,
        x_tD: Tensor,
        update_tD: Tensor | None,
        positions_T: Tensor,
        attend: Attend,
        aux: Aux | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream comes and goes as two parts whose sum it is, so that the kernel of the next norm adds
        them; the first block has no update. With sequence parallelism it holds this rank's tokens.

        Losses of a router leave through `aux`.
        """
        x_tD, attended_tD = self.attended(x_tD, update_tD, positions_T, attend)
        return self.fed(x_tD, attended_tD, aux, attend.slots)

    def attended(
        self, x_tD: Tensor, update_tD: Tensor | None, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The first half of `forward`."""
        qkv_TE, x_tD = self.qkv_proj.of_norm(self.attention_norm, x_tD, update_tD)
        q_TNH, k_TKH, v_TKH = self.split_heads(qkv_TE)
        return x_tD, self.o_proj(attend(self.attention, q_TNH, k_TKH, v_TKH, positions_T).flatten(1))

    def fed(
        self, x_tD: Tensor, attended_tD: Tensor, aux: Aux | None = None, slots_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The second half of `forward`. `slots_T`: `Attend.slots`."""
        update_tD, x_tD = self.feed_forward(self.mlp_norm, x_tD, attended_tD, aux, slots_T)
        return x_tD, update_tD

    def split_heads(self, qkv_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one product: q_TNH, k_TKH, v_TKH."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        qkv = qkv_TE.view(qkv_TE.shape[0], num_heads + 2 * num_kv_heads, self.head_dim)
        q_TNH, k_TKH, v_TKH = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)
        return q_TNH, k_TKH, v_TKH

    def weights(self) -> BlockWeights | None:
        """Return the weights for kernels that compute whole blocks; None where the block is more than they know."""
        feed_forward = self.feed_forward
        if self.qkv_proj.group is not None or not isinstance(feed_forward, DenseFeedForward) or self.has_adapters():
            return None
        spec = self.attention
        return BlockWeights(
            attention_norm=self.attention_norm.weight,
            qkv=self.qkv_proj.weight,
            qkv_bias=self.qkv_proj.bias,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm,
            output=self.o_proj.weight,
            output_bias=self.o_proj.bias,
            mlp_norm=self.mlp_norm.weight,
            gate_up=feed_forward.gate_up_proj.weight,
            down=feed_forward.down_proj.weight,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.norm_eps,
            scale=spec.scale,
            window=self.window,
        )

    def has_adapters(self) -> bool:
        return any(isinstance(module, LoraAdapter) for module in self.modules())

    def parts(self, prefix: str) -> Iterator[Part]:
        for name, module in self.named_children():
            if isinstance(module, Norm | ColumnParallelLinear | RowParallelLinear | DenseFeedForward | Experts):
                yield from module.parts(f"{prefix}.{name}")
