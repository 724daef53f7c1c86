"""Experts in host memory: the bits are those of a layer whose experts are all on the device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.experts import Experts
from stoker.model.hosted_experts import Copy, HostCopies, HostedExperts
from stoker.model.kernels.ops import Ops
from stoker.model.lora import LoraSettings
from tests.model.conftest import CONFIGS
from tests.model.test_expert_runs import part_of, whole_layer

SPARSE = CONFIGS["qwen3-moe"]


def hosted(layer: Experts, on_device: int) -> Experts:
    """The same layer with so many experts on the device."""
    found = copy.copy(layer)
    weights = layer.gate_up, layer.down
    found.hosted = HostedExperts(*weights, layer.own, layer.num_experts, on_device, layer.gate_up.device)
    return found


def batches(hidden: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tokens that route widely, narrowly, and none."""
    torch.manual_seed(8)
    one = torch.randn(1, hidden)
    more = (torch.randn(tokens, hidden) for tokens in (2, 0, 7))
    return [batch.to(dtype) for batch in (torch.randn(23, hidden), one, one, *more)]


@pytest.mark.parametrize("on_device", [1, 2, 4, 6])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_those_of_experts_on_the_device(on_device: int, deterministic: bool, dtype: torch.dtype) -> None:
    layer = whole_layer().to(dtype)
    layer.ops = Ops("reference", deterministic)
    ours = hosted(layer, on_device)
    assert ours.hosted is not None
    with torch.inference_mode():
        for x_TD in batches(layer.hidden, dtype):
            assert torch.equal(ours.compute(x_TD), layer.compute(x_TD))
    meter = ours.hosted.meter
    assert meter.loaded_bytes == meter.misses * 3 * layer.width * layer.hidden * dtype.itemsize
    assert meter.misses >= 6
    assert (meter.misses == 6) is (on_device == 6), "with a slot for each nothing is loaded twice"
    assert meter.hits > 0
    assert ours.hosted.copies.waited_s > 0


@pytest.mark.parametrize(("runs", "cuts"), [(2, 1), (3, 2)])
def test_runs_of_experts_are_hosted_too(runs: int, cuts: int) -> None:
    layer = whole_layer()
    with torch.inference_mode():
        for run in range(runs):
            part = part_of(layer, run, runs, 0, cuts)
            ours = hosted(part, 1)
            for x_TD in batches(layer.hidden):
                assert torch.equal(ours.compute(x_TD), part.compute(x_TD))


class Failing(HostCopies):
    """Fails once, in the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def load(self, copies: Sequence[Copy]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("no memory")
        super().load(copies)


def test_slots_are_filled_anew_after_a_copy_that_failed() -> None:
    layer = whole_layer()
    ours = hosted(layer, 2)
    assert ours.hosted is not None
    ours.hosted.copies = Failing()
    x_TD = batches(layer.hidden)[0]
    with torch.inference_mode():
        with pytest.raises(torch.OutOfMemoryError):
            ours.compute(x_TD)
        assert torch.equal(ours.compute(x_TD), layer.compute(x_TD))
        assert torch.equal(ours.compute(x_TD[:1]), layer.compute(x_TD[:1]))


def test_a_model_is_made_and_filled_with_its_experts_in_host_memory() -> None:
    config = CONFIGS["qwen3-moe, a dense layer, tied"]
    whole, ours = Decoder(config, Ops()), Decoder(config, Ops(), experts_on_device=2)
    for decoder in (whole, ours):
        decoder.init_weights(5)
    assert {name: value.shape for name, value in ours.named_parameters()} == {
        name: value.shape for name, value in whole.named_parameters()
    }
    (layer,), (twin,) = ours.experts(), whole.experts()
    with torch.inference_mode():
        x_TD = torch.randn(9, config.hidden_size)
        assert torch.equal(layer.compute(x_TD), twin.compute(x_TD))


def test_adapters_and_too_many_slots_are_refused() -> None:
    made: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "group": None}
    layer = Experts(SPARSE, 0, Ops(), **made, experts_on_device=2)
    with pytest.raises(ValueError, match=r"mlp: adapters of experts in host memory are not supported"):
        layer.add_adapters(LoraSettings(rank=2, alpha=2.0))
    with pytest.raises(ValueError, match="slots must be from 1 to 6"):
        Experts(SPARSE, 0, Ops(), **made, experts_on_device=7)
