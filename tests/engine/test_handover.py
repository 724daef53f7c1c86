"""Prefill at one engine, decode at another, in one process: the answer is that of one undisturbed engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stoker.engine.core.handover.messages import HANDOVER_PROTOCOL, BlocksReady, Cancel, PeerHello, Tokens
from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import AddRequest
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.in_process import Network
from testing.engine.audits import assert_sound
from testing.engine.stations import FACTS, Clock, Mail, Station

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


def test_the_prefill_engine_gets_class_and_priority_too(pair: Pair) -> None:
    request = AddRequest("r", PROMPT, SamplingParams(seed=1), 0.0, priority=7, prefill="p:1", place=2)
    pair.d.ask(request)
    seen: set[tuple[str, int, int]] = set()
    for _ in range(400):
        for station in (pair.d, pair.p):
            seen |= {(station.name, one.place, one.priority) for one in station.engine.requests.values()}
        if pair.d.idle and pair.p.idle:
            break
        pair.turn()
    assert seen == {("d:1", 2, 7), ("p:1", 2, 7)}
    pair.run()
    pair.assert_right(request)


@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_a_split_answer_is_that_of_one_engine(pair: Pair, kind: str) -> None:
    request = pair.ask(**PARAMS[kind])
    pair.run()
    outcome = "prefill_only" if kind == "one token" else "split"
    assert pair.d.tally.outcomes[outcome] == 1, pair.d.tally
    assert pair.d.tally.blocks["received"] == 9
    pair.assert_right(request)


def test_the_prefill_engine_counts_what_it_computes_for_others(pair: Pair) -> None:
    """Its fronts have none of these requests, so an autoscaler would take it for idle."""
    for name, first in (("r", 200), ("s", 201)):
        request = pair.ask(name, prompt=(first, *PROMPT), **PARAMS["greedy"])
        pair.run()
        pair.assert_right(request)
    counted = LoadCounters.from_wire(pair.p.desk.stats().load)
    assert (counted.arrived, counted.first_tokens, counted.first_token_s.total) == (2, 2, 2)
    assert counted.uncached.total == counted.output.total == 2
    assert counted.uncached.moment() == counted.prompt.moment() == pytest.approx(40, rel=0.06)
    assert counted.output.moment() < 12, "the rest is decoded by the owner"
    assert LoadCounters.from_wire(pair.d.desk.stats().load).arrived == 0


def test_a_prompt_longer_than_the_zone_gets_more_credits(make_engine: Callable[..., Any]) -> None:
    pair = Pair(make_engine, slots=2)
    request = pair.ask(**PARAMS["greedy"])
    pair.run()
    assert pair.d.tally.outcomes["split"] == 1
    pair.assert_right(request)


def test_prompts_that_wait_for_their_turn_do_not_fill_the_owner(make_engine: Callable[..., Any]) -> None:
    """Else an engine that is busy with prompts would compute those of its helpers, too."""
    pair = Pair(make_engine, num_blocks=200)
    own = [AddRequest(f"own {n}", (n, *range(60, 120)), SamplingParams(**PARAMS["greedy"]), 0.0) for n in range(4)]
    for request in own:
        pair.d.ask(request)
    assert pair.d.engine.scheduler.waiting
    request = pair.ask(**PARAMS["greedy"])
    pair.run()
    assert pair.d.tally.outcomes["split"] == 1, pair.d.tally
    pair.assert_right(request)


def test_a_stream_that_is_taken_over_passes_a_long_prompt(make_engine: Callable[..., Any]) -> None:
    """Its blocks are there, so what is missing is much shorter than that prompt, though its own is not."""
    pair = Pair(make_engine, num_blocks=200, budget=16, seats=8)
    request = pair.ask(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
    until_streaming(pair)
    long = AddRequest("long", tuple(range(100, 176)), SamplingParams(**PARAMS["greedy"]), pair.clock())
    pair.d.ask(long)
    pair.d.engine.step()
    while pair.d.tally.outcomes["split"] == 0:
        pair.turn()
    before = len(pair.d.answers["r"][0].tokens)
    while not pair.d.answers["long"][0].tokens:
        pair.turn()
    assert len(pair.d.answers["r"][0].tokens) > before + 1, "one came with the long prompt's end"
    pair.run()
    pair.assert_right(request)


def test_blocks_that_the_owner_has_are_not_sent(pair: Pair) -> None:
    pair.ask("first", **PARAMS["greedy"])
    pair.run()
    request = pair.ask("second", (*PROMPT[:20], *range(100, 119)), **PARAMS["greedy"])
    pair.run()
    assert pair.d.tally.blocks["received"] == 9 + 4
    pair.assert_right(request)


def test_blocks_are_handed_over_within_a_salt_alone(pair: Pair) -> None:
    """Neither side uses what it has of another salt; the blocks that come are found by requests with the same one."""
    for number, (salt, length) in enumerate([("a", 39), ("b", 39), (None, 39), ("a", 35), ("b", 35)]):
        request = pair.ask(f"r{number}", PROMPT[:length], **PARAMS["greedy"], cache_salt=salt)
        pair.run()
        pair.assert_right(replace(request, params=replace(request.params, cache_salt=f"{number}")))
    assert (pair.d.tally.outcomes["split"], pair.d.tally.blocks["received"]) == (3, 3 * 9)
    assert pair.d.tally.reasons["short"] == 2, "it has them already"
    assert pair.p.engine.stats().prefix_hits == 0


def until_streaming(pair: Pair, name: str = "r") -> None:
    """Let P stream while D has no seat, so that nothing is taken over."""
    pair.d.engine.scheduler._free_seats, kept = [], pair.d.engine.scheduler._free_seats
    for _ in range(12):
        pair.turn()
    pair.d.engine.scheduler._free_seats = kept
    assert pair.d.desk.num_open == 1
    assert len(pair.d.answers[name][0].tokens) > 2


def test_p_decodes_on_while_d_has_no_seat(pair: Pair) -> None:
    request = pair.ask(**PARAMS["two sampled choices"])
    until_streaming(pair)
    pair.run()
    assert pair.d.tally.outcomes["split"] == 1
    assert pair.p.tally.helps["handed"] == 1
    pair.assert_right(request)


class TestFailures:
    """The events of the failure table, by its rows."""

    def kill_p(self, pair: Pair) -> None:
        pair.p.kill()
        pair.d.notice_death(pair.p)

    def assert_local(self, pair: Pair, request: AddRequest, reason: str) -> None:
        assert (pair.d.tally.outcomes["local"], pair.d.tally.reasons[reason]) == (1, 1), pair.d.tally
        pair.assert_right(request)

    def test_p_dies_before_the_first_token(self, pair: Pair) -> None:
        request = pair.ask(**PARAMS["greedy"])
        while not (received := pair.d.tally.blocks["received"]):
            pair.turn()
        self.kill_p(pair)
        pair.run()
        assert received < 9
        self.assert_local(pair, request, "lost")

    def test_p_dies_while_it_streams(self, pair: Pair) -> None:
        request = pair.ask(**PARAMS["two sampled choices"])
        until_streaming(pair)
        self.kill_p(pair)
        pair.run()
        self.assert_local(pair, request, "lost")

    def test_d_dies_and_p_frees_everything(self, pair: Pair) -> None:
        pair.ask(**PARAMS["greedy"])
        until_streaming(pair)
        pair.d.kill()
        for _ in range(5):
            pair.turn()
        assert pair.p.idle
        assert pair.p.tally.helps["cancelled"] == 1
        audit = pair.p.engine.scheduler.audit()
        assert_sound(audit)
        assert audit.owned == 0

    def test_the_link_is_cut_while_both_live(self, pair: Pair) -> None:
        request = pair.ask("r", tuple(range(40, 140)), **PARAMS["greedy"])
        while not pair.d.tally.blocks["received"]:
            pair.turn()
        pair.mail.cut.add(frozenset(("d:1", "p:1")))
        pair.turn()
        pair.turn(6.0)
        pair.run()
        self.assert_local(pair, request, "silent")
        assert pair.p.tally.helps["cancelled"] == 1

    @pytest.mark.parametrize("times", [1, 2, 9])
    def test_a_block_has_a_wrong_checksum(self, pair: Pair, times: int) -> None:
        """Once: it is sent again. Twice: the rest is computed here. More often: the peer is not used for a while."""
        damages = [times]

        def damage(message: Any) -> Any:
            if isinstance(message, BlocksReady) and damages[0]:
                damages[0] -= 1
                first, *rest = message.blocks
                return BlocksReady(message.id, (first._replace(sum=first.sum ^ 1), *rest))
            return message

        pair.mail.tamper = damage
        request = pair.ask(**PARAMS["greedy"])
        pair.run()
        if times == 1:
            assert pair.d.tally.outcomes["split"] == 1
            pair.assert_right(request)
        else:
            self.assert_local(pair, request, "damaged")
        assert pair.d.zone.zone.refused["damaged"] == min(times, 2)

    def test_three_damaged_blocks_within_a_minute_close_the_link_for_a_minute(self, pair: Pair) -> None:
        def damage(message: Any) -> Any:
            if isinstance(message, BlocksReady):
                return BlocksReady(message.id, tuple(one._replace(sum=one.sum ^ 1) for one in message.blocks))
            return message

        pair.mail.tamper = damage
        pair.ask(**PARAMS["greedy"])
        pair.run()
        assert pair.d.desk.stats().avoided == {"p:1": "damaged: 3 damaged blocks within 60 s"}
        pair.mail.tamper = lambda message: message
        soon = pair.ask("soon", tuple(range(90, 129)), **PARAMS["greedy"])
        pair.run()
        assert (pair.d.tally.reasons["damaged"], pair.d.tally.outcomes["split"]) == (2, 0)
        pair.turn(61.0)
        later = pair.ask("later", tuple(range(130, 169)), **PARAMS["greedy"])
        pair.run()
        assert (pair.d.tally.outcomes["split"], pair.d.desk.stats().avoided) == (1, {})
        for request in (soon, later):
            pair.assert_right(request)

    def test_a_stale_generation_is_refused(self, pair: Pair) -> None:
        def age(message: Any) -> Any:
            if isinstance(message, BlocksReady):
                older = (one._replace(generation=one.generation - 1) for one in message.blocks)
                return BlocksReady(message.id, tuple(older))
            return message

        pair.mail.tamper = age
        request = pair.ask(**PARAMS["greedy"])
        pair.run()
        assert pair.d.zone.zone.refused["stale"] == 8  # each slot once
        assert pair.d.tally.outcomes["prefill_only"] == 1  # without blocks there is no takeover: P goes on
        pair.assert_right(request)

    @pytest.mark.parametrize("choice", [-9, 7])
    def test_tokens_of_a_choice_that_there_is_not_end_the_help_and_not_the_engine(
        self, pair: Pair, choice: int
    ) -> None:
        def tamper(message: Any) -> Any:
            if isinstance(message, Tokens):
                return Tokens(message.id, tuple(part._replace(choice=choice) for part in message.parts))
            return message

        pair.mail.tamper = tamper
        request = pair.ask(**PARAMS["greedy"])
        pair.run()
        self.assert_local(pair, request, "lost")

    def test_blocks_of_a_request_that_is_over_are_refused(self, pair: Pair) -> None:
        kept: list[Any] = []

        def keep(message: Any) -> Any:
            kept.extend([message] if isinstance(message, BlocksReady) else [])
            return message

        pair.mail.tamper = keep
        pair.ask(**PARAMS["greedy"])
        pair.run()
        pair.mail.send("p:1", "d:1", "p:1", kept[0])
        pair.turn()
        assert pair.d.zone.zone.refused["stale"] + pair.d.zone.zone.refused["late"] == len(kept[0].blocks)

    def test_p_refuses(self, pair: Pair) -> None:
        pair.p.engine.scheduler.max_queued_requests = 0
        request = pair.ask(**PARAMS["greedy"])
        pair.run()
        self.assert_local(pair, request, "refused")
        assert pair.p.tally.helps["refused"] == 1

    def test_d_is_full(self, make_engine: Callable[..., Any]) -> None:
        pair = Pair(make_engine, num_blocks=22)
        first = pair.ask("first", max_tokens=40, temperature=0.0, seed=1, ignore_eos=True)
        for _ in range(3):
            pair.turn()
        second = pair.ask("second", (*range(120, 170),), **PARAMS["greedy"])
        pair.run()
        assert pair.d.tally.reasons["full"] == 1
        pair.assert_right(first)
        pair.assert_right(second)

    def test_the_client_is_gone(self, pair: Pair) -> None:
        pair.ask(**PARAMS["two sampled choices"])
        until_streaming(pair)
        pair.d.abort("r")
        assert [answer.ends for answer in pair.d.answers["r"]] == [[("abort", None)], [("abort", None)]]
        pair.run()
        assert (pair.d.tally.outcomes["cancelled"], pair.p.tally.helps["cancelled"]) == (1, 1)
        pair.assert_clean()

    @pytest.mark.parametrize("cause", ["cancelled twice", "given up by P"])
    def test_slots_are_not_free_while_p_still_writes_them(self, pair: Pair, cause: str) -> None:
        pair.network.holds = True
        pair.ask(**PARAMS["two sampled choices"])
        while not pair.network.posted:
            pair.turn()
        if cause == "cancelled twice":
            (dispatch,) = pair.d.desk.decode.open
            pair.d.abort("r")
            pair.d.desk.office.post.call("p:1", Cancel(dispatch, "once more"))
        else:
            pair.p.send_all(pair.p.engine.end_everything("abort"))
        for _ in range(5):
            pair.turn()
        written = sum(len(write.cells) for write in pair.network.posted)
        assert pair.d.zone.zone.credits <= pair.d.zone.num_slots - written
        pair.network.holds = False
        while pair.network.posted:
            pair.network.deliver(pair.network.posted.pop())
        pair.run()
        assert pair.d.zone.zone.refused["late"] == written
        pair.assert_clean()

    def test_a_stop_text_ends_one_choice_while_p_streams(self, pair: Pair) -> None:
        request = pair.ask(**PARAMS["two sampled choices"])
        until_streaming(pair)
        assert pair.d.desk.finish_choice("f0", "r", 0)
        before = list(pair.d.answers["r"][0].tokens)
        pair.run()
        whole = undisturbed(pair.alone, request)
        assert pair.d.answers["r"][0].tokens == before
        assert pair.d.answers["r"][1].tokens == whole[1].tokens
        pair.assert_clean()

    def test_the_fingerprint_differs(self, pair: Pair) -> None:
        other = replace(FACTS, revision="2")
        pair.p = pair.station("p:1", facts=other)
        request = pair.ask(**PARAMS["greedy"])
        for _ in range(30):
            pair.turn()
        self.assert_local(pair, request, "incompatible")
        again = pair.ask("again", tuple(range(90, 129)), **PARAMS["greedy"])
        assert pair.d.tally.reasons["incompatible"] == 2  # not tried again for a while
        assert pair.d.desk.stats().avoided == {"p:1": "incompatible: revision is 1 here and 2 there"}
        pair.run()
        pair.assert_right(again)

    def test_the_protocol_differs(self, pair: Pair) -> None:
        """As between an engine of before an upgrade and one of after it."""
        pair.d = pair.station("d:1", hello=partial(PeerHello, protocol=HANDOVER_PROTOCOL - 1))
        self.assert_not_of_one_protocol(pair, pair.ask(**PARAMS["greedy"]))

    def test_the_protocol_differs_and_p_does_not_look(self, pair: Pair) -> None:
        request = pair.ask(**PARAMS["greedy"])
        pair.d.desk.decode.read("p:1", replace(pair.p.desk.office.hello, protocol=HANDOVER_PROTOCOL - 1))
        self.assert_not_of_one_protocol(pair, request)

    def assert_not_of_one_protocol(self, pair: Pair, request: AddRequest) -> None:
        for _ in range(30):
            pair.turn()
        self.assert_local(pair, request, "incompatible")
        (why,) = pair.d.desk.stats().avoided.values()
        assert "protocol" in why
        assert str(HANDOVER_PROTOCOL - 1) in why

    def test_no_transport_reaches_d(self, pair: Pair) -> None:
        pair.network.ports.pop("d:1/1")
        request = pair.ask(**PARAMS["greedy"])
        pair.run()
        self.assert_local(pair, request, "transport")

    def test_p_is_used_again_once_a_transport_reaches_d(self, pair: Pair) -> None:
        port = pair.network.ports.pop("d:1/1")
        pair.ask("first", **PARAMS["greedy"])
        pair.run()
        pair.network.ports["d:1/1"] = port
        soon = pair.ask("soon", tuple(range(90, 129)), **PARAMS["greedy"])
        pair.run()
        assert pair.d.tally.reasons["transport"] == 2  # not tried for a while
        pair.turn(61.0)
        later = pair.ask("later", tuple(range(130, 169)), **PARAMS["greedy"])
        pair.run()
        assert pair.d.tally.outcomes["split"] == 1
        for request in (soon, later):
            pair.assert_right(request)

    def test_p_drains(self, pair: Pair) -> None:
        request = pair.ask(**PARAMS["greedy"])
        until_streaming(pair)
        pair.p.send_all(pair.p.engine.end_everything("abort"))
        pair.run()
        self.assert_local(pair, request, "refused")

    def test_p_was_started_anew_and_does_not_know_d(self, pair: Pair) -> None:
        pair.ask("first", **PARAMS["greedy"])
        pair.run()
        pair.p = pair.station("p:1", epoch=2)
        request = pair.ask("second", tuple(range(90, 129)), **PARAMS["greedy"])
        pair.run()
        assert pair.d.tally.reasons["refused"] == 1
        third = pair.ask("third", tuple(range(130, 169)), **PARAMS["greedy"])
        pair.run()
        assert pair.d.tally.outcomes["split"] == 2
        for one in (request, third):
            pair.assert_right(one)

    def test_there_is_no_p(self, pair: Pair) -> None:
        pair.mail.alive.discard("p:1")
        request = pair.ask(**PARAMS["greedy"])
        pair.turn(3.0)
        pair.run()
        self.assert_local(pair, request, "unreachable")

    @pytest.mark.parametrize(
        ("name", "more", "reason"),
        [("nonsense", {}, "unreachable"), ("p:0", {}, "unreachable"), ("p:1", {"prompt_logprobs": 1}, "unsupported")],
    )
    def test_what_cannot_be_split_is_computed_here(self, pair: Pair, name: str, more: Any, reason: str) -> None:
        params = SamplingParams(**PARAMS["greedy"], **more)
        request = AddRequest("r", PROMPT, params, 0.0, prefill=name)
        pair.d.ask(request)
        pair.run()
        self.assert_local(pair, request, reason)

    def test_a_prompt_that_is_known_needs_no_help(self, pair: Pair) -> None:
        pair.ask("first", **PARAMS["greedy"])
        pair.run()
        request = pair.ask("again", PROMPT[:30], **PARAMS["greedy"])
        pair.run()
        self.assert_local(pair, request, "short")

    def test_a_request_that_no_engine_takes_is_refused_at_once(self, pair: Pair) -> None:
        pair.d.ask(AddRequest("r", tuple(range(1, 170)), SamplingParams(seed=1), 0.0, prefill="p:1"))
        assert pair.d.refusals["r"].kind == "too_long"
        assert pair.d.idle
