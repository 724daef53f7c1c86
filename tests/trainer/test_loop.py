"""The whole loop on one rank and on several: losses, saves, resume."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointMissing
from stoker.checkpoint.manifest_file import being_read
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.model.attend import PackedAttend
from stoker.model.decoder import Decoder
from stoker.pod.causes import Cause, cause_of_error
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError, NonFinite, OtherModel, StorageFailed
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.error_causes import ERROR_CAUSES
from stoker.trainer.protocol.messages import (
    PhaseEvent,
    RequestEvent,
    RetentionEvent,
    SaveCommand,
    SaveEvent,
    StepEvent,
    StopCommand,
    ValidationEvent,
)
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.loop import save_reason
from stoker.trainer.rank.piece_map import state_tensors
from stoker.trainer.rank.snapshot import check_same_model
from testing.trainer.tiny_run import (
    TINY,
    RecordingChannel,
    SyntheticBatches,
    alone,
    tiny_config,
    tiny_decoder,
    train,
)


def losses(context: RankContext) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of every step that this rank made."""
    assert isinstance(context.channel, RecordingChannel)
    return [(event.step, event.loss, event.grad_norm) for event in context.channel.all(StepEvent)]


def train_alone(config: TrainerConfig, **stop: Any) -> list[tuple[int, float, float]]:
    context = alone()
    train(config, context)
    return losses(context)


def plain_losses(config: TrainerConfig) -> list[float]:
    """Return the losses of the same run with torch's AdamW.

    It has one backward over the mean of all sequences' losses.
    """
    decoder, batches = tiny_decoder(config), SyntheticBatches(config)
    ops, attention = make_ops(config, torch.device("cpu"))
    groups = [
        {"params": [p for p in decoder.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in decoder.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(6):
        rate = 0.01 * min((step + 1) / 2, 0.5 * (1 + math.cos(math.pi * max(step - 2, 0) / 4)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches.micro_batches(step, 0, 1):
            attend = PackedAttend(ops, attention, torch.from_numpy(batch.cu_seqlens), batch.max_seqlen)
            hidden = decoder(torch.from_numpy(batch.tokens_T), torch.from_numpy(batch.positions_T), attend)
            every = torch.nn.functional.cross_entropy(
                decoder.logits(hidden), torch.from_numpy(batch.targets_T), reduction="none"
            )
            total = total + (every * torch.from_numpy(batch.weights_T)).sum()
        loss = total / batches.target_tokens(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="any data-parallel"),
        pytest.param({"training__deterministic": "Off"}, id="plain kernels, serial sums"),
        pytest.param({"training__micro_batch_size": 1, "memory__zero_stage": 0}, id="stage 0"),
        pytest.param({"memory__activation_checkpointing": "full"}, id="recomputed activations"),
    ],
)
def test_one_rank_equals_plain_torch(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(tmp_path, **changes)
    np.testing.assert_allclose([loss for _, loss, _ in train_alone(config)], plain_losses(config), rtol=2e-5)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_give_the_same_losses_bitwise(tmp_path: Path, mode: str) -> None:
    kept = train_alone(tiny_config(tmp_path / "kept"))
    assert train_alone(tiny_config(tmp_path / mode, memory__activation_checkpointing=mode)) == kept


def test_bf16_learns_nearly_like_fp32(tmp_path: Path) -> None:
    exact = train_alone(tiny_config(tmp_path / "fp32", training__total_steps=12, optimization__schedule="constant"))
    rounded = train_alone(
        tiny_config(
            tmp_path / "bf16", training__total_steps=12, optimization__schedule="constant", memory__precision="bf16"
        )
    )
    np.testing.assert_allclose([loss for _, loss, _ in rounded], [loss for _, loss, _ in exact], rtol=0.02)


def test_events_log_and_validation(tmp_path: Path) -> None:
    context = alone()
    config = tiny_config(
        tmp_path,
        logging__jsonl=str(tmp_path / "log" / "run.jsonl"),
        logging__every_steps=2,
        data__validation={"source": {"name": "v", "path": "none"}, "every_steps": 4},
    )
    assert train(config, context) == Cause.COMPLETED
    channel = context.channel
    assert isinstance(channel, RecordingChannel)
    assert [event.tokens for event in channel.all(StepEvent)] == [8 * 24 * step for step in range(1, 7)]
    assert [event.step for event in channel.all(ValidationEvent)] == [4, 6]
    assert all(0 < event.loss < 10 for event in channel.all(ValidationEvent))
    phases = [event.phase for event in channel.all(PhaseEvent)]
    assert phases[:2] == ["FirstStep", "Training"]
    assert phases[-1] == "Finishing"
    lines = (tmp_path / "log" / "run.jsonl").read_text().splitlines()
    assert len(lines) == 5


def saves(channel: RecordingChannel) -> list[tuple[int, str, str, bool | None]]:
    return [(event.step, event.reason, event.state, event.verified) for event in channel.all(SaveEvent)]


def test_a_save_is_reported_committed_then_verified_and_holds_everything(tmp_path: Path) -> None:
    context = alone()
    train(tiny_config(tmp_path, checkpoint__interval_steps=4), context)
    assert isinstance(context.channel, RecordingChannel)
    states = [("Saving", None), ("Committed", None), ("Committed", True)]
    assert saves(context.channel) == [(4, "interval", *state) for state in states] + [
        (6, "final", *state) for state in states
    ]
    last = context.channel.all(SaveEvent)[-1]
    folder = tmp_path / "root" / last.folder
    assert verify(folder, last.digest).ok
    reader = CheckpointReader(folder)
    assert reader.read("optimizer.exp_avg_sq.model.layers.1.self_attn.k_proj.weight").shape == (16, 32)
    assert "lm_head.weight" not in " ".join(reader.manifest.tensors)
    meta = reader.manifest.meta
    assert (meta["step"], meta["tokens"], meta["cursor"]["step"], meta["layout"]["world_size"]) == (6, 6 * 8 * 24, 6, 1)
    assert meta["loss"] == losses(context)[-1][1]
    assert meta["config"]["training"]["total_steps"] == 6
    assert b"qwen3" in reader.read_file("config.json")


def test_resume_gives_the_bits_of_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = train_alone(tiny_config(tmp_path / "whole"))
    config = tiny_config(tmp_path / "parts", checkpoint__interval_steps=2)
    context = alone()
    context.channel.put(StopCommand(mode="suspend"))
    assert train(config, context) == Cause.INTERRUPTED
    resumed = alone()
    assert train(config, resumed) == Cause.COMPLETED
    assert losses(context) + losses(resumed) == whole


def test_a_cancel_saves_and_ends_for_good_and_an_abrupt_stop_does_not_save(tmp_path: Path) -> None:
    context = alone()
    context.channel.put(StopCommand(mode="interrupt"))
    context.channel.put(StopCommand(mode="cancel"))
    assert train(tiny_config(tmp_path), context) == Cause.CANCELLED
    assert [found.step for found in CheckpointRoot(tmp_path / "root").committed()] == [1]
    abrupt = alone()
    abrupt.channel.put(StopCommand(mode="interrupt", save=False))
    assert train(tiny_config(tmp_path / "other"), abrupt) == Cause.INTERRUPTED
    assert not (tmp_path / "other" / "root").exists()


class StopsOnTheWay(SyntheticBatches):
    """A stop that arrives while the step after the first one reads its data."""

    def __init__(self, config: TrainerConfig, context: RankContext) -> None:
        super().__init__(config)
        self.context = context

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        for batch in super().micro_batches(step, dp_rank, dp_size):
            if step == 1:
                self.context.channel.put(StopCommand(mode="interrupt"))
            yield batch

    def target_tokens(self, step: int) -> int:
        return SyntheticBatches(tiny_config()).target_tokens(step)  # counted before the step begins


def test_a_stop_in_the_middle_of_a_step_ends_the_run_with_that_step(tmp_path: Path) -> None:
    context, config = alone(), tiny_config(tmp_path)
    assert train(config, context, batches=StopsOnTheWay(config, context)) == Cause.INTERRUPTED
    assert [step for step, _, _ in losses(context)] == [1, 2]


def test_requests_are_answered_by_the_next_save(tmp_path: Path) -> None:
    context = alone()
    assert isinstance(context.channel, RecordingChannel)
    context.channel.put(SaveCommand(id="one"))
    context.channel.put(SaveCommand(id="two"))
    train(tiny_config(tmp_path), context)
    answers = [(event.id, event.state, event.folder) for event in context.channel.all(RequestEvent)]
    assert answers == [(name, "Done", "step-00000001.0a1b2c3d") for name in ("one", "two")]
    assert context.channel.all(SaveEvent)[0].id == "one"


def test_own_retention_keeps_the_newest_verified(tmp_path: Path) -> None:
    train_alone(tiny_config(tmp_path, checkpoint__interval_steps=1, checkpoint__max_to_keep=2))
    assert [found.step for found in CheckpointRoot(tmp_path / "root").committed()] == [6, 5]


def test_own_retention_tells_what_it_could_not_delete_and_gives_up_what_it_resumed(tmp_path: Path) -> None:
    policy = {"checkpoint__interval_steps": 1, "checkpoint__max_to_keep": 1}
    root, context = CheckpointRoot(tmp_path / "root"), alone()
    train_alone(tiny_config(tmp_path, checkpoint__interval_steps=2))
    read, resumed = [found for found in root.committed() if found.step in (2, 6)][::-1]
    with being_read(read.path):
        train(tiny_config(tmp_path, training__total_steps=8, job__writer="0a1b2c3e", **policy), context)
    assert isinstance(context.channel, RecordingChannel)
    told = [(len(event.deleted), event.problems) for event in context.channel.all(RetentionEvent)]
    problem = f"{read.folder_name}: {read.path} is being read"
    assert told == [(2, [problem]), (1, [problem])], "step 4 and the resumed one, then step 7"
    assert [found.folder_name for found in root.committed()] == ["step-00000008.0a1b2c3e", read.folder_name]
    assert not resumed.path.exists()


def test_external_retention_deletes_nothing(tmp_path: Path) -> None:
    train_alone(tiny_config(tmp_path, checkpoint__interval_steps=2, checkpoint__max_to_keep=1, retention="external"))
    assert [found.step for found in CheckpointRoot(tmp_path / "root").committed()] == [6, 4, 2]


def damage(folder: Path) -> None:
    """Flip one bit in the middle of the data."""
    file = folder / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_without_an_operator_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, checkpoint__interval_steps=2, training__total_steps=4, optimization__schedule="constant"
    )
    whole = train_alone(config)
    damage(tmp_path / "root" / "step-00000004.0a1b2c3d")
    context = alone()
    with pytest.raises(
        StorageFailed, match="step-00000004"
    ):  # a name is published once, even when what has it is damaged
        train(config, context)
    assert losses(context) == whole[2:]
    assert isinstance(context.channel, RecordingChannel)
    (phase,) = [event for event in context.channel.all(PhaseEvent) if "CheckpointCorrupt" in event.message]
    assert "step 4" in phase.message


def test_a_damaged_manifest_sends_no_run_back_to_step_0(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval_steps=2, training__total_steps=4)
    train_alone(config)
    newest, before = (found.path / "manifest.json" for found in CheckpointRoot(tmp_path / "root").committed())
    newest.write_text("{}")
    context = alone()
    with pytest.raises(StorageFailed, match="step-00000004"):
        train(config, context)
    assert isinstance(context.channel, RecordingChannel)
    assert [event.step for event in context.channel.all(StepEvent)] == [3, 4]
    before.write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"no checkpoint verifies: .*step-00000004.*step-00000002"):
        train(config, alone())


def test_under_an_operator_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, retention="external")
    context = alone()
    train(config, context)
    assert isinstance(context.channel, RecordingChannel)
    last = context.channel.all(SaveEvent)[-1]
    chosen = {"folder": last.folder, "step": last.step, "digest": last.digest}
    with pytest.raises(CheckpointCorrupt, match="digest"):
        train(tiny_config(tmp_path, retention="external", resume={**chosen, "digest": "0" * 64}), alone())
    damage(tmp_path / "root" / last.folder)
    with pytest.raises(CheckpointCorrupt, match=r"rank-00000\.bin"):
        train(tiny_config(tmp_path, retention="external", resume=chosen), alone())


def test_a_storage_without_any_save_is_no_verdict_on_the_chosen_checkpoint(tmp_path: Path) -> None:
    """Else the operator would take one good checkpoint after the other for corrupt, and begin at step 0."""
    context = alone()
    train(tiny_config(tmp_path / "claim", retention="external"), context)
    assert isinstance(context.channel, RecordingChannel)
    last = context.channel.all(SaveEvent)[-1]
    chosen = {"folder": last.folder, "step": last.step, "digest": last.digest}
    with pytest.raises(FileNotFoundError, match=f"no sign of any save, but {last.folder} was written") as lost:
        train(tiny_config(tmp_path / "empty", retention="external", resume=chosen), alone())
    assert cause_of_error(lost.value, ERROR_CAUSES, Cause.INTERNAL) == Cause.STORAGE_ERROR
    shutil.rmtree(tmp_path / "claim" / "root" / last.folder)
    with pytest.raises(CheckpointMissing, match=last.folder):
        train(tiny_config(tmp_path / "claim", retention="external", resume=chosen), alone())


def test_a_run_that_begins_behind_its_last_step_is_refused(tmp_path: Path) -> None:
    context = alone()
    train(tiny_config(tmp_path, retention="external"), context)
    assert isinstance(context.channel, RecordingChannel)
    last = context.channel.all(SaveEvent)[-1]
    begun = {"folder": str(tmp_path / "root" / last.folder), "step": last.step, "digest": last.digest}
    changes: dict[str, Any] = {"retention": "external", "resume": begun}
    other = {"name": "longer", "uid": "other", "writer": "1a2b3c4d"}
    with pytest.raises(ConfigError, match=r"training.totalSteps 6 makes 6 steps, .* is at step 6: steps count from"):
        train(tiny_config(tmp_path / "longer", job=other, **changes), alone())
    assert train(tiny_config(tmp_path, **changes), alone()) == Cause.COMPLETED  # its own last save


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_alone(tiny_config(tmp_path))
    reader = CheckpointReader(CheckpointRoot(tmp_path / "root").committed()[0].path)
    other = Decoder(replace(TINY, num_layers=1), make_ops(tiny_config(), torch.device("cpu"))[0])
    with pytest.raises(OtherModel, match="another model"):
        check_same_model(reader, state_tensors(list(other.named_parts())))


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    class Other(SyntheticBatches):
        def cursor(self, step: int) -> dict[str, Any]:
            return {"step": step, "fingerprint": "other"}

    with pytest.raises(DataError, match="another corpus"):
        SyntheticBatches(tiny_config()).check(Other(tiny_config()).cursor(3))


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, optimization__learning_rate=1e30, optimization__gradient_clipping=0.0)
    with pytest.raises(NonFinite, match=r"step [23]"):
        train(config, alone())


def test_a_root_that_cannot_be_written_fails_the_last_save(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    context = alone()
    with pytest.raises(StorageFailed, match="root"):
        train(tiny_config(tmp_path, retention="external"), context)
    assert isinstance(context.channel, RecordingChannel)
    assert context.channel.all(SaveEvent)[-1].state == "Failed"


@pytest.mark.parametrize(
    ("step", "signals", "expected"),
    [
        (3, StepSignals(), None),
        (4, StepSignals(), "interval"),
        (10, StepSignals(), "final"),
        (3, StepSignals(save=True), "request"),
        (3, StepSignals(timed_save=True), "minutes"),
        (4, StepSignals(stop="suspend"), "interrupt"),
        (4, StepSignals(stop="suspend", save_on_stop=False), None),
    ],
)
def test_reason_to_save(step: int, signals: StepSignals, expected: str | None) -> None:
    assert save_reason(tiny_config(checkpoint__interval_steps=4), step, 10, signals) == expected
