"""Steps on the wire between ranks, and the rules by which a rank counts as lost. No processes."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.execution.pass_shape import PassShape
from stoker.engine.execution.step import Opening, SeatMask, StepInput, StepOutput, TableEntry
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.digests import TokenDigests, extended
from stoker.engine.ranks.failures import StepFailure, StepFailures
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.watch import LISTEN_S, RankLimits, RankWatch
from stoker.engine.ranks.wire import Beat, Capture, Failed, Hello, Join, Ready, Setup, Step, StepFailed, pack, unpack
from stoker.engine.sampling import SamplingParams

NUMBER = st.integers(0, 2**31 - 1)
NUMBERS = st.lists(NUMBER, max_size=4).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=2),
    logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    bad_sequences=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    grammar=st.none() | st.just(OutputGrammar.regex("a+", "structured_outputs.regex")),
)
STEPS = st.builds(
    StepInput,
    number=st.integers(-1, 2**40),
    openings=st.lists(st.builds(Opening, NUMBER, NUMBERS, NUMBER, NUMBER, NUMBERS, PARAMS), max_size=2).map(tuple),
    table=st.lists(st.builds(TableEntry, NUMBER, NUMBER, NUMBER), max_size=3).map(tuple),
    cleared=NUMBERS,
    copies=st.lists(st.tuples(NUMBER, NUMBER), max_size=3).map(tuple),
    seats=NUMBERS,
    starts=NUMBERS,
    lengths=NUMBERS,
    scored=NUMBERS,
    sample_chunks=NUMBERS,
    sample_seats=NUMBERS,
    masks=st.lists(st.builds(SeatMask, NUMBER, st.binary(max_size=4)), max_size=2).map(tuple),
)
PLAN = EnginePlan("/m", None, "cpu", torch.bfloat16, "reference", "sdpa", False, 1, 4, 100, 160, 64, 8, 2)


MESSAGES = [
    Setup(PLAN, 4711, "127.0.0.1"),
    Join(2, 77, "chat-main-a-0-1", "0.1.0"),
    Capture(PassShape(8, 8, 0, samples=False)),
    Hello(None),
    Hello(3),
    Ready(),
    Beat(3, 2, 1),
    StepFailed(7, 12, "no"),
    Failed("no"),
]


@given(step=STEPS)
def test_a_step_arrives_as_it_was_sent(step: StepInput) -> None:
    assert unpack(pack(Step(step))) == Step(step)


@pytest.mark.parametrize("message", MESSAGES)
def test_other_messages_arrive_as_they_were_sent(message: object) -> None:
    assert unpack(pack(message)) == message  # type: ignore[arg-type]


def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    one, other = map(Link, socket.socketpair())
    frames = [bytes(length) for length in (0, 1, 65536, 3_000_000, 5)]
    sender = threading.Thread(target=lambda: list(map(one.send, frames)))
    sender.start()
    assert [other.receive() for _ in frames] == frames
    sender.join()
    assert list(other.arrived()) == []
    one.send(b"last")
    one.close()
    assert list(other.arrived()) == [b"last"]
    with pytest.raises(LinkClosed):
        list(other.arrived())
    with pytest.raises(LinkClosed):
        other.receive()
    other.close()


def output(*tokens: int, valid: bool = True) -> StepOutput:
    return StepOutput(0, tokens, (valid,) * len(tokens), (None,) * len(tokens), ())


@given(
    steps=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12),
    reports=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 12)), max_size=12),
    wrong=st.none() | st.integers(0, 11),
)
def test_a_rank_with_other_tokens_is_found_as_soon_as_both_know_them(
    steps: list[list[int]], reports: list[tuple[int, int]], wrong: int | None
) -> None:
    """Rank 2 may have another token in step `wrong`; ranks report at any time, also before rank 0 has read."""
    digests = TokenDigests()
    theirs = {1: [0], 2: [0]}
    for number, tokens in enumerate(steps):
        theirs[1].append(extended(theirs[1][-1], output(*tokens)))
        theirs[2].append(extended(theirs[2][-1], output(*tokens, 99) if number == wrong else output(*tokens)))
    reported = {1: 0, 2: 0}
    for tokens, (rank, done) in zip(steps, [*reports, *[(1, 0)] * len(steps)], strict=False):
        digests.read(output(*tokens))
        reported[rank] = max(reported[rank], min(done, len(steps)))
        digests.report(rank, reported[rank], theirs[rank][reported[rank]])
        digests.differing(3)
    for rank in (1, 2):
        digests.report(rank, len(steps), theirs[rank][-1])
    found = digests.differing(3)
    assert set(found) == ({2} if wrong is not None and wrong < len(steps) else set())


def test_tokens_of_logits_that_are_not_finite_do_not_count() -> None:
    assert extended(0, output(3, valid=False)) == extended(0, output(4, valid=False)) != extended(0, output(3))


def watching(size: int = 3, **limits: float) -> RankWatch:
    watch = RankWatch(size, RankLimits(**limits))
    for rank in range(1, size):
        watch.heard(rank).ready = True
    return watch


def judged(watch: RankWatch, now_s: float) -> str | None:
    """The verdict after the watch has settled."""
    watch.verdict(now_s)
    return watch.verdict(now_s + 1)


def passed(watch: RankWatch, seconds: float, begin_s: float = 0.0) -> None:
    """Let time pass in which the watch runs and no rank is heard."""
    for tick in range(int(seconds / LISTEN_S) + 1):
        watch.listen(begin_s + tick * LISTEN_S)


def test_healthy_ranks_are_left_alone() -> None:
    watch = watching()
    passed(watch, 10)
    assert judged(watch, 10) is None


def test_a_killed_rank_is_named_before_those_that_fail_because_of_it() -> None:
    watch = watching()
    watch.failed(1, "RuntimeError: connection closed by peer", 5.0)
    watch.ranks[1].exit_code = 1
    assert watch.verdict(5.0) is None, "the first sign may be a consequence"
    watch.ranks[2].exit_code = -9
    assert judged(watch, 5.1) == "rank 2 was killed by signal 9"


def test_of_several_errors_the_first_is_named() -> None:
    watch = watching()
    watch.failed(0, "RuntimeError: connection reset", 5.2)
    watch.failed(2, "OutOfMemoryError: no memory", 5.0)
    watch.failed(2, "another", 5.1)
    watch.ranks[2].exit_code = 1
    assert judged(watch, 6) == "rank 2: OutOfMemoryError: no memory"


def test_a_rank_that_ends_without_a_word_is_named() -> None:
    watch = watching()
    watch.ranks[1].exit_code = 3
    assert judged(watch, 1) == "rank 1 ended with code 3"


def test_a_silent_rank_is_named_and_a_loading_one_gets_more_time() -> None:
    watch = watching(silent_s=20, silent_loading_s=60)
    watch.ranks[2].ready = False
    passed(watch, 19)
    assert judged(watch, 19) is None
    watch.heard(1)
    passed(watch, 30, begin_s=19)
    assert judged(watch, 49) == "rank 1 is silent for 30 s"
    watch.heard(1)
    passed(watch, 15, begin_s=49)
    assert judged(watch, 64) == "rank 2 is silent for 64 s"


def test_time_in_which_the_watch_did_not_run_accuses_nobody() -> None:
    watch = watching(silent_s=20)
    watch.listen(0)
    watch.listen(3600)
    assert judged(watch, 3600) is None


def test_a_step_that_does_not_end_is_a_loss_and_says_where_each_rank_is() -> None:
    watch = watching(step_s=100)
    watch.ranks[1].begun, watch.ranks[2].begun = 8, 7
    watch.step_since_s = 10
    assert judged(watch, 100) is None
    assert judged(watch, 111) == "a step has not ended in 102 s; steps: rank 1 has begun 8, rank 2 has begun 7"


def test_other_tokens_are_a_loss() -> None:
    watch = watching()
    watch.differing = {2: 40}
    assert judged(watch, 1) == "rank 2 has sampled other tokens than rank 0 in one of its first 40 steps"


@given(
    size=st.integers(2, 4),
    reports=st.permutations(range(4)),
    absent=st.none() | st.integers(0, 3),
    elsewhere=st.none() | st.integers(0, 3),
    number=st.integers(1, 9),
)
def test_ranks_go_on_only_if_all_failed_in_the_same_place(
    size: int, reports: list[int], absent: int | None, elsewhere: int | None, number: int
) -> None:
    failures = StepFailures(size, patience_s=5)
    ranks = [rank for rank in reports if rank < size and rank != absent]
    for when, rank in enumerate(ranks):
        assert not failures.settled(number)
        failures.report(rank, number, StepFailure(3 + (rank == elsewhere), f"error of {rank}", when))
        failures.report(rank, number + 1, StepFailure(9, "later", when))
    in_step = len(ranks) == size and (elsewhere is None or elsewhere >= size)
    assert failures.parted(4) is None
    lost = failures.parted(6)
    assert (lost is None) == (in_step or not ranks)
    if lost is not None and not in_step and len(ranks) == size:
        assert f"error of {ranks[0]}" in lost
    assert failures.settled(number) is in_step
    assert not failures.settled(number), "it is forgotten"


def test_a_rank_that_failed_where_others_did_not_is_named() -> None:
    watch = watching()
    watch.parted = "rank 1: ValueError: no"
    assert judged(watch, 1) == "rank 1: ValueError: no"


def test_a_step_that_failed_on_all_ranks_counts_for_digests() -> None:
    digests = TokenDigests()
    digests.read(output(3))
    digests.skip()
    digests.read(output(4))
    digests.report(1, 2, extended(0, output(3)))
    assert not digests.differing(2)
    digests.report(1, 3, extended(extended(0, output(3)), output(4)))
    assert not digests.differing(2)
    digests.report(1, 3, extended(0, output(4)))
    assert digests.differing(2) == {1: 3}
