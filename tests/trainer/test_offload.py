"""Optimizer state in host memory: the bits of state on the device, in pieces of any size, and the plan's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import OFFLOAD_WINDOWS, fullest
from stoker.pod.plan.model_size import ModelSize
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE, Bucket
from stoker.trainer.rank.communicator import DONE
from stoker.trainer.rank.copy_queues import queues_of
from stoker.trainer.rank.lamb import Lamb
from stoker.trainer.rank.offload import OffloadedUpdate, pieces_of
from stoker.trainer.rank.offloaded_lamb import CurrentPass, OffloadedLamb
from stoker.trainer.rank.optimizer import Adam, HeldState, HostCopy, UpdateNumbers
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.any_order import AnyOrder, QueuedLamb
from testing.trainer.layouts import MODEL, check_bits_across_saves
from testing.trainer.tiny_run import alone, empty_decoder, tiny_config

CPU = torch.device("cpu")


def held(seed: int, device: str = "cpu", on_host: bool = False, wide: bool = False) -> list[HeldState]:
    """Return the state of two buckets, one of which decays in part."""
    found = []
    random = torch.Generator().manual_seed(seed)
    for lines, decayed in ((7, 3), (2, 2)):
        named = [("a", torch.nn.Parameter(torch.empty(decayed, LINE)))]
        named += [(f"b{line}", torch.nn.Parameter(torch.empty(LINE))) for line in range(lines - decayed)]
        values = [torch.randn(lines * LINE, generator=random) for _ in range(4)]
        place = (lambda value: value.pin_memory()) if on_host and device == "cuda" else lambda value: value
        master, first, second = (place(value) if on_host else value.to(device) for value in values[:3])
        found.append(
            HeldState(
                bucket=Bucket("bucket", named, 1),
                start=0,
                master=master.to(device) if wide else master,
                gradient=values[3].to(device),
                exp_avg=first,
                exp_avg_sq=second.square_(),
                parameters=None if wide else torch.zeros(lines * LINE, dtype=torch.bfloat16, device=device),
                copied=HostCopy() if on_host else None,
            )
        )
    return found


def values_of(state: HeldState) -> Iterator[Tensor]:
    if state.copied is not None:
        state.copied.wait()
    for value in (state.master, state.exp_avg, state.exp_avg_sq, state.parameters):
        if value is not None:
            yield value.cpu()


def check_pieces(device: str, kernels: Any, lines: int, wide: bool, spare: int = 0) -> None:
    """`spare`: lines of device memory into which the first pieces of each bucket are read ahead."""
    adam = Adam(OptimizationConfig(weight_decay=0.5), Ops(kernels))
    streamed = OffloadedUpdate(adam, torch.device(device), lines * LINE)
    plain, host = held(1, device, wide=wide), held(1, device, on_host=True, wide=wide)
    done: list[Bucket] = []
    for step, scale in enumerate((1.0, float("nan"), 0.25), start=1):
        numbers = UpdateNumbers(step=step, learning_rate=0.1, scale=torch.tensor(scale, device=device))
        adam.update(plain, numbers, lambda _bucket: None)
        room = [torch.empty(size, device=device) for size in (spare * LINE, spare * LINE - 5) if spare]
        early = [replace(state, early=streamed.read_ahead(state, room, DONE)) for state in host[:1]]
        assert sum(piece.tensors[0].numel() for piece in early[0].early) == early_elements(spare, wide)
        streamed.update(early + host[1:], numbers, done.append)
        if device == "cuda":
            torch.cuda.synchronize()
        for one, other in zip(plain, host, strict=True):
            for expected, found in zip(values_of(one), values_of(other), strict=True):
                assert torch.equal(found, expected)
    assert done == [state.bucket for state in host] * 3


def early_elements(spare: int, wide: bool) -> int:
    """Of the first bucket, 7 lines: whole lines of all rows in two runs, of which one lacks 5 elements."""
    rows = 2 if wide else 3
    return min(7, spare // rows + max(0, spare - 1) // rows) * LINE


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("spare", [1, 4, 7, 40])
def test_pieces_that_were_read_ahead_have_the_bits_of_a_whole_update(spare: int, wide: bool) -> None:
    check_pieces("cpu", "reference", 2, wide, spare)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("lines", [1, 2, 3, 7, 16])
def test_an_update_in_pieces_has_the_bits_of_a_whole_one(lines: int, wide: bool) -> None:
    check_pieces("cpu", "reference", lines, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
def test_three_lanes_of_a_gpu_give_the_bits_of_one(wide: bool) -> None:
    for lines in (1, 2, 7):
        for spare in (0, 4, 40):
            check_pieces("cuda", "fused", lines, wide, spare)


def test_pieces_cover_each_element_once_and_keep_where_decay_ends() -> None:
    for state in held(2):
        pieces = list(pieces_of(state, 2 * LINE))
        assert torch.equal(torch.cat([piece.master for piece in pieces]), state.master)
        assert sum(piece.decay_end for piece in pieces) == state.decay_end


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_run_with_offload_has_the_bits_of_one_without_and_goes_on_from_its_saves(
    tmp_path: Path, precision: str
) -> None:
    check_bits_across_saves(tmp_path, precision, {"memory__cpu_offload": True})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_lamb_has_the_bits_of_one_without_offload(tmp_path: Path, precision: str) -> None:
    changes = {"optimization__optimizer": "lamb"}
    check_bits_across_saves(tmp_path, precision, {"memory__cpu_offload": True}, **changes)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("by_line", [False, True])
@pytest.mark.parametrize("lines", [1, 2, 16])
def test_lamb_in_pieces_has_the_bits_of_a_whole_update(lines: int, by_line: bool, wide: bool) -> None:
    """Tensors are cut by pieces and end within lines; pieces of the first bucket are read ahead."""
    config = OptimizationConfig(optimizer="lamb", weight_decay=0.5)
    plain, host = held(1, wide=wide), held(1, on_host=True, wide=wide)
    sizes = {id(state.bucket.parameters[0]): (700, state.bucket.parameters[0].numel() - 700) for state in plain + host}
    lamb = Lamb(config, Ops("reference"), lambda _kind, cells: cells, by_line=by_line, sizes=sizes)
    current, queues = CurrentPass(), queues_of(CPU)
    lanes = OffloadedUpdate(current, CPU, lines * LINE, queues)
    streamed = OffloadedLamb(lamb, current, lanes, queues)
    done: list[Bucket] = []
    for step, scale in enumerate((1.0, float("nan"), 0.25), start=1):
        numbers = UpdateNumbers(step=step, learning_rate=0.1, scale=torch.tensor(scale))
        lamb.update(plain, numbers, lambda _bucket: None)
        room = [torch.empty(6 * LINE)]
        early = [replace(state, early=streamed.read_ahead(state, room, DONE)) for state in host[:1]]
        assert early[0].early
        streamed.update(early + host[1:], numbers, done.append)
        for one, other in zip(plain, host, strict=True):
            for expected, found in zip(values_of(one), values_of(other), strict=True):
                assert torch.equal(found, expected)
    assert done == [state.bucket for state in host] * 3


@pytest.mark.parametrize("lines", [1, 16])
@pytest.mark.parametrize("last", ["arriving", "updates", "leaving", "main"])
def test_no_order_of_the_streams_changes_a_bit_of_lamb(last: str, lines: int) -> None:
    """The second pass reads what the first one has written, also where it was read ahead."""
    config = OptimizationConfig(optimizer="lamb", weight_decay=0.5)
    lamb = Lamb(config, Ops("reference"), lambda _kind, cells: cells, by_line=False)
    queues = AnyOrder(lambda ready: next((one for one in ready if one is not getattr(queues, last)), ready[0]))
    current = CurrentPass()
    streamed = OffloadedLamb(
        QueuedLamb(config, queues), current, OffloadedUpdate(current, CPU, lines * LINE, queues), queues
    )
    plain, host = held(1), held(1, on_host=True)
    for step in range(1, 4):
        numbers = UpdateNumbers(step=step, learning_rate=0.1, scale=torch.tensor(0.5))
        lamb.update(plain, numbers, lambda _bucket: None)
        early = [replace(state, early=streamed.read_ahead(state, [torch.empty(6 * LINE)], DONE)) for state in host]
        streamed.update(early, numbers, lambda _bucket: None)
    queues.drain()
    for one, other in zip(plain, host, strict=True):
        for expected, found in zip(values_of(one), values_of(other), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_in_host_memory_and_in_windows_is_what_the_plan_says(precision: str) -> None:
    wide = replace(MODEL, hidden_size=128, intermediate_size=512)
    plans, bytes_there = {}, 0
    for offload in (False, True):
        config = tiny_config(memory__precision=precision, memory__cpu_offload=offload)
        plans[offload] = fullest(Job.from_config(config.model_dump(), ModelSize.from_fields(asdict(wide))))
    decoder, start = empty_decoder(config, CPU, wide)
    zero = make_zero(config, decoder, alone().mesh, CPU, start.fill)
    zero.begin_step(1)
    zero.end_micro_batch()
    zero.finish_reduce()
    zero.update(1, 1e-3, torch.ones(()))
    for state in zero.states:
        kept = state.held()[0 if precision == "bf16" else 1 :]
        bytes_there += sum(tensor.nbytes for tensor in kept)
        assert state.copied is not None
    adam = zero._optimizer
    assert isinstance(adam, OffloadedUpdate)
    windows = sum(tensor.nbytes for window in adam._windows for tensor in window.tensors)
    zero.close()
    assert len(adam._windows) == OFFLOAD_WINDOWS
    assert plans[True].optimizer == 0
    assert plans[True].host - plans[False].host == pytest.approx(bytes_there, rel=0.05)
    assert plans[True].buffers - plans[False].buffers == pytest.approx(windows, rel=0.05)
    assert plans[False].total - plans[True].total == pytest.approx(bytes_there - windows, rel=0.1)
