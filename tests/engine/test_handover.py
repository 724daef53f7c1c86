"""Prefill at one engine, decode at another, in one process: the answer is that of one undisturbed engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker.engine.core.messages import AddRequest
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.in_process import Network
from testing.engine.audits import assert_sound
from testing.engine.stations import Clock, Mail, Station

PROMPT = tuple(range(40, 79))  # nine full blocks of four and three tokens
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 1},
    "two sampled choices": {"n": 2, "temperature": 1.1, "top_p": 0.9, "seed": 5, "max_tokens": 14},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.7, "repetition_penalty": 1.2, "seed": 9, "max_tokens": 14},
    "scored": {"temperature": 1.0, "logprobs": 3, "seed": 11, "max_tokens": 9},
    "stopped": {"temperature": 1.3, "stop_token_ids": tuple(range(0, 320, 3)), "seed": 3, "max_tokens": 30},
    "one token": {"temperature": 0.0, "max_tokens": 1, "seed": 1},
}
"""How each way to sample is asked for."""


class Pair:
    """Two engines of one deployment, D and P, and a third that nothing disturbs."""

    def __init__(self, make_engine: Callable[..., Any], *, slots: int = 8, **settings: Any) -> None:
        self.clock, self.mail, self.network = Clock(), Mail(), Network()
        self.make_engine, self.settings, self.slots = make_engine, settings, slots
        self.d, self.p = self.station("d:1"), self.station("p:1")
        self.alone = make_engine(**settings)

    def station(self, name: str, **more: Any) -> Station:
        engine = self.make_engine(**{"chunk": 16, **self.settings})
        return Station(name, engine, self.mail, self.network, self.clock, **{"slots": self.slots, **more})

    def ask(self, name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> AddRequest:
        request = AddRequest(name, prompt, SamplingParams(**params), self.clock(), prefill="p:1")
        self.d.ask(request)
        return request

    def turn(self, seconds: float = 0.01) -> None:
        self.clock.now_s += seconds
        for station in (self.d, self.p):
            if station.alive:
                station.turn()

    def run(self, turns: int = 400) -> None:
        """Run until nothing is left to do."""
        for _ in range(turns):
            if self.d.idle and (self.p.idle or not self.p.alive):
                break
            self.turn()
        assert self.d.idle
        for _ in range(20):
            self.turn(1.0)  # quarantines end

    def assert_right(self, request: AddRequest) -> None:
        """The client has what one undisturbed engine gives, once."""
        whole = undisturbed(self.alone, request)
        for got, expected in zip(self.d.answers[request.request_id], whole, strict=True):
            assert (got.tokens, got.ends) == (expected.tokens, expected.ends)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        self.assert_clean()

    def assert_clean(self) -> None:
        """Nothing is held any more, on either side."""
        for station in (one for one in (self.d, self.p) if one.alive):
            audit = station.engine.scheduler.audit()
            assert_sound(audit)
            assert audit.owned == 0
            assert list(station.desk.faults()) == []
            assert station.zone.zone.credits == station.zone.num_slots


def undisturbed(engine: Any, request: AddRequest) -> Any:
    station = Station("alone:1", engine, Mail(), Network(), Clock())
    station.ask(AddRequest("whole", request.prompt_tokens, request.params, 0.0))
    while not station.idle:
        station.turn()
    return station.answers["whole"]


@pytest.fixture
def pair(make_engine: Callable[..., Any]) -> Pair:
    return Pair(make_engine)


@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_a_split_answer_is_that_of_one_engine(pair: Pair, kind: str) -> None:
    request = pair.ask(**PARAMS[kind])
    pair.run()
    outcome = "prefill_only" if kind == "one token" else "split"
    assert pair.d.tally.outcomes[outcome] == 1, pair.d.tally
    assert pair.d.tally.blocks["received"] == 9
    pair.assert_right(request)
