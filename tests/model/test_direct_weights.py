"""Weights read by threads, run by run, equal those read tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.weights import direct
from stoker.model.weights.hugging_face import HuggingFaceWeights, save_hugging_face
from stoker.model.weights.loading import WeightsError

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def decoder_of(dtype: torch.dtype, device: str = "cpu") -> Decoder:
    return Decoder(CONFIG, Ops(), dtype=dtype, device=device)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    written = decoder_of(request.param)
    written.init_weights(3)
    save_hugging_face(tmp_path / "model", written, shard_bytes=9000)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run_bytes", [7, 1000, direct.RUN_BYTES])
def test_every_tensor_is_the_same(folder: Path, dtype: torch.dtype, run_bytes: int) -> None:
    source = HuggingFaceWeights(folder)
    one, other = decoder_of(dtype), decoder_of(dtype)
    source.load_into(one)
    heard: list[tuple[int, int]] = []
    source.load_direct(other, lambda done, total: heard.append((done, total)), run_bytes=run_bytes)
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    if dtype is source.dtype:
        assert heard[-1][0] == heard[-1][1] == sum(p.numel() * p.element_size() for p in other.parameters())


def test_a_file_that_was_cut_short_is_named(folder: Path) -> None:
    source = HuggingFaceWeights(folder)
    file = source.store.files[-1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=f"{file.name} ends at byte"):
        source.load_direct(decoder_of(source.dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same(folder: Path) -> None:
    source = HuggingFaceWeights(folder)
    one, other = decoder_of(source.dtype), decoder_of(source.dtype, "cuda")
    source.load_into(one)
    source.load_into(other)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_come_after_what_the_device_still_has_to_do(folder: Path) -> None:
    """Streams of their own copy the runs; earlier work on the parameters' memory must be over before."""
    source = HuggingFaceWeights(folder)
    one, other = decoder_of(source.dtype), decoder_of(source.dtype, "cuda")
    source.load_into(one)
    big = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        big = big @ big.clamp(-1e-3, 1e-3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    source.load_into(other)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu())
