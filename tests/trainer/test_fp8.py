"""Runs in fp8: what is refused, saves that go on bitwise, and the plan's bytes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.model.decoder import Decoder
from stoker.model.kernels.fp8 import fp8_of
from stoker.model.kernels.ops import Ops
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.messages import StepEvent
from stoker.trainer.rank.build import make_passes
from stoker.trainer.rank.fp8_weights import check_fp8, use_fp8
from stoker.trainer.rank.train_step import ForwardPass
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.layouts import MODEL, read_state, relative_difference
from testing.trainer.live_bytes import LiveBytes
from testing.trainer.tiny_run import (
    RecordingChannel,
    SyntheticBatches,
    alone,
    empty_decoder,
    tiny_config,
    train,
)

CPU = torch.device("cpu")
RECIPES = ("Tensorwise", "Rowwise")


def losses(folder: Path, **changes: Any) -> list[float]:
    config = tiny_config(folder, **changes)
    context = alone()
    train(config, context, MODEL, SyntheticBatches(config, MODEL.vocab_size))
    assert isinstance(context.channel, RecordingChannel)
    return [event.loss for event in context.channel.all(StepEvent)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, recipe: str) -> None:
    same: dict[str, Any] = {
        "memory__precision": "fp8",
        "memory__fp8_recipe": recipe,
        "training__deterministic": "SameLayout",
    }
    whole = losses(tmp_path / "whole", **same, training__total_steps=4)
    parts = losses(tmp_path / "parts", **same, training__total_steps=2)
    parts += losses(tmp_path / "parts", **same, training__total_steps=4)
    assert parts == whole
    state = read_state(tmp_path / "whole")
    assert relative_difference(read_state(tmp_path / "parts"), state) == dict.fromkeys(state, 0.0)


def test_embedding_head_and_norms_stay_in_the_wide_type() -> None:
    decoder, zero, _ = built("none")
    narrow = {name for name, parameter in decoder.named_parameters() if fp8_of(parameter) is not None}
    kinds = ("qkv_proj", "o_proj", "feed_forward.gate_up_proj", "feed_forward.down_proj")
    assert narrow == {f"blocks.{layer}.{kind}.weight" for layer in range(MODEL.num_layers) for kind in kinds}
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    assert {state.master.dtype for state in zero.states} == {torch.float32}
    zero.close()


def test_a_weight_is_cast_anew_after_each_update_and_not_between() -> None:
    decoder, zero, forward = built("none")
    batches = SyntheticBatches(tiny_config(), MODEL.vocab_size)
    fp8 = fp8_of(decoder.blocks[0].o_proj.weight)
    assert fp8 is not None
    zero.begin_step(2)
    made = []
    for index in range(2):
        forward.loss_sum(batches.micro_batch(index)).backward()
        zero.end_micro_batch()
        made.append(fp8.copies)
    assert made[0] is made[1]
    zero.finish_reduce()
    zero.update(1, 1e-3, torch.ones(()))
    assert fp8.copies is None
    zero.close()


def built(mode: str, **changes: Any) -> Any:
    config = tiny_config(memory__precision="fp8", memory__activation_checkpointing=mode, **changes)
    context = alone()
    decoder, start = empty_decoder(config, context.device, MODEL)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, decoder, zero)
    assert isinstance(forward, ForwardPass)
    return decoder, zero, forward


def test_activations_and_copies_shrink_and_grow_as_the_plan_says() -> None:
    """From bf16 to fp8: inputs of products in half the bytes, two more bytes for each weight."""
    wide = replace(MODEL, hidden_size=64, intermediate_size=256, num_layers=4, max_position_embeddings=512)
    found, planned = {}, {}
    for precision in ("bf16", "fp8"):
        config = tiny_config(
            memory__precision=precision,
            training__sequence_length=512,
            training__global_batch_size=1,
            training__deterministic="SameLayout",
        )
        context = alone()
        decoder, start = empty_decoder(config, context.device, wide)
        zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
        forward = make_passes(config, context, decoder, zero)
        assert isinstance(forward, ForwardPass)
        zero.begin_step(1)
        with LiveBytes() as live:
            before = live.now
            loss_sum = forward.loss_sum(SyntheticBatches(config, wide.vocab_size).micro_batch(0))
            found[precision] = live.now - before
        del loss_sum
        zero.close()
        memory = fullest(Job.from_config(config.model_dump(), ModelSize.from_fields(asdict(wide))))
        planned[precision] = memory.activations + memory.buffers
    elements = sum(parameter.numel() for parameter in decoder.blocks.parameters())
    tokens, heads, backward = 512, 64, 2 * 2 * 512 * wide.intermediate_size

    def change(attended: int) -> int:
        return 2 * elements - tokens * wide.num_layers * (2 * wide.hidden_size + wide.intermediate_size - attended)

    # Attention keeps its result: a cast of it is new with fused kernels, and in place of a copy with the reference's.
    assert found["fp8"] - found["bf16"] == pytest.approx(change(-heads), abs=20_000)
    assert planned["fp8"] - planned["bf16"] == pytest.approx(change(heads) + backward, rel=0.05)


def test_sizes_that_tensor_cores_do_not_take_are_refused_with_the_arithmetic() -> None:
    odd = replace(MODEL, intermediate_size=72)
    config = tiny_config(memory__precision="fp8")
    with pytest.raises(ConfigError, match=r"precision fp8 needs intermediateSize 72 to be a multiple of 16"):
        check_fp8(config, odd, CPU)
    cut = tiny_config(memory__precision="fp8", parallelism__tensor=4)
    with pytest.raises(ConfigError, match=r"numKvHeads x headDim 32 / tensor 4 to be a multiple of 16"):
        check_fp8(cut, MODEL, CPU)
    check_fp8(config, MODEL, CPU)
    check_fp8(tiny_config(memory__precision="bf16"), odd, CPU)


def test_experts_stay_in_the_wide_type() -> None:
    sparse = replace(MODEL, architecture="qwen3-moe", num_experts=4, num_experts_per_token=2, moe_intermediate_size=32)
    check_fp8(tiny_config(memory__precision="fp8"), replace(sparse, intermediate_size=72), CPU)
    decoder = Decoder(replace(sparse, mlp_only_layers=(0,)), Ops(), device="meta")
    use_fp8(tiny_config(memory__precision="fp8"), decoder)
    narrow = {name for name, parameter in decoder.named_parameters() if fp8_of(parameter) is not None}
    attention = {f"blocks.{layer}.{kind}.weight" for layer in range(2) for kind in ("qkv_proj", "o_proj")}
    assert narrow == attention | {f"blocks.0.feed_forward.{kind}.weight" for kind in ("gate_up_proj", "down_proj")}
