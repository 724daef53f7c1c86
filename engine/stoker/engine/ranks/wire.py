"""The messages between rank 0 and a further rank, and their msgpack form. Numbers of a step travel as int32 arrays.

Rank 0 sends `Setup` once, then each `Step`, `Capture` and `BlockCall` in the order in which it carries them out itself.
A further rank sends `Join` if it is of another pod, `Hello` when it is up, `Ready` when its part of the model is
loaded, `Beat` about once a second, a `BlockReport` for what became of blocks, `StepFailed` where a step has an error,
and `Failed` before it ends by one. The socket's end is the end of the other side.

Sent and received by `workers` and `worker`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any, NamedTuple

import msgpack
import torch

from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.step import Opening, SeatMask, StepInput, TableEntry
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import BLOCK_CLASSES, BlockCall, BlockReport, block_message, block_values
from stoker.engine.sampling import SamplingParams


class Setup(NamedTuple):
    """The plan, and where rank 0 waits for the others."""

    plan: EnginePlan
    port: int
    host: str


class Step(NamedTuple):
    """Compute this step."""

    step: StepInput


class Capture(NamedTuple):
    """Capture the graph of this shape, as rank 0 does now."""

    shape: PassShape


class Join(NamedTuple):
    """The first message of a rank of another pod."""

    rank: int
    pid: int
    pod: str
    version: str


class Hello(NamedTuple):
    """The rank's process is up and has its device."""

    free_bytes: int | None
    """Memory of its device that a new allocation can have; None where the system does not tell."""


class Ready(NamedTuple):
    """Weights and cache are on the device."""


class Beat(NamedTuple):
    """Sign of life."""

    begun: int
    """Steps begun since the start."""
    done: int
    """Steps whose tokens are known."""
    digest: int | None
    """Digest of the tokens of those steps (`digests`); None for a rank that samples none."""


class StepFailed(NamedTuple):
    """A step was not computed, and the rank goes on: others will have failed in it, too, at the same place."""

    steps: int
    """Steps begun since the start, this one included."""
    calls: int
    """Exchanges with the other ranks so far."""
    error: str


class Failed(NamedTuple):
    """The rank ends."""

    error: str


WorkerMessage = Join | Hello | Ready | Beat | StepFailed | Failed | BlockReport
RankMessage = Setup | Step | Capture | BlockCall
_CLASSES: tuple[type[Any], ...] = (Setup, Step, Capture, Hello, Ready, Beat, StepFailed, Failed, Join, *BLOCK_CLASSES)
_TAGS = {cls: tag for tag, cls in enumerate(_CLASSES)}

_NUMBERS = ("cleared", "seats", "starts", "lengths", "scored", "sample_chunks", "sample_seats")
"""Fields of a step that are integers below 2**31."""


def pack(message: RankMessage | WorkerMessage) -> bytes:
    """Encode a message."""
    match message:
        case Step(step=step):
            values: list[Any] = _step_values(step)
        case Setup(plan=plan, port=port, host=host):
            values = [_plan_values(plan), port, host]
        case _:
            values = block_values(message) if type(message) in BLOCK_CLASSES else list(message)
    packed: bytes = msgpack.packb([_TAGS[type(message)], *values])
    return packed


def unpack(frame: bytes) -> Any:
    """Decode a message that `pack` made; both sides are of one version."""
    tag, *values = msgpack.unpackb(frame, use_list=False, strict_map_key=False)
    cls = _CLASSES[tag]
    if cls is Step:
        return Step(_step_of(values))
    if cls is Setup:
        return Setup(_plan_of(values[0]), *values[1:])
    if cls is Capture:
        return Capture(PassShape(*values[0]))
    if cls in BLOCK_CLASSES:
        return block_message(cls, values)
    return cls(*values)


# A step.


def _step_values(step: StepInput) -> list[Any]:
    return [
        step.number,
        [_opening_values(opening) for opening in step.openings],
        _packed(number for entry in step.table for number in entry),
        _packed(number for copy in step.copies for number in copy),
        [tuple(mask) for mask in step.masks],
        *(_packed(getattr(step, name)) for name in _NUMBERS),
    ]


def _step_of(values: list[Any]) -> StepInput:
    number, openings, table, copies, masks, *numbers = values
    flat, pairs = _numbers(table), _numbers(copies)
    return StepInput(
        number=number,
        openings=tuple(_opening_of(opening) for opening in openings),
        table=tuple(map(TableEntry, flat[::3], flat[1::3], flat[2::3])),
        copies=tuple(zip(pairs[::2], pairs[1::2], strict=True)),
        masks=tuple(SeatMask(*mask) for mask in masks),
        **{name: _numbers(packed) for name, packed in zip(_NUMBERS, numbers, strict=True)},
    )


def _opening_values(opening: Opening) -> list[Any]:
    return [
        opening.seat,
        _packed(opening.tokens),
        opening.num_prompt,
        opening.choice,
        _packed(opening.stop_tokens),
        _param_values(opening.params),
    ]


def _opening_of(values: tuple[Any, ...]) -> Opening:
    seat, tokens, num_prompt, choice, stop_tokens, params = values
    return Opening(seat, _numbers(tokens), num_prompt, choice, _numbers(stop_tokens), _params_of(params))


def _param_values(params: SamplingParams) -> dict[str, Any]:
    """The values that are not the default."""
    default = default_params()
    changed = {
        field.name: value
        for field in fields(params)
        if (value := getattr(params, field.name)) != getattr(default, field.name)
    }
    if params.grammar is not None:
        changed["grammar"] = asdict(params.grammar)
    return changed


def _params_of(values: dict[str, Any]) -> SamplingParams:
    if "grammar" in values:
        values["grammar"] = OutputGrammar(**values["grammar"])
    return replace(default_params(), **values)


@cache
def default_params() -> SamplingParams:
    return SamplingParams()


def _packed(numbers: Iterable[int]) -> bytes:
    return array("i", numbers).tobytes()


def _numbers(packed: bytes) -> tuple[int, ...]:
    return tuple(array("i", packed))


# The plan.


def _plan_values(plan: EnginePlan) -> dict[str, Any]:
    return asdict(plan) | {"dtype": str(plan.dtype).removeprefix("torch.")}


def _plan_of(values: dict[str, Any]) -> EnginePlan:
    return EnginePlan(**values | {"dtype": getattr(torch, values["dtype"])})
