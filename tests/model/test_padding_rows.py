"""Rows of padding are known where experts are computed: kernels that skip them are of no use if they are not told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.attend import LayerAttention
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.ops import Ops
from stoker.model.paged_attend import KVCache, PagedAttend, PagedSize
from tests.model.conftest import CONFIGS

CONFIG = CONFIGS["qwen3-moe"]
SLOTS = torch.tensor([3, 4, -1, -1], dtype=torch.int32)


class NotingOps(Ops):
    """Notes the slots that layers of experts are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Tensor | None] = []

    def experts(self, x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Tensor | None:
        self.noted.append(slots_T)
        return super().experts(x_TD, weights, slots_T)

    def norm_experts(self, *operands: Any) -> tuple[Tensor, Tensor] | None:
        self.noted.append(operands[-1])
        return super().norm_experts(*operands)


class NoAttend:
    """Attention that adds nothing, of a pass with padding."""

    slots = SLOTS

    def __call__(
        self, spec: LayerAttention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, positions_T: Tensor
    ) -> Tensor:
        return torch.zeros_like(q_TNH)

    def all_blocks(self, *_: Any) -> None:
        return None


def test_each_layer_of_a_pass_is_told_its_padding() -> None:
    ops = NotingOps()
    decoder = Decoder(CONFIG, ops, dtype=torch.float32, device="cpu")
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    with torch.no_grad():
        decoder.stage(PartOfPass(torch.tensor([1, 2, 0, 0]), torch.arange(4), NoAttend()))
    layers = len(CONFIG.expert_layers)
    assert len(ops.noted) == 2 * layers, "with its norm, and where there is no such kernel without"
    assert all(slots is SLOTS for slots in ops.noted)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_padded_pass_has_the_slots_of_its_buffers(taken: int) -> None:
    cache = KVCache(CONFIG, num_blocks=4, block_size=16, dtype=torch.float32)
    attend = PagedAttend(Ops("fused"), "auto", cache, PagedSize(max_tokens=8, max_sequences=8, max_blocks=2))
    assert attend.slots is None
    assert attend.buffers is not None
    attend.buffers.slots[:taken] = torch.arange(taken, dtype=torch.int32)
    attend.adopt(num_tokens=4, num_sequences=4, num_decodes=4)
    assert attend.slots is not None
    assert attend.slots.tolist() == [*range(taken), *[-1] * (4 - taken)]
