"""The training loop: step, log, validate, save, stop on request.

Owns the progress of the run and the order of work in a step; `train_step`, the saver and `metrics` do the work. Made by
`build`, run by `main`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from stoker.checkpoint.manifest import TensorInfo
from stoker.model.parameter import Part
from stoker.pod.causes import Cause
from stoker.trainer.errors import LossSpiked, NonFinite, TrainerError
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import (
    RequestEvent,
    SaveReason,
    SourceProgress,
    SourcesEvent,
    StepEvent,
    StopMode,
    StragglersEvent,
    ValidationEvent,
)
from stoker.trainer.protocol.step_signals import SignalInbox, StepSignals
from stoker.trainer.rank.checksum import check_replicas
from stoker.trainer.rank.compile_clock import CompileClock
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.guards import Guards
from stoker.trainer.rank.host_link import upload
from stoker.trainer.rank.loss_scale import LossScale
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.metrics import MetricLog, StepClock
from stoker.trainer.rank.plan_check import PlanWatch
from stoker.trainer.rank.router_meter import RouterReport
from stoker.trainer.rank.saver import SavePlan, Saver
from stoker.trainer.rank.schedule import learning_rate
from stoker.trainer.rank.snapshot import Snapshots
from stoker.trainer.rank.stragglers import StragglerWatch
from stoker.trainer.rank.train_step import Passes, StepResult, TrainStep
from stoker.trainer.rank.validation import ValidationLoss, validate
from stoker.trainer.rank.zero import Zero


class Batches(Protocol):
    """The part of the data loader that the loop uses; `step` counts from 0 (finished steps so far)."""

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]: ...
    def target_tokens(self, step: int) -> int: ...
    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]: ...
    def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]: ...
    def cursor(self, step: int) -> dict[str, Any]: ...
    def check(self, cursor: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """Progress of a run: what a resume needs besides tensors."""

    step: int = 0
    """Finished optimizer steps."""
    tokens: int = 0
    """Over all ranks, padding included."""
    loss: float | None = None
    """Loss of the last step."""
    elapsed_s: float = 0.0
    """Time in steps over all attempts."""
    skipped_steps: int = 0
    """Finished steps whose update was not applied."""
    loss_spikes: tuple[dict[str, Any], ...] = ()
    """What the guard against loss spikes has found: step, loss, limit, action and samples."""
    validation_due: bool = False
    """The last step is to be validated: a stop came first."""


class Loop:
    """One rank's run from `progress` to `total_steps`."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        mesh: Mesh,
        batches: Batches,
        passes: Passes,
        zero: Zero,
        parts: list[Part],
        tensors: Sequence[TensorInfo],
        saver: Saver,
        channel: RankChannel,
        inbox: SignalInbox,
        log: MetricLog,
        watch: PlanWatch,
        meta: Mapping[str, Any],
        progress: Progress,
        total_steps: int,
        loss_scale: LossScale | None = None,
        guards: Guards | None = None,
        compiled: CompileClock | None = None,
    ) -> None:
        """`parts`: the tensors of which this rank has a box; `tensors`: the state of the whole model.

        `meta`: facts about the run for every checkpoint (layout, configuration, lineage, ...).
        """
        training = config.training
        self.progress = progress
        self.total_steps = total_steps
        self._saved_step = progress.step
        """Of the last save, or where the run began: a step that is taken back may end there again."""
        self._config = config
        self._mesh = mesh
        self._batches = batches
        self._passes = passes
        self._zero = zero
        self._tensors = tensors
        self._snapshots = Snapshots(zero, parts)
        self._saver = saver
        self._channel = channel
        self._inbox = inbox
        self._log = log
        self._watch = watch
        self._guards = guards or Guards(config.guards)
        self._compiled = compiled
        self._meta = meta
        self._train_step = TrainStep(passes, zero, config.optimization.gradient_clipping, loss_scale)
        self._tokens_per_step = training.global_batch_size * training.sequence_length
        self._clock = StepClock(self._tokens_per_step)
        self._stragglers = StragglerWatch(mesh.dims.groups("replicate", "shard", "context", "tensor"))

    def train(self) -> Cause:
        """Run to the last step, or until a stop.

        Raises:
            NonFinite: loss or gradient is not finite.
            StorageFailed: the last save could not be written.
            StateDiverged: ranks that hold the same state do not.
            LossSpiked: the samples of this step are left out by the next attempt.
        """
        self._channel.phase("FirstStep")
        self._snapshots.prepare()
        signals = self._validate_if_due(StepSignals())  # what the stop of the attempt before has left
        while signals.stop is None and self.progress.step < self.total_steps:
            signals = self._validate_if_due(self._step())
            self._save_if_due(signals)
        self._finish()
        return cause_of_stop(signals.stop)

    def _step(self) -> StepSignals:
        batch, scale = self._guards.batch_of_step(self.progress.step), self._scale_state()
        rate = learning_rate(self._config.optimization, self.progress.step + 1, self.total_steps)
        self._clock.start()
        try:
            result = self._train_batch(batch, rate)
        except NonFinite as error:
            if not self._guards.rewinds:
                return self._stop_before_step(error, scale)
            return self._rewind_non_finite(batch, error, scale)
        step, limit = self.progress.step + 1, self._guards.loss_limit(batch)
        spike = self._guards.judge(step, batch, result.loss, self._samples_of(batch))
        if spike is not None:
            self._note_spike(spike)
            if spike["action"] == "Rewind":
                return self._rewind(batch, f"step {step}: loss {result.loss:.6g} is above {limit:.6g}", scale)
        if self._guards.compares(step):
            check_replicas(self._zero, step)
        self._report(result, rate, self._clock.stop())
        return result.signals

    def _train_batch(self, batch: int, rate: float) -> StepResult:
        mesh = self._mesh
        return self._train_step(
            self.progress.step + 1,
            self._batches.micro_batches(batch, mesh.data_index, mesh.data_size),
            mesh.dims.micro_batches_per_rank(self._config.training),
            self._batches.target_tokens(batch),
            rate,
            self._signals,
            num_skipped=self.progress.skipped_steps,
            loss_limit=self._guards.loss_limit(batch),
        )

    def _samples_of(self, batch: int) -> tuple[int, int]:
        """Indices of a batch's first sample in the global order, and of the one after its last."""
        size = self._config.training.global_batch_size
        return batch * size, (batch + 1) * size

    def _note_spike(self, spike: dict[str, Any]) -> None:
        """Keep the facts of a loss spike for log and lineage."""
        self.progress = replace(self.progress, loss_spikes=(*self.progress.loss_spikes, spike))
        if self._mesh.leads:
            self._log.loss_spike(spike)

    def _rewind_non_finite(self, batch: int, error: NonFinite, scale: Mapping[str, Any] | None) -> StepSignals:
        """Take a loss or gradient that is not finite for a spike, where spikes rewind: else every attempt meets it."""
        self._note_spike(self._guards.facts_of_non_finite(self.progress.step + 1, self._samples_of(batch)))
        return self._rewind(batch, str(error), scale)

    def _rewind(self, batch: int, why: str, scale: Mapping[str, Any] | None) -> StepSignals:
        """Leave a batch out for good, and take its step back (collective).

        Returns the signals of a stop, which saves and ends the run as after any other step: the state is that before
        the step, to which the next attempt would come from an older save, too.

        Raises:
            LossSpiked: without a stop. The next attempt resumes from the last checkpoint.
        """
        self._guards.leave_out(batch)  # before the ranks agree, so that the list is written when one of them ends
        then = "the next attempt resumes from the last checkpoint and leaves out batch"
        return self._stop_before_step(LossSpiked(f"{why}; {then} {batch}"), scale)

    def _stop_before_step(self, error: TrainerError, scale: Mapping[str, Any] | None) -> StepSignals:
        """Return the signals of a stop that came in a step without an update, or raise its error (collective)."""
        signals = self._agree()
        if signals.stop is None:
            raise error
        if self._train_step.loss_scale is not None:
            self._train_step.loss_scale.restore(scale)
        return signals

    def _agree(self) -> StepSignals:
        """The signals of all ranks, outside of a step (collective)."""
        mine = upload(self._signals().numbers(), self._zero.states[0].bucket.device, torch.float64)
        return StepSignals.merge(self._mesh.world.exchange(mine).tolist())

    def _scale_state(self) -> dict[str, float] | None:
        scale = self._train_step.loss_scale
        return None if scale is None else scale.state()

    def _signals(self) -> StepSignals:
        """This rank's signals. Only rank 0 sends timed saves, so its own save in flight decides for all ranks."""
        signals = self._inbox.read()
        return replace(signals, timed_save=signals.timed_save and not self._saver.busy)

    def _report(self, result: StepResult, rate: float, step_s: float) -> None:
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            tokens=self.progress.tokens + self._tokens_per_step,
            loss=result.loss,
            elapsed_s=self.progress.elapsed_s + step_s,
            skipped_steps=self.progress.skipped_steps + result.skipped,
            validation_due=validates(self._config, self.progress.step + 1, self.total_steps),
        )
        event = self._event(result, rate, step_s)
        self._channel.send(event)
        if self._clock.steps == 1:
            self._channel.phase("Training")
        if self._mesh.leads:
            self._log.step(event)
            self._watch.step(step_s)
            self._name_stragglers(result.busy_s)
            sources = self._batches.progress(self.progress.step, self._guards.skipped_batches)
            self._channel.send(SourcesEvent(sources=[asdict(source) for source in sources]))

    def _name_stragglers(self, busy_s: Sequence[float]) -> None:
        found = self._stragglers.add(busy_s)
        if found is not None:
            self._channel.send(StragglersEvent(stragglers=[asdict(straggler) for straggler in found]))

    def _event(self, result: StepResult, rate: float, step_s: float) -> StepEvent:
        return StepEvent(
            step=self.progress.step,
            total_steps=self.total_steps,
            tokens=self.progress.tokens,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm if math.isfinite(result.grad_norm) else None,
            tokens_per_s=self._clock.tokens_per_s,
            step_s=step_s,
            eta_s=self._clock.eta_s(self.total_steps - self.progress.step),
            skipped_steps=self.progress.skipped_steps,
            loss_scale=scale.scale if (scale := self._train_step.loss_scale) else None,
            compile_s=self._compiled.end_first_step() if self._compiled and self._clock.steps == 1 else None,
            **router_fields(result.router),
        )

    def _validate_if_due(self, signals: StepSignals) -> StepSignals:
        """Validate the last step unless the run stops, and return the signals after it.

        A stop, before or meanwhile, leaves it to the next attempt: it may be longer than the time until a kill.
        """
        if not self.progress.validation_due or signals.stop is not None:
            return signals
        self._channel.phase("Validating")
        batches = self._batches.validation(self._mesh.data_index, self._mesh.data_size)
        result = validate(self._passes, self._zero, batches, self._signals)
        if result.found is not None:
            self._report_validation(result.found)
        self._channel.phase("Training" if self._clock.steps else "FirstStep")
        return result.signals

    def _report_validation(self, found: ValidationLoss) -> None:
        self.progress = replace(self.progress, validation_due=False)
        event = ValidationEvent(step=self.progress.step, loss=found.loss, tokens=found.tokens)
        if self._mesh.leads:
            self._channel.send(event)
            self._log.validation(event)

    def _save_if_due(self, signals: StepSignals) -> None:
        reason = save_reason(self._config, self.progress.step, self.total_steps, signals)
        if reason is None or self.progress.step == self._saved_step:
            return
        self._channel.phase("Saving")
        self._saved_step = self.progress.step
        self._saver.start(self._plan(reason), self._snapshots.take)
        if not self._config.checkpoint.async_save:
            self._saver.wait()
        self._channel.phase("Training")

    def _plan(self, reason: SaveReason) -> SavePlan:
        progress = self.progress
        return SavePlan(
            step=progress.step,
            tokens=progress.tokens,
            loss=progress.loss,
            reason=reason,
            requests=self._inbox.take_requests(),
            tensors=self._tensors,
            meta={**self._meta, **self._save_meta()},
        )

    def _save_meta(self) -> dict[str, Any]:
        """Facts about this moment of the run, for the manifest."""
        progress, optimization = self.progress, self._config.optimization
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "learning_rate": learning_rate(optimization, progress.step, self.total_steps),
            "elapsed_s": progress.elapsed_s,
            "skipped_steps": progress.skipped_steps,
            "validation_due": progress.validation_due,
            "loss_scale": self._scale_state(),
            "schedule": {
                "kind": optimization.schedule,
                "warmup_steps": optimization.warmup_steps,
                "total_steps": self.total_steps,
            },
            "cursor": self._batches.cursor(progress.step),
            "guards": self._guards.state(),
            "lineage": {
                **self._meta["lineage"],
                "loss_spikes": list(progress.loss_spikes),
                "skipped_batches": list(self._guards.skipped_batches),
            },
            "saved_at": time.time(),
        }

    def _finish(self) -> None:
        self._channel.phase("Finishing")
        self._zero.wait_parameters()
        problem = self._saver.wait()
        self._inbox.read()
        for request in self._inbox.take_requests():
            self._channel.send(RequestEvent(id=request, state="Failed", detail="the run ended before the next save"))
        if problem is not None:
            raise problem


def router_fields(report: RouterReport | None) -> dict[str, Any]:
    """Return the fields of a step event about experts; none for a model without them."""
    if report is None:
        return {}
    return {
        "router_balance_loss": report.balance_loss,
        "router_z_loss": report.z_loss,
        "expert_imbalance": report.imbalance,
        "expert_tokens": report.expert_tokens,
    }


def validates(config: TrainerConfig, step: int, total_steps: int) -> bool:
    """Whether the weights after step `step` are validated."""
    validation = config.data.validation
    return validation is not None and (step % validation.every_steps == 0 or step == total_steps)


def cause_of_stop(stop: StopMode | None) -> Cause:
    """The end of a run that this stop ended; without one it took its last step."""
    if stop is None:
        return Cause.COMPLETED
    return Cause.CANCELLED if stop == "cancel" else Cause.INTERRUPTED


def save_reason(config: TrainerConfig, step: int, total_steps: int, signals: StepSignals) -> SaveReason | None:
    """The reason to save after step `step`, or None.

    The same on every rank, because `signals` are merged over all ranks.
    """
    if signals.stop is not None:
        return "interrupt" if signals.save_on_stop else None
    if step == total_steps:
        return "final"
    if signals.save:
        return "request"
    every = config.checkpoint.interval_steps
    if every is not None and step % every == 0:
        return "interval"
    return "minutes" if signals.timed_save else None
