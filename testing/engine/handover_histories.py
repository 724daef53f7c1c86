"""Generated histories of two engines that hand requests over, with everything that can happen to them and their link.

A history is a number: the same one gives the same events. Half of them are of engines on GPUs: writers map the landing
zone, copies end after the call that begins them, and those of a killed writer arrive after its death. Run many with

    python -m testing.engine.handover_histories 1000

Engine, scheduler, blocks, desks, zone and intake are real; model (`digest_runner`), clock, mail and block writes are
made up, so that a thousand take a minute or two.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.messages import AddRequest
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.execution.executor import InProcess
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.in_process import Network
from testing.engine.audits import assert_sound
from testing.engine.digest_runner import DigestRunner
from testing.engine.stations import Answer, Clock, Mail, Station
from testing.engine.tiny_tokenizer import EOS, tokenizer_json

VOCAB, LONGEST, BLOCK = 500, 120, 4
OTHER_BLOCKS = (2, 6, 8)
"""Sizes of blocks beside the common one: a divisor, a multiple, and one that is neither."""
MOST_TURNS = 4000
PROMPT_TOKENS = (3, 70)
GRAMMARS = (
    OutputGrammar.regex("[a-f]{2,30}"),
    OutputGrammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5}),
)
"""Of structured output: what may come next follows from all that came, also at the engine that goes on."""


def make_engine(blocks: int, chunk: int, block_size: int = BLOCK, ranks: int = 1) -> LLMEngine:
    """`blocks`: as many tokens as so many of the common size hold."""
    blocks = blocks * BLOCK // block_size
    runner = DigestRunner(blocks, block_size, VOCAB, ranks)
    scheduler = Scheduler(
        BlockManager(blocks, block_size),
        max_batch_tokens=32,
        max_requests=6,
        max_queued_requests=50,
        chunk_tokens=chunk,
    )
    return LLMEngine(InProcess(runner), scheduler, ModelLimits(VOCAB, LONGEST, (EOS,)), grammars=compiler())


@cache
def compiler() -> GrammarCompiler:
    """One for all engines of this process: it takes longer to make than an engine."""
    return GrammarCompiler(tokenizer_json(), VOCAB, (EOS,))


def some_grammar(chance: random.Random) -> OutputGrammar | None:
    """The grammar of every fifth request."""
    return chance.choice(GRAMMARS) if chance.random() < 0.2 else None


@dataclass
class Asked:
    """A request of a client, and what became of it."""

    request: AddRequest
    station: Station
    aborted: bool = False
    finished: frozenset[int] = frozenset()
    """Choices that the front has ended."""


class History:
    """One run. `run` raises AssertionError where anything is lost, doubled, wrong or left behind."""

    def __init__(self, number: int) -> None:
        self.number, self.chance = number, random.Random(number)
        self.on_devices = self.chance.random() < 0.5
        self.clock, self.mail, self.network = Clock(), Mail(), Network(mapped=self.on_devices)
        self.epochs: Counter[str] = Counter()
        self.d, self.p = self._station("d:1"), self._station("p:1")
        self.asked: list[Asked] = []
        self.events: Counter[str] = Counter({"on devices": int(self.on_devices)})
        self.outcomes: Counter[str] = Counter()

    def _station(self, name: str) -> Station:
        self.epochs[name] += 1
        block_size = self.chance.choice((BLOCK, BLOCK, BLOCK, *OTHER_BLOCKS))
        engine = make_engine(self.chance.choice((30, 60, 200)), self.chance.choice((8, 16, 32)), block_size)
        slots = self.chance.choice((1, 3, 8, 24))
        late = self.chance if self.on_devices else None
        epoch = self.epochs[name]
        return Station(name, engine, self.mail, self.network, self.clock, slots=slots, epoch=epoch, late=late)

    @property
    def stations(self) -> Iterator[Station]:
        return (one for one in (self.d, self.p) if one.alive)

    def run(self) -> History:
        for _ in range(self.chance.randrange(60, 160)):
            self._event()
            self._turn()
        self._calm_down()
        for one in self.asked:
            self._check(one)
        for station in self.stations:
            self._check_clean(station)
        return self

    # Events.

    def _event(self) -> None:
        events = {
            "ask": 12, "cancel": 2, "finish": 2, "hold": 4, "let go": 8, "repeat": 3, "swap": 2, "late block": 3,
            "double block": 2, "lose block": 1, "cut": 1, "heal": 4, "wait": 1, "kill p": 1, "kill d": 1, "drain p": 1,
        }  # fmt: skip
        name = self.chance.choices([*events, "nothing"], [*events.values(), 40])[0]
        self.events[name] += 1
        getattr(self, f"_{name.replace(' ', '_')}")()

    def _nothing(self) -> None:
        pass

    def _ask(self) -> None:
        chance = self.chance
        known = [one.request.prompt_tokens for one in self.asked]
        length = chance.randrange(*PROMPT_TOKENS)
        prompt = tuple(chance.randrange(1, VOCAB) for _ in range(length))
        if known and chance.random() < 0.4:  # a common beginning
            old = chance.choice(known)
            prompt = old[: chance.randrange(1, len(old) + 1)] + prompt[:10]
        params = SamplingParams(
            n=chance.choice((1, 1, 2, 3)), max_tokens=chance.randrange(1, 24), seed=chance.randrange(1000),
            stop_token_ids=tuple(range(1, VOCAB, 17)) if chance.random() < 0.3 else (),
            logprobs=0 if chance.random() < 0.3 else None, grammar=some_grammar(chance),
        )  # fmt: skip
        to, helper = (self.d, self.p) if chance.random() < 0.8 else (self.p, self.d)  # each can do both
        prefill = chance.choice((helper.name,) * 8 + ("", "gone:9"))
        self.events["structured"] += params.grammar is not None
        request = AddRequest(f"r{len(self.asked)}", prompt, params, self.clock(), prefill=prefill)
        self.asked.append(Asked(request, to))
        to.ask(request)

    def _open(self) -> list[Asked]:
        return [
            one for one in self.asked
            if one.station.alive and not one.aborted and any(not answer.ends for answer in self._answers(one))
        ]  # fmt: skip

    def _answers(self, one: Asked) -> list[Answer]:
        return one.station.answers[one.request.request_id]

    def _cancel(self) -> None:
        if (open_ones := self._open()) and self.mail.alive:
            one = self.chance.choice(open_ones)
            one.aborted = True
            one.station.abort(one.request.request_id)

    def _finish(self) -> None:
        """The front finds a stop text in a choice."""
        if not (open_ones := self._open()):
            return
        one = self.chance.choice(open_ones)
        choices = [choice for choice, answer in enumerate(self._answers(one)) if answer.tokens and not answer.ends]
        if choices:
            choice, name = self.chance.choice(choices), one.request.request_id
            one.finished |= {choice}
            if not one.station.desk.finish_choice("f0", name, choice):
                one.station.engine.finish_choice(name, choice, front="f0")
            self._answers(one)[choice].ends.append(("front", None))

    def _hold(self) -> None:
        self.mail.holds = True

    def _let_go(self) -> None:
        self.mail.deliver(self.chance.randrange(1, 30))

    def _repeat(self) -> None:
        self.mail.repeat(self.chance)

    def _swap(self) -> None:
        self.mail.swap(self.chance)

    def _late_block(self) -> None:
        self.network.holds = True

    def _double_block(self) -> None:
        if self.network.posted:
            self.network.deliver(self.chance.choice(self.network.posted))

    def _lose_block(self) -> None:
        """A write whose bytes are damaged on the way."""
        if self.network.posted:
            write = self.chance.choice(self.network.posted)
            write.data = write.data.copy()
            write.data[0, 0] ^= 1

    def _cut(self) -> None:
        self.mail.cut.add(frozenset(("d:1", "p:1")))

    def _heal(self) -> None:
        self.mail.cut.clear()
        self.mail.holds = self.network.holds = False
        self.mail.deliver(len(self.mail.under_way))
        self._deliver_blocks()

    def _deliver_blocks(self) -> None:
        posted, self.network.posted = self.network.posted, []
        self.chance.shuffle(posted)
        for write in posted:
            self.network.deliver(write)

    def _wait(self) -> None:
        self.clock.now_s += self.chance.choice((1.0, 3.0, 6.0, 12.0))

    def _kill_p(self) -> None:
        self.p = self._kill(self.p, self.d)

    def _kill_d(self) -> None:
        self.d = self._kill(self.d, self.p)

    def _kill(self, victim: Station, other: Station) -> Station:
        """Kill an engine; another one starts in its place."""
        victim.kill()
        other.notice_death(victim)
        self._note_outcomes(victim)
        again = self._station(victim.name)
        for one in self.asked:
            if one.station is victim and not one.aborted and one.request.request_id not in victim.refusals:
                self._carry_on(one, self.chance.choice((again, other)))
        return again

    def _carry_on(self, one: Asked, station: Station) -> None:
        """Do what a router does when an engine is gone: ask another one to go on behind what the client has."""
        answers = self._answers(one)
        if all(answer.ends for answer in answers):
            return
        begun = any(answer.tokens or answer.ends for answer in answers)
        resumed = tuple(None if answer.ends else tuple(answer.tokens) for answer in answers) if begun else ()
        self.events["resume" if begun else "begin again"] += 1
        one.station = station
        station.answers[one.request.request_id] = answers
        station.add("f0", replace(one.request, prefill="", resumed=resumed))

    def _drain_p(self) -> None:
        """P gives up everything that it computes for others."""
        ended = [
            delta for front, name in list(self.p.engine.requests) if front.startswith("peer ")
            for delta in self.p.engine.abort_request(name, front=front)
        ]  # fmt: skip
        self.p.send_all(ended)

    # Time.

    def _turn(self) -> None:
        self.clock.now_s += self.chance.choice((0.001, 0.01, 0.03))
        for station in self.stations:
            station.turn()

    def _calm_down(self) -> None:
        """Let everything end that can."""
        self._heal()
        for _ in range(MOST_TURNS):
            if self.d.idle and self.p.idle:
                break
            self._turn()
            self._deliver_blocks()
        assert self.d.idle, "a request never ends at D"
        assert self.p.idle, "a request never ends at P"
        for _ in range(20):
            self.clock.now_s += 1.0
            self._turn()

    # Findings.

    def _check(self, one: Asked) -> None:
        """One terminal answer for each choice, with the tokens of an engine that nothing disturbs."""
        if one.request.request_id in one.station.refusals or (one.aborted and not one.station.alive):
            return
        for choice, (answer, whole) in enumerate(zip(self._answers(one), undisturbed(one.request), strict=True)):
            where = f"history {self.number}, {one.request.request_id}, choice {choice}"
            assert len(answer.ends) == 1, f"{where}: ended {len(answer.ends)} times"
            cut_short = one.aborted or choice in one.finished
            expected = whole.tokens[: len(answer.tokens)] if cut_short else whole.tokens
            assert answer.tokens == expected, f"{where}: wrong tokens"
            if one.request.params.logprobs is not None:
                kept = len(answer.logprobs) if cut_short else None
                assert answer.logprobs == whole.logprobs[:kept], f"{where}: wrong log-probabilities"
            if not cut_short:
                assert answer.ends == whole.ends, f"{where}: another end"

    def _check_clean(self, station: Station) -> None:
        audit = station.engine.scheduler.audit()
        assert_sound(audit)
        where = f"history {self.number}, {station.name}"
        assert audit.owned == 0, f"{where}: {audit.owned} blocks are held"
        assert list(station.desk.faults()) == [], where
        assert station.zone.zone.credits == station.zone.num_slots, f"{where}: slots are held"
        self._note_outcomes(station)

    def _note_outcomes(self, station: Station) -> None:
        self.outcomes.update(station.tally.outcomes)
        self.outcomes.update({f"local {reason}": count for reason, count in station.tally.reasons.items()})
        self.outcomes.update({f"refused {cause}": count for cause, count in station.zone.zone.refused.items()})


def undisturbed(request: AddRequest) -> list[Answer]:
    station = Station("alone:1", make_engine(200, 32), Mail(), Network(), Clock())
    station.ask(replace(request, prefill=""))
    while not station.idle:
        station.turn()
    return station.answers[request.request_id]


def run_histories(first: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """Run histories of these numbers; return their events and outcomes."""
    events: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        history = History(number).run()
        events.update(history.events)
        outcomes.update(history.outcomes)
    return events, outcomes


def main() -> None:
    count, began_s = int(sys.argv[1]) if len(sys.argv) > 1 else 1000, time.perf_counter()
    events, outcomes = run_histories(0, count)
    took = f"{time.perf_counter() - began_s:.1f} s, {time.process_time():.1f} s of one core"
    sys.stdout.write(f"{count} histories in {took}\nevents: {dict(events)}\n")
    sys.stdout.write(f"outcomes: { {name: number for name, number in sorted(outcomes.items()) if number} }\n")


if __name__ == "__main__":
    main()
