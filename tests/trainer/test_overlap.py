"""Communication starts as early as it can, and is waited for as late: the order of events in a step of a real decoder.

What ZeRO stage 3 gathers, and when, is in `test_zero_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.model.decoder import Decoder
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.build import make_passes
from stoker.trainer.rank.communicator import DONE, Pending
from stoker.trainer.rank.mesh import data_parallel_mesh
from stoker.trainer.rank.ordered_sum import sum_in_order
from stoker.trainer.rank.train_step import TrainStep
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.layouts import MODEL
from testing.trainer.tiny_run import SyntheticBatches, alone, empty_decoder, tiny_config

UNITS = ["embedding", "blocks.0", "blocks.1", "head"]


class Recorder:
    """The first of two ranks that run collectives in the background; the other one sends zeros."""

    rank, size, eager, replicas, replica = 0, 2, True, 1, 0

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.units: dict[int, str] = {}
        """Address of the parameters of a bucket -> its unit."""

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(2, -1)[0]

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, total: Any = sum_in_order, add: bool = False, **_: Any
    ) -> Pending:
        self.events.append("reduce")
        total([self.shard(flat), torch.zeros_like(self.shard(flat))], out, add=add)
        return DONE

    def all_gather(self, flat: Tensor) -> Pending:
        unit = self.units.get(flat.data_ptr(), "?")
        self.events.append(f"gather {unit}")
        return Pending(lambda: self.events.append(f"wait {unit}"))

    def exchange(self, numbers: Tensor) -> Tensor:
        return torch.stack([numbers, torch.zeros_like(numbers)])


def run_steps(stage: int, micro_batches: int, steps: int, note: Callable[[Decoder, list[str]], None]) -> list[str]:
    """Return the events of the last step, after the gathers that the one before it has begun."""
    events: list[str] = []
    config = tiny_config(
        memory__zero_stage=stage,
        training__deterministic="SameLayout",
        training__global_batch_size=2 * micro_batches,
    )
    recorder, batches = Recorder(events), SyntheticBatches(config, MODEL.vocab_size)
    context = replace(alone(), mesh=data_parallel_mesh(recorder))
    decoder, start = empty_decoder(config, context.device, MODEL)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    recorder.units = {state.bucket.flat.data_ptr(): state.bucket.unit for state in zero.states}
    step = TrainStep(make_passes(config, context, decoder, zero), zero, 1.0)
    note(decoder, events)
    for number in range(steps):
        events[:] = [event for event in events if event.startswith("gather")]
        own = batches.micro_batches(number, 0, 2)
        step(number + 1, own, micro_batches, batches.target_tokens(number), 1e-3, StepSignals)
    zero.close()
    return events


def note_gradients(decoder: Decoder, events: list[str]) -> None:
    """Note when the first gradient of each unit arrives."""
    units: dict[str, nn.Module | None] = {"embedding": decoder.embedding, "head": decoder.lm_head}
    units |= {f"blocks.{index}": block for index, block in enumerate(decoder.blocks)}
    for unit, module in units.items():
        assert module is not None
        for parameter in module.parameters():
            parameter.register_hook(lambda _gradient, unit=unit: note_first(events, f"gradient {unit}"))


def note_first(events: list[str], event: str) -> None:
    if event not in events:
        events.append(event)


def of_backward(events: list[str]) -> list[str]:
    return [event for event in events if event.startswith(("gradient", "reduce"))]


IN_TURNS = [word for unit in reversed(UNITS) for word in (f"gradient {unit}", "reduce")]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_is_reduced_while_backward_goes_on(stage: int) -> None:
    """Each unit's as soon as it is complete, before the units below it have any."""
    assert of_backward(run_steps(stage, 1, 1, note_gradients)) == IN_TURNS


def test_stage_1_sends_a_sum_of_micro_batches_once_and_stage_2_each_of_them() -> None:
    gradients, reductions = [f"gradient {unit}" for unit in reversed(UNITS)], ["reduce"] * len(UNITS)
    assert of_backward(run_steps(1, 2, 1, note_gradients)) == gradients + reductions
    assert of_backward(run_steps(2, 2, 1, note_gradients)) == IN_TURNS + reductions


def note_passes(decoder: Decoder, events: list[str]) -> None:
    for index, block in enumerate(decoder.blocks):
        block.get_submodule("o_proj").register_forward_hook(partial(note_call, events, f"compute blocks.{index}"))


def note_call(events: list[str], event: str, *_: object) -> None:
    events.append(event)


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_gathered_at_once_and_waited_for_one_by_one_as_forward_needs_them(stage: int) -> None:
    events = run_steps(stage, 1, 2, note_passes)
    begun = [f"gather {unit}" for unit in UNITS]
    assert events[: len(begun)] == begun
    forward = events[len(begun) : events.index("wait head") + 1]
    assert forward == [
        "wait embedding",
        *(f"{word} blocks.{n}" for n in (0, 1) for word in ("wait", "compute")),
        "wait head",
    ]
