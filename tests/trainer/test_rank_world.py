"""The harness of several ranks: it names a rank that fails, hangs or dies, and the next call works."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from testing.trainer.rank_world import RankWorld


def rank_of(held: tuple[int, int]) -> int:
    return held[0]


def only_one_enters(held: tuple[int, int]) -> None:
    if held[0] == 0:
        raise ValueError("the disk is full")
    dist.barrier()


def wait_in_vain(held: tuple[int, int]) -> None:
    if held[0] == 1:
        dist.barrier()


def die(held: tuple[int, int]) -> None:
    if held[0] == 1:
        os._exit(3)


def network_threads_after_more_groups(_held: tuple[int, int]) -> int:
    for _ in range(3):
        group: Any = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
    return [task.read_text() for task in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop\n")


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2) as world:
        yield world


def test_all_groups_of_a_rank_share_one_network_thread(world: RankWorld) -> None:
    assert world.call(network_threads_after_more_groups) == [1, 1]


def test_a_rank_that_waits_for_one_that_failed_is_shown_where_it_stands(world: RankWorld) -> None:
    assert world.call(rank_of) == [0, 1]
    with pytest.raises(AssertionError) as failure:
        world.call(only_one_enters, timeout_s=500.0)
    text = str(failure.value)
    assert "rank 0 Traceback" in text
    assert "ValueError: the disk is full" in text
    assert "rank 1 gave no answer within 500 s, stands at barrier (" in text


def test_a_call_ends_in_its_time_and_the_next_one_has_fresh_ranks(world: RankWorld) -> None:
    world.call(rank_of)  # imports what the next call needs
    with pytest.raises(AssertionError, match=r"rank 0 answered\nrank 1 gave no answer within 5 s, stands at barrier"):
        world.call(wait_in_vain, timeout_s=5.0)
    with pytest.raises(AssertionError, match="rank 1 ended with exit code 3"):
        world.call(die)
