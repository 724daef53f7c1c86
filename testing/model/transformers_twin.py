"""The same weights in transformers, which fuses experts in memory and has other names for mixtral's there."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.model.decoder import Decoder

EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def twin(decoder: Decoder) -> torch.nn.Module:
    """Return transformers' model with the decoder's weights."""
    config = AutoConfig.for_model(**decoder.config.to_hugging_face())
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    filled = set()
    for part in decoder.named_parts():
        name, tensor = find(model, part.hf_name, grad=False)
        tensor.copy_(part.local())
        filled.add(name)
    assert {name for name, _ in model.named_parameters()} - filled <= {"lm_head.weight"}
    return model


@torch.no_grad()
def find(model: torch.nn.Module, hf_name: str, *, grad: bool) -> tuple[str, Tensor]:
    """Return the name of their parameter, and a view of the part of it (or of its gradient) with our name."""
    name, expert, half = fused_name(hf_name)
    parameter = dict(model.named_parameters())[name]
    tensor = parameter.grad if grad else parameter.data
    assert tensor is not None
    if expert is not None:
        tensor = tensor[expert]
    if half is not None:
        tensor = tensor.chunk(2)[half]
    return name, tensor


def fused_name(hf_name: str) -> tuple[str, int | None, int | None]:
    """Return their name in memory, and the expert and half of it that our name means."""
    if (found := EXPERT.fullmatch(hf_name)) is None:
        return hf_name.replace(".block_sparse_moe.", ".mlp."), None, None
    layer, expert, name = found.groups()
    fused = "gate_up_proj" if name in HALVES else "down_proj"
    return f"{layer}.mlp.experts.{fused}", int(expert), HALVES.get(name)
