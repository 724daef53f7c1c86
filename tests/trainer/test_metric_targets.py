"""TensorBoard files, Weights & Biases and MLflow: what they are given, and what a missing package says.

TensorBoard's files are read back. The other two packages are not among the locked ones; here are modules with the part
of their interface that the trainer uses.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from stoker.pod.causes import Cause
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.config import LoggingConfig
from stoker.trainer.protocol.messages import StepEvent, ValidationEvent
from stoker.trainer.rank.main import cause_of
from stoker.trainer.rank.metric_targets.open_targets import check_targets, open_targets, run_id
from stoker.trainer.rank.metric_targets.target import STEP_NAMES, MetricTarget, step_numbers
from stoker.trainer.rank.metrics import MetricLog
from testing.trainer.tiny_run import alone, tiny_config, train


def step(number: int, total: int = 4) -> StepEvent:
    return StepEvent(
        step=number,
        total_steps=total,
        tokens=10 * number,
        loss=1 / number,
        learning_rate=0.5,
        grad_norm=2.0,
        tokens_per_s=100.0,
        step_s=0.1,
        eta_s=1.0,
        at=1000.0 + number,
    )


def events_in(folder: Path) -> Iterator[Any]:
    """The events of TensorBoard's files: records of length, checksum, content, checksum."""
    for file in sorted(folder.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            yield Event.FromString(content[place + 12 : place + 12 + length])
            place += 16 + length


def scalars_in(folder: Path) -> dict[tuple[str, int], float]:
    return {(value.tag, event.step): value.simple_value for event in events_in(folder) for value in event.summary.value}


def test_tensorboard_files_have_every_number_at_its_step_and_time(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, logging__tensorboard=str(tmp_path / "board" / "run"))
    with MetricLog(None, 2, open_targets(config, 0)) as log:
        for number in range(1, 5):
            log.step(step(number))
        log.validation(ValidationEvent(step=4, loss=0.75, tokens=8, at=1004.5))
    found = scalars_in(tmp_path / "board" / "run")
    assert {number for _, number in found} == {2, 4}
    assert found["train/loss", 2] == 0.5
    assert found["validation/loss", 4] == 0.75
    optional = {"loss_scale", "router_balance_loss", "router_z_loss", "expert_imbalance"}
    given = {name for field, name in STEP_NAMES.items() if field not in optional}
    assert {name for name, _ in found} == {*given, "validation/loss"}
    times = {event.wall_time for event in events_in(tmp_path / "board" / "run") if event.summary.value}
    assert times == {1002.0, 1004.0, 1004.5}


def test_a_resumed_run_hides_the_steps_that_it_trains_again(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, logging__tensorboard=str(tmp_path / "board"))
    with MetricLog(None, 1, open_targets(config, 3)) as log:
        log.step(step(4))
    starts = [event.step for event in events_in(tmp_path / "board") if event.session_log.status == 1]
    assert starts == [4]


def test_a_later_attempt_that_starts_anew_hides_the_steps_of_those_before(tmp_path: Path) -> None:
    for attempt in range(2):
        board = str(tmp_path / "board" / str(attempt))
        config = tiny_config(tmp_path, job__attempt=attempt, logging__tensorboard=board)
        with MetricLog(None, 1, open_targets(config, 0)) as log:
            log.step(step(1))
    starts = [
        [event.step for event in events_in(tmp_path / "board" / attempt) if event.session_log.status == 1]
        for attempt in ("0", "1")
    ]
    assert starts == [[], [1]]


def test_a_run_writes_its_steps_and_its_losses_to_tensorboard(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, logging__tensorboard=str(tmp_path / "board"))
    context = alone()
    assert train(config, context) is Cause.COMPLETED
    events: list[StepEvent] = context.channel.all(StepEvent)  # type: ignore[attr-defined]
    found = scalars_in(tmp_path / "board")
    assert [found["train/loss", event.step] for event in events] == pytest.approx([event.loss for event in events])


def test_numbers_that_a_step_does_not_have_are_left_out() -> None:
    numbers = step_numbers(replace(step(2), grad_norm=None, loss_scale=1024.0))
    assert "train/grad_norm" not in numbers
    assert numbers["train/loss_scale"] == 1024
    assert numbers["train/loss"] == 0.5


class Target(MetricTarget):
    def __init__(self) -> None:
        self.closed: list[bool] = []

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:
        if step == 3:
            raise StorageFailed("full")

    def close(self, completed: bool) -> None:
        self.closed.append(completed)
        if not completed:
            raise StorageFailed("cannot be closed")


def test_targets_learn_whether_the_run_completed_and_hide_no_error() -> None:
    target, other = Target(), Target()
    with MetricLog(None, 1, [target, other]) as log:
        log.step(step(4))
    assert target.closed == [True]
    with pytest.raises(StorageFailed, match="full"), MetricLog(None, 1, [target, other]) as log:
        log.step(step(3))
    assert target.closed == other.closed == [True, False]


def test_a_run_that_had_taken_its_last_step_before_is_closed_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = tiny_config(tmp_path, training__total_steps=2, logging__wandb={"project": "base"})
    for _ in range(2):  # the second attempt finds nothing left to train
        assert train(config, alone()) is Cause.COMPLETED
    assert [value for name, value in package.calls if name == "finish"] == [0, 0]


class FakeWandb(types.ModuleType):
    """`wandb` as far as the trainer uses it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def init(self, **fields: Any) -> FakeWandb:
        self.calls.append(("init", fields))
        return self

    def Settings(self, **fields: Any) -> dict[str, Any]:
        return fields

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, numbers)))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("secret", "online")])
def test_weights_and_biases_gets_one_run_for_all_attempts(
    key: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("WANDB_API_KEY", key)
    config = tiny_config(tmp_path, logging__wandb={"project": "base", "tags": ["a"], "group": "g"})
    with MetricLog(None, 1, open_targets(config, 0)) as log:
        log.step(step(4))
    (_, fields), (_, logged), (_, code) = package.calls
    assert (fields["project"], fields["tags"], fields["group"], fields["name"]) == ("base", ["a"], "g", "tiny")
    assert (fields["mode"], fields["resume"], fields["id"]) == (mode, "allow", run_id("u"))
    assert Path(fields["dir"]).is_dir()
    assert fields["config"]["training"]["total_steps"] == 6
    assert logged == (4, step_numbers(step(4)))
    assert code == 0


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_errors_of_weights_and_biases_name_the_field(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeWandb):
        def fail(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("entity none not found")

    package = Failing()
    setattr(package, call, package.fail)
    monkeypatch.setitem(sys.modules, "wandb", package)
    config = tiny_config(tmp_path, logging__wandb={"project": "base", "entity": "none"})
    message = "logging.wandb {'project': 'base', 'entity': 'none'}: RuntimeError: entity none not found"
    with pytest.raises(StorageFailed, match=re.escape(message)), MetricLog(None, 1, open_targets(config, 0)) as log:
        log.step(step(4))


def test_a_folder_that_tensorboard_cannot_write_is_named_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = tiny_config(tmp_path, logging__tensorboard=str(tmp_path / "file" / "board"))
    with pytest.raises(StorageFailed, match=f"logging.tensorboard {tmp_path}/file/board: NotADirectoryError"):
        open_targets(config, 0)


class FakeMlflow(types.ModuleType):
    """`mlflow` as far as the trainer uses it; its runs outlive a client."""

    def __init__(self, name: str = "mlflow") -> None:
        super().__init__(name)
        self.entities = types.ModuleType("mlflow.entities")
        vars(self.entities)["Metric"] = lambda *values: values
        self.__path__: list[str] = []
        self.runs: dict[str, SimpleNamespace] = {}
        self.fails = False

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        return [run for run in self.runs.values() if query == f"tags.`stoker.job_uid` = '{run.tags['stoker.job_uid']}'"]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run = SimpleNamespace(tags=tags, name=run_name, params={}, metrics=[], ends=[])
        run.info = SimpleNamespace(run_id=f"r{len(self.runs)}")
        self.runs[run.info.run_id] = run
        return run

    def update_run(self, run: str, status: str) -> None:
        self.runs[run].ends.append(status)

    def log_param(self, run: str, key: str, value: str) -> None:
        self.runs[run].params[key] = value

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        if self.fails:
            raise RuntimeError("the server is away")
        self.runs[run].metrics += metrics

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].ends.append(status)


def test_mlflow_gets_one_run_for_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", package.entities)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # so that what the code sets is undone
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    config = tiny_config(tmp_path, logging__mlflow={"tracking_uri": "file:///runs", "experiment": "base"})
    for number in (2, 4):
        with MetricLog(None, 1, open_targets(config, number - 2)) as log:
            log.step(step(number))
    (run,) = package.runs.values()
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
    assert (package.uri, run.name, run.tags) == ("file:///runs", "tiny", {"stoker.job_uid": "u"})
    assert run.params["training.total_steps"] == "6"
    assert ("train/loss", 0.5, 1_002_000, 2) in run.metrics
    assert ("train/loss", 0.25, 1_004_000, 4) in run.metrics
    assert run.ends == ["KILLED", "RUNNING", "FINISHED"]
    package.fails = True
    message = "logging.mlflow.trackingUri file:///runs: RuntimeError: the server is away"
    with pytest.raises(StorageFailed, match=message) as raised, MetricLog(None, 1, open_targets(config, 4)) as log:
        log.step(step(4))
    assert cause_of(raised.value) is Cause.STORAGE_ERROR


@pytest.mark.parametrize("field", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"tensorboard": "tensorboardX"}.get(field, field)
    monkeypatch.setitem(sys.modules, package, None)
    values: dict[str, Any] = {
        "tensorboard": "runs",
        "wandb": {"project": "p"},
        "mlflow": {"tracking_uri": "u", "experiment": "e"},
    }
    with pytest.raises(ConfigError, match=rf"logging.{field} needs the package {package}: install stoker\[{field}\]"):
        check_targets(LoggingConfig(**{field: values[field]}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wandb": {"group": "g"}}, r"logging.wandb: project are needed, also allowed: .*; got \['group'\]"),
        ({"mlflow": {"tracking_uri": "u", "experiment": "e", "x": 1}}, "logging.mlflow: experiment and trackingUri"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_targets(LoggingConfig(**fields))


def test_no_target_needs_no_package() -> None:
    check_targets(LoggingConfig(jsonl="log.jsonl"))
    assert open_targets(tiny_config(), 0) == []
