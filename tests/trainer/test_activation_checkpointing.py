"""Activation checkpointing: the same gradients bit for bit, and less memory the more is computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.pod.pipeline.actions import ScheduleName
from stoker.pod.plan.layer_choice import LayerChoice, beside_layers, layer_choices, layer_cost
from stoker.trainer.rank.attend_maker import AttendMaker
from stoker.trainer.rank.build import make_passes
from stoker.trainer.rank.cheap_results import RecomputingOps
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.pipeline.stage import StageInputs
from stoker.trainer.rank.pipeline.stage_maker import make_stage
from stoker.trainer.rank.plan_check import planned_job
from stoker.trainer.rank.train_step import ForwardPass
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.live_bytes import LiveBytes
from testing.trainer.tiny_run import SMALL, TINY, SyntheticBatches, alone, empty_decoder, tiny_config

MODES = ("none", "selective", "full")
WIDE = replace(TINY, hidden_size=64, intermediate_size=160, num_layers=4, head_dim=16, max_position_embeddings=256)


def one_document() -> MicroBatch:
    random = np.random.default_rng(1)
    tokens, weights = random.integers(0, WIDE.vocab_size, 257), np.ones(256, np.float32)
    return MicroBatch(tokens[:-1], np.arange(256), tokens[1:], weights, np.array([0, 256], np.int32), 256)


def gradients(mode: str, batch: MicroBatch | None = None, **changes: Any) -> tuple[float, dict[str, Tensor], int]:
    """Return the loss of one micro-batch, all gradients, and the bytes that forward kept for backward."""
    config = tiny_config(memory__activation_checkpointing=mode, training__sequence_length=256, **changes)
    context = alone()
    decoder, start = empty_decoder(config, context.device, WIDE)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, decoder, zero)
    assert isinstance(forward, ForwardPass)
    found: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        parameter.register_hook(lambda grad, name=name: found.__setitem__(name, grad.clone()))
    zero.begin_step(1)
    loss, kept = backward(forward, batch or SyntheticBatches(config).micro_batch(0))
    zero.close()
    return loss, found, kept


def backward(forward: ForwardPass, batch: MicroBatch) -> tuple[float, int]:
    decoder = forward._decoder
    with LiveBytes() as live:
        decoder.rope.on(torch.device("cpu"))
        for parameter in decoder.parameters():
            parameter.detach()  # so that the weights count before the pass
        before = live.now
        loss_sum = forward.loss_sum(batch)
        kept = live.now - before
    loss_sum.backward()
    forward.end_backward()
    return float(loss_sum.detach()), kept


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="deterministic"),
        pytest.param({"training__deterministic": "Off"}, id="plain"),
        pytest.param({"memory__precision": "bf16"}, id="deterministic, bf16"),
        pytest.param({"training__deterministic": "Off", "memory__precision": "bf16"}, id="plain, bf16"),
        pytest.param({"memory__precision": "fp8"}, id="fp8"),
        pytest.param({"memory__precision": "fp8", "memory__fp8_recipe": "Rowwise"}, id="fp8 by rows"),
    ],
)
def test_gradients_are_the_same_bits_and_memory_falls_with_each_mode(changes: dict[str, Any]) -> None:
    found = {mode: gradients(mode, **changes) for mode in MODES}
    loss, expected, most = found["none"]
    for mode in MODES[1:]:
        assert found[mode][0] == loss
        assert found[mode][1].keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_array_equal(found[mode][1][name].float(), gradient.float(), err_msg=f"{mode} {name}")
    selective, full = found["selective"][2], found["full"][2]
    assert full < selective < most


def test_selective_drops_what_norms_rotations_and_swiglu_make() -> None:
    """Per token and layer: two norms of D, q and k after their rotation, and the F columns of SwiGLU."""
    changes = {"training__deterministic": "Off"}
    kept = {mode: gradients(mode, one_document(), **changes)[2] for mode in MODES}
    heads = (WIDE.num_heads + WIDE.num_kv_heads) * WIDE.head_dim
    dropped = 4 * 256 * WIDE.num_layers * (2 * WIDE.hidden_size + heads + WIDE.intermediate_size)
    assert kept["none"] - kept["selective"] >= 0.9 * dropped


def within_budget(gib: float) -> tuple[tuple[LayerChoice, ...], tuple[float, dict[str, Tensor]], int, float]:
    """Return the choices, loss and gradients, the bytes that forward kept for backward, and what the plan says."""
    changes: dict[str, Any] = {"training__deterministic": "Off", "memory__activation_budget_gib": gib}
    config = tiny_config(memory__activation_checkpointing="selective", training__sequence_length=256, **changes)
    planned = planned_job(config, WIDE)
    costs = [layer_cost(planned, choice) for choice in layer_choices(planned)]
    kept = 256 * (sum(cost.kept for cost in costs) + beside_layers(planned))
    loss, found, measured = gradients("selective", one_document(), **changes)
    return layer_choices(planned), (loss, found), measured, kept


LOSS_BYTES = 4 * WIDE.vocab_size * WIDE.hidden_size + 16 * 256
"""What the loss keeps beside a token's gradient: the gradient of the output layer, which the plan counts as a buffer,
and four numbers of a token.
"""
BUDGETS = [
    (4.4, {()}),
    (4.0, {(), ("feed-forward norm",)}),
    (3.0, {(), ("all of feed-forward",), ("attention norm", "feed-forward norm")}),
    (2.4, {(), ("all of feed-forward", "rotated q and k"), ("all of feed-forward", "attention norm")}),
    (1.6, {(), ("the whole layer",)}),
]
"""MiB, from all that is kept to the least that works, and the choices of the layers."""


def test_a_budget_is_kept_with_the_bits_of_a_run_without_one() -> None:
    """What forward keeps is what the plan says, and within the budget."""
    loss, expected, _ = gradients("none", one_document(), training__deterministic="Off")
    for mib, names in BUDGETS:
        choices, found, kept, planned = within_budget(mib / 1024)
        assert {tuple(choice.names()) for choice in choices} == names
        assert kept - LOSS_BYTES <= mib * 2**20
        assert kept - LOSS_BYTES == pytest.approx(planned, rel=0.1)
        assert found[0] == loss
        for name, gradient in expected.items():
            np.testing.assert_array_equal(found[1][name], gradient, err_msg=f"{mib} MiB {name}")


FUSED: dict[str, Any] = {
    "kernels": "fused",
    "attention": "stoker",
    "memory__precision": "bf16",
    "training__deterministic": "Off",
    "training__sequence_length": 2048,
}
ON_A_GPU = replace(SMALL, hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=8, num_kv_heads=4)


def kept_on_a_gpu(mode: str, **changes: Any) -> tuple[float, int]:
    """Return the loss of a second micro-batch, and the bytes that its forward pass kept in the GPU's memory."""
    model = replace(ON_A_GPU, max_position_embeddings=2048)
    config = tiny_config(memory__activation_checkpointing=mode, **FUSED, **changes)
    context = alone("cuda")
    decoder, start = empty_decoder(config, context.device, model)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, decoder, zero)
    assert isinstance(forward, ForwardPass)
    kept, loss = 0, 0.0
    for index in range(2):  # the first one compiles kernels and makes what is kept
        batch = SyntheticBatches(config).micro_batch(index)
        zero.begin_step(1)
        before = torch.cuda.memory_allocated()
        loss_sum = forward.loss_sum(batch)
        kept, loss = torch.cuda.memory_allocated() - before, float(loss_sum.detach())
        loss_sum.backward()
        del loss_sum
        forward.end_backward()
        zero.end_micro_batch()
    zero.close()
    return loss, kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_budget_is_kept_on_a_gpu() -> None:
    loss, most = kept_on_a_gpu("none")
    config = tiny_config(memory__activation_checkpointing="selective", **FUSED)
    model = replace(ON_A_GPU, max_position_embeddings=2048)
    table = 2 * model.vocab_size * model.hidden_size  # its gradient, which the plan counts as a buffer
    for part in (0.9, 0.65, 0.5):
        gib = part * most / 2**30
        limited: dict[str, Any] = {"memory__activation_budget_gib": gib}
        planned = planned_job(tiny_config(memory__activation_checkpointing="selective", **FUSED, **limited), model)
        costs = [layer_cost(planned, choice) for choice in layer_choices(planned)]
        expected = config.training.sequence_length * (sum(cost.kept for cost in costs) + beside_layers(planned))
        found, kept = kept_on_a_gpu("selective", **limited)
        assert found == loss
        assert kept - table == pytest.approx(expected, rel=0.1)
        assert kept - table <= 1.01 * part * most


def stage_gradients(mode: str, schedule: ScheduleName) -> tuple[list[Tensor], int]:
    """Return the gradient of three micro-batches in flight in one stage of a pipeline, and the bytes they kept."""
    config = tiny_config(memory__activation_checkpointing=mode, training__sequence_length=256)
    context = alone()
    decoder, start = empty_decoder(config, context.device, replace(WIDE, tie_embeddings=False))
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    for state in zero.states:
        state.bucket.is_late = schedule == "ZeroBubble" and state.bucket.unit != "head"
    stage = make_stage(0, decoder, zero, schedule, recompute=mode == "full")
    attend = AttendMaker(decoder.ops, "stoker", context.device)
    batches = [SyntheticBatches(config).micro_batch(index) for index in range(3)]
    zero.begin_step(len(batches))
    with LiveBytes() as live:
        before = live.now
        for index, batch in enumerate(batches):
            stage.forward(index, stage_inputs(batch, attend), None)
        kept = live.now - before
    for index in range(len(batches)):
        if schedule == "ZeroBubble":
            stage.backward_input(index, None)
        else:
            stage.backward(index, None)
    for index in range(len(batches) if schedule == "ZeroBubble" else 0):
        stage.backward_weight(index)
    zero.check_complete(0)
    zero.finish_reduce()
    zero.close()
    return [state.gradient.clone() for state in zero.states], kept


def stage_inputs(batch: MicroBatch, attend: AttendMaker) -> StageInputs:
    return StageInputs(
        tokens_T=torch.from_numpy(batch.tokens_T),
        positions_T=torch.from_numpy(batch.positions_T),
        targets_T=torch.from_numpy(batch.targets_T),
        weights_T=torch.from_numpy(batch.weights_T),
        attend=attend.of(batch),
        rows=len(batch.tokens_T),
    )


@pytest.mark.parametrize("schedule", ["OneFOneB", "ZeroBubble"])
def test_micro_batches_in_flight_have_the_same_bits_and_less_memory_in_a_stage(schedule: ScheduleName) -> None:
    found = {mode: stage_gradients(mode, schedule) for mode in MODES}
    expected, most = found["none"]
    for mode in MODES[1:]:
        for left, right in zip(found[mode][0], expected, strict=True):
            np.testing.assert_array_equal(left, right, err_msg=mode)
    assert any(gradient.any() for gradient in expected)
    assert found["full"][1] < found["selective"][1] < 0.85 * most


def test_nothing_of_the_last_backward_is_held() -> None:
    config = tiny_config(memory__activation_checkpointing="selective")
    context = alone()
    decoder, start = empty_decoder(config, context.device, TINY)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, decoder, zero)
    assert isinstance(forward, ForwardPass)
    batches = SyntheticBatches(config)
    with LiveBytes() as live:
        left = []
        for index in range(3):
            zero.begin_step(1)
            loss_sum = forward.loss_sum(batches.micro_batch(index))
            loss_sum.backward()
            forward.end_backward()
            zero.end_micro_batch()
            del loss_sum
            left.append(live.now)
    assert left[1] == left[2]
    assert isinstance(decoder.ops, RecomputingOps)
    assert not decoder.ops.cheap._noted
    zero.close()


def test_evaluation_keeps_nothing() -> None:
    config = tiny_config(memory__activation_checkpointing="selective")
    context = alone()
    decoder, start = empty_decoder(config, context.device, TINY)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    forward = make_passes(config, context, decoder, zero)
    assert isinstance(forward, ForwardPass)
    with torch.no_grad():
        loss = forward.loss_sum(SyntheticBatches(config).micro_batch(0))
    assert loss.isfinite()
    assert isinstance(decoder.ops, RecomputingOps)
    assert not decoder.ops.cheap._noted
    zero.close()
