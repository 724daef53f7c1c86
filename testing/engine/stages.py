"""A pipeline whose stages are computed one after the other in this process, over edges that keep what was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.engine.execution.launched_step import LaunchedStep
from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.stage_links import Arrival, Edge, StageLinks
from stoker.engine.execution.step import StepInput


class LocalEdge(Edge):
    """Both ends of an edge. A message that is received before it was sent arrives when it is waited for."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()

    def begin_send(self, tensor: Tensor) -> Arrival:
        self._sent.append(tensor)
        return _Done()

    def begin_receive(self, tensor: Tensor) -> Arrival:
        return _Coming(self._sent, tensor)

    def abort(self) -> None:
        pass


class _Done:
    def wait(self) -> None:
        pass


class _Coming:
    def __init__(self, sent: deque[Tensor], tensor: Tensor) -> None:
        self._sent, self._tensor = sent, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._sent.popleft())


class StagesHere:
    """The executor: every stage launches each step, the first one first."""

    def __init__(self, stages: list[Runner]) -> None:
        self.stages = stages

    def submit(self, step: StepInput) -> LaunchedStep:
        return [stage.launch(step) for stage in self.stages][-1]

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        shape = self.stages[-1].next_capture(wanted=wanted)
        if shape is not None:
            self.capture(shape)
        return shape is not None

    def capture(self, shape: PassShape) -> None:
        for stage in self.stages:
            stage.capture(shape)

    def check(self) -> None:
        pass

    def rank_states(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        pass


def local_stages(
    make_stage: Callable[[range, StageLinks], Runner], layers: list[range], device: str = "cpu", **sizes: Any
) -> StagesHere:
    """Make a pipeline. `sizes`: of `StageLinks`."""
    last = len(layers) - 1
    edges, back = [LocalEdge() for _ in range(last)], LocalEdge()
    return StagesHere(
        [
            make_stage(
                own,
                StageLinks(
                    stage,
                    len(layers),
                    device=torch.device(device),
                    dtype=torch.float32,
                    before=edges[stage - 1] if stage else None,
                    behind=edges[stage] if stage < last else None,
                    tokens=back if stage in (0, last) else None,
                    **sizes,
                ),
            )
            for stage, own in enumerate(layers)
        ]
    )
