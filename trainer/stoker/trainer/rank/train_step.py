"""One optimizer step: forward and backward of the micro-batches, reduction, one exchange of losses and signals, update.

T tokens of one micro-batch, packed; D hidden.

Called by the loop. Parameters and optimizer state change through `zero`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stoker.model.attend import Attend
from stoker.model.aux import Aux
from stoker.model.decoder import Decoder
from stoker.pod.capabilities import AttentionName
from stoker.pod.plan.layer_choice import KEEP_ALL, LayerChoice
from stoker.trainer.errors import NonFinite
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.attend_maker import AttendMaker, ContextGroup
from stoker.trainer.rank.busy_clock import BusyClock
from stoker.trainer.rank.clip import clip_factor
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.gathered_weights import GatheredWeights
from stoker.trainer.rank.host_link import Readback, upload
from stoker.trainer.rank.layers_again import LayersAgain
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.router_meter import RouterMeter, RouterReport
from stoker.trainer.rank.savings import Savings
from stoker.trainer.rank.zero import Zero


@dataclass(frozen=True)
class StepResult:
    """The result of one step; the same values on every rank."""

    loss: float
    """Mean over all target tokens of the step, before the update."""
    grad_norm: float
    """Before clipping. Not finite in a step that fp16 skipped."""
    skipped: bool
    """The update was not applied."""
    signals: StepSignals
    """The decision of all ranks for the end of this step."""
    router: RouterReport | None = None
    """Only of a model with experts."""
    busy_s: tuple[float, ...] = ()
    """By rank: time from the start of the step before this one until its last backward had ended; 0 without one."""


class Passes(Protocol):
    """Forward and backward passes of a rank's micro-batches: one after the other, or through a pipeline."""

    def new_meter(self) -> RouterMeter:
        """Return a meter of the routers that this rank computes."""
        ...

    def train(
        self, batches: Iterable[MicroBatch], zero: Zero, router: RouterMeter, factor: float = 1.0
    ) -> list[Tensor]:
        """Run forward and backward of each micro-batch of a step, for the loss times `factor`.

        Return their loss sums times `factor`, fp32 scalars; on ranks that compute no loss they are 0.
        """
        ...

    @property
    def max_evaluated(self) -> int:
        """Micro-batches that one call of `evaluate` takes: more of them than one make a pipeline faster."""
        ...

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return the loss sums of micro-batches without gradient; none on ranks that compute no loss."""
        ...


class ForwardPass:
    """The model's forward pass up to the loss sum, with or without activation checkpointing."""

    max_evaluated = 1

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionName,
        device: torch.device,
        ready: Callable[[str], None],
        *,
        choices: Sequence[LayerChoice] = (),
        gathered: GatheredWeights | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        """`ready` is called before the parameters of `embedding`, `blocks.0`, ..., `head` are used (`Zero.ready`).

        `choices`: what backward computes again in each layer; none: nothing.

        `gathered`: for ZeRO stage 3, whose parameters are gathered for backward too (`Zero.gathered`). `context`: the
        ranks that have other tokens of the same micro-batches.
        """
        self._decoder = decoder
        self._attend = AttendMaker(decoder.ops, attention, device, context)
        self._shares = None if context is None else context.group
        self._device = device
        self._ready = ready
        self._savings = Savings(decoder.ops, gathered)
        self._again = LayersAgain(decoder, ready, choices or [KEEP_ALL] * len(decoder.blocks))

    def new_meter(self) -> RouterMeter:
        """See `Passes`."""
        return RouterMeter(self._decoder.config, self._decoder.layers, self._device, self._shares)

    def train(
        self, batches: Iterable[MicroBatch], zero: Zero, router: RouterMeter, factor: float = 1.0
    ) -> list[Tensor]:
        """See `Passes`."""
        return [self._backward(batch, zero, router, factor) for batch in batches]

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[float]:
        """See `Passes`."""
        with torch.no_grad():
            return [float(self.loss_sum(batch)) for batch in batches]

    def _backward(self, batch: MicroBatch, zero: Zero, router: RouterMeter, factor: float) -> Tensor:
        targets = batch.num_targets
        aux = router.new_aux(targets * factor)
        loss_sum = self.loss_sum(batch, factor, aux)
        router.add(aux, targets)
        loss_sum.backward()  # type: ignore[no-untyped-call]
        self.end_backward()
        zero.end_micro_batch()
        return loss_sum.detach()

    def loss_sum(self, batch: MicroBatch, factor: float = 1.0, aux: Aux | None = None) -> Tensor:
        """The sum over the micro-batch of weight times -log(probability of the target), times `factor`; fp32 scalar.

        The factor multiplies the weights, because the loss makes its first gradients in the forward pass. Losses of
        routers leave through `aux`; their gradients enter where they were computed.
        """
        # Weights stay on the host: the number of targets is read there, without a wait for the device.
        weights_T = torch.as_tensor(batch.weights_T) * factor
        attend = self._attend.of(batch)
        with self._savings.in_forward():
            hidden_TD = self._hidden(
                upload(batch.tokens_T, self._device), upload(batch.positions_T, self._device), attend, aux
            )
            if self._decoder.config.tie_embeddings:
                self._savings.use_too("embedding")
            targets_T = upload(batch.targets_T, self._device)
            return self._decoder.cross_entropy(hidden_TD, targets_T, weights_T).loss_sum

    def end_backward(self) -> None:
        """Free what backward has computed again."""
        self._savings.end_backward()

    def _hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, aux: Aux | None) -> Tensor:
        self._ready("embedding")
        x_TD, update_TD = self._decoder.embed(tokens_T), None
        for index in range(len(self._decoder.blocks)):
            x_TD, update_TD = self._again.block(index, x_TD, update_TD, positions_T, attend, aux)
            self._savings.gather_for_backward(f"blocks.{index}", x_TD, update_TD)
        self._ready("head")
        self._again.leave_blocks()
        hidden_TD = self._decoder.norm(x_TD, update_TD)
        self._savings.gather_for_backward("head", hidden_TD)
        return hidden_TD


class TrainStep:
    """Runs the steps of one rank."""

    def __init__(self, passes: Passes, zero: Zero, clipping: float, loss_scale: LossScale | None = None) -> None:
        """`loss_scale`: for fp16."""
        self._passes = passes
        self._zero = zero
        self._clipping = clipping
        self.loss_scale = loss_scale
        self._router = passes.new_meter()
        self._busy = BusyClock(zero.states[0].bucket.device)

    def __call__(
        self,
        step: int,
        batches: Iterable[MicroBatch],
        num_batches: int,
        target_tokens: int,
        learning_rate: float,
        signals: Callable[[], StepSignals],
        *,
        num_skipped: int = 0,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """Run step number `step` (from 1) on this rank's micro-batches. `target_tokens` is the count over all ranks.

        `num_skipped`: earlier steps whose update was not applied; the optimizer does not count them. `loss_limit`: a
        larger loss changes no weight.

        `signals` is called after the last backward, so that a stop that arrives during the step ends the run with this
        step. The host blocks only once, at the end, while the device is already applying the update.

        Raises:
            NonFinite: on every rank; no weight was changed.
        """
        # Backward runs on the sum of the losses; the mean's divisor is applied to the fp32 gradient. A divisor inside
        # of backward would be rounded to bf16.
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor(target_tokens)
        divisor = factor * target_tokens
        last_busy_s = self._busy.seconds()
        self._busy.start()
        self._zero.begin_step(num_batches)
        sums = self._passes.train(batches, self._zero, self._router, factor)
        assert len(sums) == num_batches
        self._busy.stop()
        self._zero.finish_reduce()
        mine = [last_busy_s, *signals().numbers()]
        numbers, width = self._exchange(torch.stack(sums), mine), len(mine)
        routed = width + self._router.width
        loss = counted_once(numbers[:, routed:], self._zero.mesh).reshape(-1).sum() / divisor
        router = counted_by_tokens(numbers[:, width:routed], self._zero.mesh)
        norm = self._zero.gradient_norm() / divisor
        scale = clip_factor(norm, self._clipping) / divisor
        applies = loss.isfinite() & norm.isfinite() & (loss <= loss_limit)
        scale = torch.where(applies, scale, math.nan)  # NaN: no update
        answer = Readback(torch.cat([torch.stack([loss, norm]), router, numbers[:, :width].reshape(-1)]))
        # The update is queued before the host waits for the answer, so that the host can queue the next step in time.
        self._zero.update(step - num_skipped, learning_rate, scale.float())
        result = self._result(step, answer.read(), width, target_tokens)
        return replace(result, skipped=result.skipped or result.loss > loss_limit)

    def _result(self, step: int, answer: Tensor, width: int, target_tokens: int) -> StepResult:
        loss, norm = answer[:2].tolist()
        overflow = self.loss_scale is not None and self.loss_scale.overflows(math.isfinite(norm))
        if not (math.isfinite(loss) and (math.isfinite(norm) or overflow)):
            raise NonFinite(
                f"step {step}: loss {loss}, gradient norm {norm}; the last good weights are those of step {step - 1}"
            )
        routed = 2 + self._router.width
        router, signals = answer[2:routed], answer[routed:]
        by_rank = signals.view(-1, width)
        merged = StepSignals.merge(by_rank[:, 1:].tolist())
        report = self._router.report(router, target_tokens)
        return StepResult(loss, norm, overflow, merged, report, tuple(by_rank[:, 0].tolist()))

    def _exchange(self, sums: Tensor, signals: list[float]) -> Tensor:
        """Gather signals, routers' numbers and losses of all ranks in one small exchange.

        Losses are in the order of the global micro-batch index.
        """
        mine = upload(signals, sums.device, torch.float64)
        return self._zero.mesh.world.exchange(torch.cat([mine, self._router.take(), sums.double()]))


def counted_once(by_rank: Tensor, mesh: Mesh) -> Tensor:
    """The rows of the ranks whose losses add up to the whole, in the order of the data."""
    ranks = mesh.dims.loss_ranks()
    if ranks == tuple(range(len(by_rank))):
        return by_rank
    return torch.stack([by_rank[rank] for rank in ranks])


def counted_by_tokens(by_rank: Tensor, mesh: Mesh) -> Tensor:
    """The sum of numbers of all stages' layers; the ranks of `tensor` have the same tokens, of which one counts."""
    ranks = [rank for rank in range(len(by_rank)) if mesh.dims.coordinates(rank).tensor == 0]
    return by_rank[ranks].sum(0)
