"""The agreement of data-parallel ranks on their steps, as a pure state machine and over sockets."""

from __future__ import annotations

import random
import socket
import time
from collections import deque

import msgpack
import pytest

from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.link import Link
from stoker.engine.ranks.step_links import LEFT_S, StepLinks
from stoker.engine.ranks.step_rounds import Proposal, RanksParted, StepRound, StepRounds
from stoker.engine.ranks.watch import RankLimits


def test_ranks_agree_on_the_same_steps_in_any_order_of_messages() -> None:
    """Messages of one rank to another keep their order; ranks with work ask by themselves, the others when asked."""
    for seed in range(200):
        check_history(seed)


def check_history(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    ranks = [StepRounds(rank, size) for rank in range(size)]
    todo = [draw.choice((0, 1, 7)) for _ in range(size)]
    steps = max(todo)
    wires: dict[tuple[int, int], deque[Proposal]] = {
        (one, other): deque() for one in range(size) for other in range(size) if one != other
    }
    begun: list[list[StepRound]] = [[] for _ in range(size)]
    asked = [False] * size
    while any(len(found) < steps for found in begun):
        rank, wire = draw.randrange(size), draw.choice(list(wires))
        if wires[wire] and draw.random() < 0.7:
            ranks[wire[1]].hear(wires[wire].popleft())
        if not asked[rank] and (len(begun[rank]) < todo[rank] or ranks[rank].wanted):
            proposal = ranks[rank].propose(draw.randint(1, 9) if len(begun[rank]) < todo[rank] else 0)
            asked[rank] = True
            for other in set(range(size)) - {rank}:
                wires[rank, other].append(proposal)
        if (found := ranks[rank].take()) is not None:
            begun[rank].append(found)
            asked[rank] = False
    assert all(found == begun[0] for found in begun)
    assert [found.number for found in begun[0]] == list(range(steps))
    assert not any(rank.wanted for rank in ranks)


@pytest.mark.parametrize(
    ("heard", "wrong", "text"),
    [
        ([], 1, "data rank 1 asks for step 1, its next one is 0"),
        ([0], 0, "data rank 1 asks for step 0, its next one is 1"),
        ([0], 1, "data rank 1 asks for step 1, although step 0 has not begun"),
    ],
)
def test_a_rank_out_of_step_is_named(heard: list[int], wrong: int, text: str) -> None:
    rounds = StepRounds(0, 3)
    for number in heard:
        rounds.hear(Proposal(1, number, 4))
    with pytest.raises(RanksParted, match=text):
        rounds.hear(Proposal(1, wrong, 4))


def linked(limits: RankLimits = RankLimits()) -> tuple[StepLinks, StepLinks]:  # noqa: B008 - frozen
    ours, theirs = socket.socketpair()
    return StepLinks(0, 2, {1: Link(ours)}, limits=limits), StepLinks(1, 2, {0: Link(theirs)})


def test_a_rank_that_leaves_is_missed_by_the_next_step_and_soon_by_idle_ones() -> None:
    first, second = linked()
    second.close()
    with pytest.raises(ExecutorLost, match="data rank 1 has ended before step 0"):
        first.agree(3)
    first.clock = lambda: time.monotonic() + LEFT_S
    with pytest.raises(ExecutorLost, match="data rank 1 has ended"):
        first.check()
    first.close()


def test_a_rank_that_begins_no_step_is_named() -> None:
    first, second = linked(RankLimits(step_s=0.01))
    second.rounds.number = first.rounds.number = 1
    with pytest.raises(ExecutorLost, match=r"data rank 1 has not begun step 1 for \d+ s"):
        first.agree(3)
    with second._changed:
        assert second._changed.wait_for(lambda: second.rounds.wanted, 240)
    first.close()
    second.close()


def test_what_no_rank_says_ends_the_links() -> None:
    ours, theirs = socket.socketpair()
    links, other = StepLinks(0, 2, {1: Link(ours)}), Link(theirs)
    other.send(msgpack.packb(["asks", 1, 5, 2]))
    with pytest.raises(ExecutorLost, match="data rank 1 asks for step 5, its next one is 0"):
        links.agree(1)
    links.close()
    other.close()
