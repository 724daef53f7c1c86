"""A request that breaks every step in which it takes part, on every rank."""

from __future__ import annotations

from dataclasses import replace

from stoker.engine.core.engine import LLMEngine
from stoker.engine.execution.executor import Executor, PendingOutput, RankState
from stoker.engine.execution.step import SeatMask, StepInput
from stoker.engine.sampling import SamplingParams

BAD = SamplingParams(temperature=0.7, seed=3, max_tokens=4, ignore_eos=True, stop_token_ids=(77,))
"""Its stop token is the mark by which it is known."""
GOOD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Poisoning:
    """An executor whose steps get a mask of a wrong length for the seat of the bad request: sampling raises."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.bad_seats: set[int] = set()

    def submit(self, step: StepInput) -> PendingOutput:
        for opening in step.openings:
            (self.bad_seats.add if 77 in opening.stop_tokens else self.bad_seats.discard)(opening.seat)
        bad = tuple(SeatMask(seat, b"\1") for seat in step.sample_seats if seat in self.bad_seats)
        return self.executor.submit(replace(step, masks=(*step.masks, *bad)))

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        return self.executor.capture_next_graph(wanted=wanted)

    def check(self) -> None:
        self.executor.check()

    def rank_states(self) -> tuple[RankState, ...]:
        return self.executor.rank_states()

    def close(self) -> None:
        self.executor.close()


def check_a_bad_request_alone_fails(engine: LLMEngine) -> None:
    """Check that a bad request between two good ones ends with an error, and the others as without it."""
    expected = finished(engine, bad=False)
    executor = engine.executor
    engine.executor = Poisoning(executor)
    try:
        found = finished(engine, bad=True)
    finally:
        engine.executor = executor
    errors = {name: error for name, (_, error) in found.items() if error}
    assert list(errors) == ["bad"]
    assert {name: tokens for name, (tokens, _) in found.items() if name != "bad"} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    engine.executor.check()


def finished(engine: LLMEngine, *, bad: bool) -> dict[str, tuple[list[int], str]]:
    """Return tokens and error of each request."""
    engine.add_request("first", [5, 6, 7, 8], GOOD)
    if bad:
        engine.add_request("bad", [9, 10, 11], BAD)
    engine.add_request("last", [12, 13], GOOD)
    found: dict[str, tuple[list[int], str]] = {}
    while engine.has_unfinished:
        for _, delta in engine.step():
            tokens, error = found.get(delta.request_id, ([], ""))
            found[delta.request_id] = ([*tokens, *delta.tokens], error or delta.error or "")
    return found
