"""Rendezvous, timeouts and the end of process groups."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.channel import RankChannel
from stoker.trainer.rank.communicator import nccl_options
from stoker.trainer.rank.host_group import new_host_group
from stoker.trainer.rank.main import make_rank_context
from stoker.trainer.rank.process_group import collective_timeout, order_launches, process_group
from stoker.trainer.rank.rank_info import RankInfo
from stoker.trainer.rank.run_inputs import RunInputs, check_agreement
from stoker.trainer.rank.save_group import make_save_group
from testing.forked import forked
from testing.free_port import free_port
from testing.trainer.rank_world import RankWorld, run_ranks
from testing.trainer.tiny_run import TINY, SyntheticBatches, data_parallel, empty_decoder, tiny_config


def fails_inside(rank: int, port: int) -> bool:
    """Return whether the group still stands after an error."""
    info = RankInfo(rank, 2, 2, "127.0.0.1", port)
    with contextlib.suppress(KeyError), process_group(tiny_config(), info, torch.device("cpu"), None):
        raise KeyError
    return dist.is_initialized()


def test_a_rank_that_fails_does_not_wait_for_the_others_to_take_the_group_down() -> None:
    port = free_port()
    with forked().Pool(2) as pool:
        assert pool.starmap(fails_inside, [(0, port), (1, port)]) == [True, True]


def waits_in_vain(rank: int, size: int) -> list[str]:
    """Return the errors of rank 1 when no other rank enters its collectives."""
    dims = data_parallel(size)
    context = make_rank_context(dims, torch.device("cpu"), RankChannel(None), timedelta(seconds=4))
    said = []
    for collective in (
        lambda: context.mesh.world.exchange(torch.zeros(1)),
        lambda: context.save_group.broadcast(None),
    ):
        with contextlib.suppress(RuntimeError):
            if rank == 1:
                collective()
            said.append("entered")
    return said


def test_every_group_of_a_run_has_the_time_that_its_deadlines_leave() -> None:
    """torch's default timeout (10 or 30 minutes) is shorter than a long verification or tokenisation on one rank."""
    assert run_ranks(waits_in_vain, 2) == [["entered", "entered"], []]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
def test_nccl_takes_the_share_of_a_gpu_and_the_time_that_it_is_given() -> None:
    default, tried = nccl_options(16, None, None), nccl_options(8, 2, timedelta(minutes=3))
    assert (default.config.max_ctas, tried.config.max_ctas) == (16, 8)
    assert tried.config.cga_cluster_size == 2 != default.config.cga_cluster_size
    assert tried._timeout == timedelta(minutes=3)


@pytest.mark.parametrize("phase", ["load_s", "first_step_s", "step_s", "save_s", "validation_s"])
def test_a_collective_never_gives_up_before_the_agent(phase: str) -> None:
    assert collective_timeout(tiny_config("unused", **{f"deadlines__{phase}": 7200})) > timedelta(hours=2)


def agrees(held: tuple[int, int], fingerprints: list[str]) -> str:
    rank, size = held
    group = make_save_group(range(size))
    assert group is not None
    config = tiny_config()
    decoder, _ = empty_decoder(config, torch.device("cpu"), TINY)
    inputs = RunInputs(
        model=decoder,
        batches=SyntheticBatches(config),
        files={},
        total_steps=6,
        fingerprint=fingerprints[rank],
    )
    try:
        check_agreement(inputs, group)
    except DataError as error:
        return str(error)
    return ""


def test_ranks_that_read_different_data_are_told_so_before_they_train() -> None:
    """Each pod reads its own mounts.

    Different numbers of steps or targets would hang the run or spoil its weights without an error.
    """
    with RankWorld(2) as world:
        assert world.call(agrees, ["a", "a"]) == ["", ""]
        one, other = world.call(agrees, ["a", "b"])
    assert one == other
    assert one.endswith("rank 0 has corpus a, 6 steps; rank 1 has corpus b, 6 steps")


def sums_beside_a_device(held: tuple[int, int], ranks: list[int]) -> tuple[float, str]:
    """Make a host group while the default group is bound to a GPU, as it is where there is one."""
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, torch.device("cuda", 0)
    try:
        group = new_host_group(ranks)
        values = torch.tensor([float(held[0])])
        if group is not None:
            dist.all_reduce(values, group=group)
        return values.item(), str(default.bound_device_id)
    finally:
        default.bound_device_id = bound


def test_a_group_of_the_host_does_not_split_the_devices_one() -> None:
    """With torch 2.11 ranks outside of such a group waited for ever, with three and more GPUs."""
    with RankWorld(3) as world:
        found = world.call(sums_beside_a_device, [1, 2])
    assert found == [(0.0, "cuda:0"), (3.0, "cuda:0"), (3.0, "cuda:0")]


@pytest.mark.parametrize(
    ("parallelism", "before", "after"),
    [
        ({"tensor": 2, "sequence_parallel": True}, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"tensor": 2, "sequence_parallel": True}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, None),
        ({"tensor": 2}, {}, None),
        ({}, {}, None),
    ],
)
def test_launches_are_ordered_where_tokens_travel_beside_products(
    parallelism: dict[str, object], before: dict[str, str], after: dict[str, str] | None
) -> None:
    environment = dict(before)
    order_launches(tiny_config(parallelism=parallelism), environment)
    assert environment == (before if after is None else after)
