"""Weights that are moved side by side keep their numbers, their identity and what they share."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.huge_pages import ALIGNMENT, PAGE, ask_for_large_pages, gather, offsets
from stoker.model.kernels.ops import Ops


def test_tensors_move_into_one_memory_and_keep_their_numbers() -> None:
    moved = [
        nn.Parameter(torch.randn(7, 5), requires_grad=False),
        torch.arange(33).to(torch.bfloat16),
        torch.tensor(4.0),
    ]
    turned, empty = torch.randn(3, 4).t(), torch.empty(0)
    before, places = [tensor.clone() for tensor in moved], (turned.data_ptr(), empty.data_ptr())
    gather([*moved, turned, empty])
    assert all(torch.equal(*pair) for pair in zip(moved, before, strict=True))
    begin = moved[0].data_ptr()
    assert begin % PAGE == 0
    assert [tensor.data_ptr() - begin for tensor in moved] == offsets([tensor.nbytes for tensor in moved])[:-1]
    assert (turned.data_ptr(), empty.data_ptr()) == places
    gather([])


def test_tensors_begin_with_a_line_of_the_cache() -> None:
    assert offsets([1, 64, 65]) == [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT]


def test_a_kernel_without_large_pages_keeps_small_ones(caplog: pytest.LogCaptureFixture) -> None:
    class Pages:
        def madvise(self, advice: int) -> None:
            raise OSError(22, f"advice {advice} is unknown")

    with caplog.at_level(logging.INFO):
        ask_for_large_pages(cast("mmap.mmap", Pages()))
    assert "the weights stay in small pages" in caplog.text


def test_a_packed_decoder_with_c_kernels_has_its_weights_side_by_side(
    llama: ModelConfig, make_decoder: Callable[..., Decoder]
) -> None:
    slow: Any = make_decoder(llama, dtype=torch.bfloat16)
    try:
        decoder: Any = Decoder(llama, Ops("compiled"), dtype=torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    decoder.load_state_dict(slow.state_dict())
    decoder.requires_grad_(False).pack_weights()
    plain = [parameter for parameter in decoder.parameters() if not parameter.is_mkldnn]
    assert len({parameter.untyped_storage().data_ptr() for parameter in plain}) == 1
    assert all(
        torch.equal(parameter, dict(slow.named_parameters())[name])
        for name, parameter in decoder.named_parameters()
        if not parameter.is_mkldnn
    )
