"""The training step's view of a pipeline: passes of the micro-batches of a step, by the schedule.

Every rank of a pipeline reads the same micro-batches; only activations and their gradients travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops
from stoker.pod.capabilities import AttentionName
from stoker.pod.pipeline.actions import Action, ScheduleName, Shape
from stoker.pod.pipeline.schedules import forward_schedule, make_schedule
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.attend_maker import AttendMaker, ContextGroup
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.host_link import upload
from stoker.trainer.rank.pipeline.executor import Executor
from stoker.trainer.rank.pipeline.stage import StageInputs
from stoker.trainer.rank.router_meter import RouterMeter
from stoker.trainer.rank.zero import Zero


class PipelinePasses:
    """Forward and backward passes of one rank's stages (`train_step.Passes`)."""

    max_evaluated = 64

    def __init__(
        self,
        name: ScheduleName,
        dims: ParallelDims,
        stage: int,
        executor: Executor,
        config: ModelConfig,
        ops: Ops,
        attention: AttentionName,
        device: torch.device,
        *,
        cuts_tokens: bool = False,
        context: ContextGroup | None = None,
    ) -> None:
        """`stage`: this rank's index on the pipeline axis. `cuts_tokens`: hidden states are cut over `tensor`.

        `context`: the ranks that have other tokens of the same micro-batches.
        """
        self._token_ranks = dims.tensor if cuts_tokens else 1
        self._name: ScheduleName = name
        self._dims = dims
        self._stage = stage
        self._executor = executor
        self._config = config
        self._attend = AttendMaker(ops, attention, device, context)
        self._shares = None if context is None else context.group
        self._device = device

    def new_meter(self) -> RouterMeter:
        """See `Passes`."""
        return RouterMeter(self._config, self._executor.layers, self._device, self._shares)

    def train(
        self,
        batches: Iterable[MicroBatch],
        zero: Zero,  # noqa: ARG002  the stages hold it
        router: RouterMeter,
        factor: float = 1.0,
    ) -> list[Tensor]:
        """See `Passes`."""
        every = list(batches)
        targets = [batch.num_targets for batch in every]
        inputs = [
            self._inputs(batch, factor, router.new_aux(count * factor))
            for batch, count in zip(every, targets, strict=True)
        ]
        found = self._executor.train(rank_order(self._name, self._shape(len(inputs)), self._stage), inputs)
        for held, count in zip(inputs, targets, strict=True):
            router.add(held.aux, count)
        none = torch.zeros((), dtype=torch.float32, device=self._device)
        return [found.get(index, none) for index in range(len(inputs))]

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[float]:
        """See `Passes`."""
        inputs = [self._inputs(batch) for batch in batches]
        found = self._executor.evaluate(rank_order(None, self._shape(len(inputs)), self._stage), inputs)
        return [float(found[index]) for index in sorted(found)]

    def _shape(self, micro_batches: int) -> Shape:
        dims = self._dims
        return Shape(ranks=dims.pipeline, stages_per_rank=dims.stages_per_rank, micro_batches=micro_batches)

    def _inputs(self, batch: MicroBatch, factor: float = 1.0, aux: Aux | None = None) -> StageInputs:
        # Weights stay on the host: the number of targets is read there, without a wait for the device.
        return StageInputs(
            tokens_T=upload(batch.tokens_T, self._device),
            positions_T=upload(batch.positions_T, self._device),
            targets_T=upload(batch.targets_T, self._device),
            weights_T=torch.as_tensor(batch.weights_T) * factor,
            attend=self._attend.of(batch),
            rows=len(batch.tokens_T) // self._token_ranks,
            aux=aux,
        )


@lru_cache(maxsize=8)
def rank_order(name: ScheduleName | None, shape: Shape, rank: int) -> Sequence[Action]:
    """Return one rank's list of a schedule; of forward passes alone for None."""
    return (forward_schedule(shape) if name is None else make_schedule(name, shape))[rank]
