"""Optimizer state in a file: the bits of state on the device, saves beside updates, and errors of the volume."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.pod.causes import Cause
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE, Bucket
from stoker.trainer.rank.disk_update import DiskUpdate
from stoker.trainer.rank.main import cause_of
from stoker.trainer.rank.optimizer import Adam, HeldState, UpdateNumbers
from stoker.trainer.rank.state_file import DiskState, StateFile, aligned_memory
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.any_order import AnyOrder, QueuedAdam
from testing.trainer.layouts import MODEL, check_bits_across_saves
from testing.trainer.tiny_run import alone, empty_decoder, tiny_config

CPU = torch.device("cpu")


def random_rows(seed: int, rows: int, lines: int) -> Tensor:
    return torch.randn(rows, lines * LINE, generator=torch.Generator().manual_seed(seed)).abs_()


def state_on_disk(file: StateFile, values: Tensor, lines: int, device: str, wide: bool) -> tuple[HeldState, HeldState]:
    """Return the same state twice: in memory, and in a file. `values`: gradient, master, moments."""
    numel = values.shape[1]
    bucket = Bucket("bucket", [("a", torch.nn.Parameter(torch.empty(numel // LINE, LINE)))], 1)
    gradient, master, first, second = (row.clone().to(device) for row in values)
    plain = HeldState(
        bucket=bucket,
        start=0,
        master=master,
        gradient=gradient,
        exp_avg=first,
        exp_avg_sq=second,
        parameters=None if wide else torch.zeros(numel, dtype=torch.bfloat16, device=device),
    )
    disk = DiskState(file, 2 if wide else 3, numel, lines * LINE)
    disk.fill(values[2:] if wide else values[1:])
    there = replace(
        plain,
        master=master.clone() if wide else master.to("meta"),
        exp_avg=first.to("meta"),
        exp_avg_sq=second.to("meta"),
        parameters=None if plain.parameters is None else plain.parameters.clone(),
        disk=disk,
    )
    return plain, there


def rows_of(state: HeldState) -> Tensor:
    rows = [state.exp_avg, state.exp_avg_sq]
    return torch.stack([state.master, *rows] if state.parameters is not None else rows).cpu()


def check_updates(
    folder: Path, device: str, kernels: Any, lines: int, wide: bool, queues: AnyOrder | None = None
) -> None:
    """Several buckets, more pieces than buffers, a save that is held over later updates, a state that is replaced."""
    file = StateFile(str(folder), 0)
    adam = Adam(config := OptimizationConfig(weight_decay=0.5), Ops(kernels))
    inner = adam if queues is None else QueuedAdam(config, queues)
    streamed = DiskUpdate(inner, torch.device(device), lines * LINE, file, queues)
    both = [state_on_disk(file, random_rows(seed, 4, size), lines, device, wide) for seed, size in enumerate((7, 1, 4))]
    done: list[Bucket] = []
    held: list[tuple[Any, Tensor]] = []
    for step, scale in enumerate((1.0, float("nan"), 0.25, 0.5, 1.0), start=1):
        numbers = UpdateNumbers(step=step, learning_rate=0.1, scale=torch.tensor(scale, device=device))
        adam.update([plain for plain, _ in both], numbers, lambda _bucket: None)
        streamed.update([there for _, there in both], numbers, done.append)
        for plain, there in both:
            assert there.disk is not None
            assert torch.equal(there.disk.read(), rows_of(plain))
            if plain.parameters is not None and there.parameters is not None:
                assert torch.equal(there.parameters, plain.parameters)
            if step == 2:
                held.append((there.disk.hold(), rows_of(plain)))
        for read, expected in held:
            assert torch.equal(read(), expected), "a save reads the state of its step"
        if step == 3:
            for plain, there in both:
                assert there.disk is not None
                plain.exp_avg.zero_()
                there.disk.fill(rows_of(plain))
    assert done == [there.bucket for _, there in both] * 5
    file.close()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("lines", [1, 3, 16])
def test_updates_of_state_in_a_file_have_the_bits_of_those_in_memory(tmp_path: Path, lines: int, wide: bool) -> None:
    check_updates(tmp_path, "cpu", "reference", lines, wide)


@pytest.mark.parametrize("last", ["arriving", "updates", "leaving", "main"])
def test_no_order_of_the_streams_changes_a_bit(tmp_path: Path, last: str) -> None:
    queues = AnyOrder(lambda ready: next((one for one in ready if one is not getattr(queues, last)), ready[0]))
    with queues.running():
        check_updates(tmp_path, "cpu", "reference", 3, False, queues)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
def test_state_in_a_file_is_updated_on_a_gpu(tmp_path: Path, wide: bool) -> None:
    for lines in (1, 3, 16):
        check_updates(tmp_path, "cuda", "fused", lines, wide)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["update", "hold", "fill"]), max_size=8), st.integers(1, 3))
def test_what_a_save_holds_stays_through_any_updates(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], piece: int
) -> None:
    file = StateFile(str(tmp_path_factory.mktemp("nvme")), 0)
    disk, now, held = DiskState(file, 3, 4 * LINE, piece * LINE), random_rows(0, 3, 4), None
    disk.fill(now)
    for seed, event in enumerate(events, start=1):
        if event == "hold":
            held = disk.hold(), now
            continue
        now = random_rows(seed, 3, 4)
        if event == "fill":
            disk.fill(now)
            held = None  # only a load fills, and no save is under way then
            continue
        disk.begin_update()
        for start in disk.starts:
            memory = aligned_memory(3 * disk.length(start), pinned=False)
            memory.copy_(now[:, start : start + disk.length(start)].reshape(-1))
            disk.store(start, memory, lambda: None)
        disk.end_update()
    assert torch.equal(disk.read(), now)
    assert held is None or torch.equal(held[0](), held[1])
    file.close()


def test_a_write_of_a_piece_comes_after_the_one_before_it(tmp_path: Path) -> None:
    overtaken = threading.Event()

    def pwritev(*arguments: Any) -> int:
        overtaken.set()
        return os.pwritev(*arguments)

    def late() -> None:
        overtaken.wait(0.3)

    file = StateFile(str(tmp_path), 0, pwritev=pwritev)
    disk = DiskState(file, 3, LINE, LINE)
    first, second = (aligned_memory(3 * LINE, pinned=False).fill_(number) for number in (1, 2))
    disk.begin_update()
    disk.store(0, first, late)
    disk.store(0, second, lambda: None)
    disk.end_update()
    assert torch.equal(disk.read().flatten(), second)
    file.close()


def test_the_file_has_no_name_and_ends_with_its_owner(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path), 3)
    disk = DiskState(file, 3, LINE, LINE)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(disk.read(), torch.zeros(3, LINE))
    file.close()


def test_a_killed_run_leaves_nothing_on_the_volume(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from stoker.trainer.rank.state_file import StateFile; "
        "StateFile(sys.argv[1], 0).reserve(1 << 20); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


class FailingCalls:
    """`preadv` and `pwritev` of which one fails from its n-th call on."""

    def __init__(self, name: str, after: int, error: int) -> None:
        self._real, self._left, self._error, self.name = getattr(os, name), after, error, name

    def __call__(self, *arguments: Any) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._error, os.strerror(self._error))
        done: int = self._real(*arguments)
        return done


def test_errors_of_the_volume_are_storage_errors_that_name_the_field(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"memory.nvmeOffload.path /dev/null/x: cannot be used: Not a directory"):
        StateFile("/dev/null/x", 0)
    file = StateFile(str(tmp_path / "made" / "here"), 0)
    with pytest.raises(StorageFailed, match=r"has no room for [\d.]+ GiB of optimizer state on this rank: ") as raised:
        file.reserve(1 << 60)
    assert cause_of(raised.value) is Cause.STORAGE_ERROR
    file.close()


@pytest.mark.parametrize(("name", "what"), [("preadv", "cannot be read"), ("pwritev", "cannot be written")])
def test_an_error_in_a_thread_ends_the_update_or_the_save(tmp_path: Path, name: str, what: str) -> None:
    file = StateFile(str(tmp_path), 0, **{name: FailingCalls(name, 12, errno.EIO)})
    streamed = DiskUpdate(Adam(OptimizationConfig(), Ops("reference")), CPU, LINE, file)
    _, there = state_on_disk(file, random_rows(0, 4, 4), 1, "cpu", wide=False)
    assert there.disk is not None
    disk = there.disk

    def run() -> None:
        for step in range(1, 10):
            numbers = UpdateNumbers(step=step, learning_rate=0.1, scale=torch.ones(()))
            streamed.update([there], numbers, lambda _bucket: None)
            disk.read()

    with pytest.raises(StorageFailed, match=f"memory.nvmeOffload.path {tmp_path}: {what}: Input/output error"):
        run()
    file.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_its_state_in_a_file_has_the_bits_of_one_without_and_goes_on_from_its_saves(
    tmp_path: Path, precision: str
) -> None:
    nvme = {"memory__nvme_offload": {"path": str(tmp_path)}, "checkpoint__interval_steps": 1}
    check_bits_across_saves(tmp_path, precision, nvme)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_in_the_file_and_in_host_memory_is_what_the_plan_says(tmp_path: Path, precision: str) -> None:
    wide = replace(MODEL, hidden_size=128, intermediate_size=512)
    config = tiny_config(memory__precision=precision, memory__nvme_offload={"path": str(tmp_path)})
    planned = fullest(Job.from_config(config.model_dump(), ModelSize.from_fields(asdict(wide))))
    decoder, start = empty_decoder(config, CPU, wide)
    zero = make_zero(config, decoder, alone().mesh, CPU, start.fill)
    zero.begin_step(1)
    zero.end_micro_batch()
    zero.finish_reduce()
    zero.update(1, 1e-3, torch.ones(()))
    assert zero.settings.disk is not None
    adam = zero._optimizer
    assert isinstance(adam, DiskUpdate)
    buffers = sum(item.buffer.memory.nbytes for item in adam._ahead)
    buffers += sum(buffer.memory.nbytes for buffer in adam._buffers)
    copies = 0 if precision == "bf16" else 4 * sum(state.master.numel() for state in zero.states)
    in_memory = sum(held.nbytes for state in zero.states for held in state.held_lengths() if not held.is_meta)
    assert planned.optimizer == 0
    assert in_memory == copies, "fp32 masters are the weights"
    assert planned.disk == pytest.approx(zero.settings.disk.file.size, rel=0.05)
    assert planned.host == pytest.approx(buffers + copies, rel=0.05)
    zero.close()
