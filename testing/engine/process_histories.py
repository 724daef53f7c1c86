"""Generated histories of engines that are processes: kills, stops, broken connections and links, cancels, drains.

Engines have one rank or two, and blocks of several sizes; another one starts in the place of a killed one.
The same as `handover_histories`, over real processes and sockets. Messages cannot be repeated or change places here:
the transport numbers them. A number gives the same events; the moments at which they meet the engines differ.

    python -m testing.engine.process_histories 20
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess

from stoker.engine.config import Transport
from stoker.engine.core.messages import AddRequest, Delta
from stoker.engine.sampling import SamplingParams
from testing.engine.handover_histories import BLOCK, OTHER_BLOCKS, PROMPT_TOKENS, VOCAB, some_grammar, undisturbed
from testing.engine.station_process import Audited, Refused, Started, StationFacts, Told, run_station
from testing.engine.stations import Answer
from testing.engine.transfers import wait_for
from testing.forked import forked

EVENTS = {
    "ask": 10,
    "cancel": 2,
    "stop": 2,
    "go on": 4,
    "break": 1,
    "cut": 1,
    "kill p": 1,
    "kill d": 1,
    "drain": 1,
    "nothing": 8,
}
PAUSES_S = (0.0, 0.005, 0.02, 0.05)
QUARANTINE_S = 30.0
"""Longer than a slot rests after a connection has ended."""
WAYS: tuple[tuple[Transport, ...], ...] = (("shared-memory", "tcp"), ("tcp",))


class Process:
    """One station's process, as its parent sees it."""

    def __init__(self, facts: StationFacts) -> None:
        context = forked()
        self.facts = facts
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=run_station, args=(facts, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.alive = True
        self.endpoint = ""

    def signal(self, number: int) -> None:
        if self.process.pid is not None and self.alive:
            os.kill(self.process.pid, number)

    def send(self, command: object) -> None:
        self.pipe.send(command)

    def news(self) -> list[Told]:
        """What has come from it; what it sent before its death can still be read."""
        found: list[Told] = []
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, OSError):
            assert not self.alive, f"{self.facts.name} ended by itself"
        return found

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.join()


@dataclass
class Client:
    """A request and what its client has got."""

    request: AddRequest
    station: Process
    answers: list[Answer]
    aborted: bool = False
    refused: str = ""

    @property
    def open(self) -> bool:
        return not self.aborted and not self.refused and any(not answer.ends for answer in self.answers)


@dataclass
class ProcessHistory:
    """One run. `run` raises AssertionError where anything is lost, doubled, wrong or left behind."""

    number: int
    folder: str
    shape: tuple[int, int] | None = None
    """Ranks and size of blocks of all engines; None: any."""
    clients: list[Client] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    audits: list[Audited] = field(default_factory=list)
    audited: dict[str, Audited] = field(default_factory=dict)
    """The last audit of each process, by its name."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.number)
        self.started = 0
        self.d, self.p = self._start(), self._start()

    def _start(self) -> Process:
        chance = self.chance
        self.started += 1
        sizes = chance.choice((120, 200)), chance.choice((8, 16, 32)), chance.choice((1, 3, 8, 24))
        ways, shape = chance.choice(WAYS), (chance.choice((1, 2, 2)), chance.choice((BLOCK, BLOCK, *OTHER_BLOCKS)))
        name = f"h{self.number}-{self.started}"
        process = Process(StationFacts(name, self.folder, *sizes, ways, *(self.shape or shape)))
        first: list[Told] = []

        def told() -> bool:
            first.extend(process.news())
            return bool(first)

        wait_for(told, "a started station")
        assert isinstance(first[0], Started)
        process.endpoint = first[0].endpoint
        return process

    def run(self) -> ProcessHistory:
        events = self.chance.choices([*EVENTS], [*EVENTS.values()], k=self.chance.randrange(30, 60))
        try:
            self.meet()
            for name in events:
                self._happen(name)
                time.sleep(self.chance.choice(PAUSES_S))
                self._read()
            self.settle()
        finally:
            self.close()
        self.check()
        return self

    def close(self) -> None:
        for process in (self.d, self.p):
            process.kill()

    def check(self) -> None:
        """Compare all that clients got."""
        for client in self.clients:
            self._check(client)

    def meet(self) -> None:
        """Ask until each engine has helped the other: on a busy machine a peer may not answer in time at first."""
        for to, helper in ((self.d, self.p), (self.p, self.d)):
            before = self._num_helped(to)

            def helped(to: Process = to, helper: Process = helper, before: int = before) -> bool:
                self._ask_for(to, helper)
                wait_for(self._all_ended, "the first answers")
                return self._num_helped(to) > before

            wait_for(helped, "a split request")

    def _num_helped(self, process: Process) -> int:
        """Requests whose prompts another engine has computed for it."""
        outcomes = self._audit(process).outcomes
        return outcomes["split"] + outcomes["prefill_only"]

    def _audit(self, process: Process) -> Audited:
        """Wait until an engine holds nothing, and check that it lost nothing."""
        known = len(self.audits)
        process.send(("audit",))

        def audited() -> bool:
            self._read()
            return len(self.audits) > known

        wait_for(audited, f"an engine of history {self.number} that holds nothing")
        found = self.audited[process.facts.name] = self.audits[-1]
        assert (found.owned, found.faults) == (0, ()), f"history {self.number}: {found}"
        return found

    def _all_ended(self) -> bool:
        self._read()
        return not any(client.open for client in self.clients)

    def _happen(self, name: str) -> None:
        self.events[name] += 1
        actions: dict[str, Callable[[], None]] = {
            "ask": self._ask, "cancel": self._cancel, "kill p": lambda: self.kill(self.p),
            "kill d": lambda: self.kill(self.d), "nothing": lambda: None,
            "stop": lambda: self._any().signal(signal.SIGSTOP), "go on": self._go_on,
            "break": lambda: self.d.send(("break", self.p.endpoint)), "drain": lambda: self._any().send(("drain",)),
            "cut": lambda: self._any().send(("cut",)),
        }  # fmt: skip
        actions[name]()

    def _any(self) -> Process:
        return self.chance.choice((self.d, self.p))

    def _go_on(self) -> None:
        for process in (self.d, self.p):
            process.signal(signal.SIGCONT)

    def _ask(self) -> None:
        self._ask_for(*((self.d, self.p) if self.chance.random() < 0.8 else (self.p, self.d)))

    def _ask_for(self, to: Process, helper: Process) -> None:
        chance = self.chance
        prompt = tuple(chance.randrange(1, VOCAB) for _ in range(chance.randrange(*PROMPT_TOKENS)))
        if self.clients and chance.random() < 0.3:  # a common beginning
            old = chance.choice(self.clients).request.prompt_tokens
            prompt = old[: chance.randrange(1, len(old) + 1)] + prompt[:10]
        params = SamplingParams(
            n=chance.choice((1, 1, 2, 3)), max_tokens=chance.randrange(4, 40), seed=chance.randrange(1000),
            stop_token_ids=tuple(range(1, VOCAB, 17)) if chance.random() < 0.3 else (),
            logprobs=0 if chance.random() < 0.3 else None, grammar=some_grammar(chance),
        )  # fmt: skip
        request = AddRequest(f"r{len(self.clients)}", prompt, params, time.monotonic(), prefill=helper.endpoint)
        self.clients.append(Client(request, to, [Answer() for _ in range(params.n)]))
        to.send(request)

    def _cancel(self) -> None:
        if open_ones := [client for client in self.clients if client.open]:
            client = self.chance.choice(open_ones)
            client.aborted = True
            client.station.send(("abort", client.request.request_id))

    def kill(self, victim: Process) -> None:
        """Kill an engine; another one starts in its place, and its streams go on where a router would send them."""
        victim.kill()
        self._note(victim)
        again = self._start()
        other = self.p if victim is self.d else self.d
        self.d, self.p = (again, other) if victim is self.d else (other, again)
        for client in self.clients:
            if client.station is victim and client.open:
                self._carry_on(client, self.chance.choice((again, other)))

    def _carry_on(self, client: Client, station: Process) -> None:
        begun = any(answer.tokens or answer.ends for answer in client.answers)
        resumed = tuple(None if answer.ends else tuple(answer.tokens) for answer in client.answers) if begun else ()
        self.events["resume" if begun else "begin again"] += 1
        client.station = station
        station.send(replace(client.request, prefill="", resumed=resumed))

    def _read(self) -> None:
        for process in (self.d, self.p):
            self._note(process)

    def _note(self, process: Process) -> None:
        by_name = {client.request.request_id: client for client in self.clients if client.station is process}
        for one in process.news():
            match one:
                case Delta():
                    if one.request_id in by_name:
                        _add(by_name[one.request_id].answers[one.choice], one)
                case Refused():
                    by_name[one.request_id].refused = one.problem
                case Audited():
                    self.audits.append(one)

    def settle(self) -> None:
        """Let everything end that can, then audit both engines."""
        self._go_on()
        wait_for(self._all_ended, f"the answers of history {self.number}")
        for process in (self.d, self.p):
            process.send(("pass", QUARANTINE_S))
        for process in (self.d, self.p):
            self._audit(process)
        for found in self.audited.values():
            self.outcomes.update(found.outcomes)
            self.outcomes.update({f"local {reason}": count for reason, count in found.reasons.items() if count})

    def _check(self, client: Client) -> None:
        """One terminal answer for each choice, with the tokens of an engine that nothing disturbs."""
        assert not client.refused, client.refused
        for choice, (answer, whole) in enumerate(zip(client.answers, undisturbed(client.request), strict=True)):
            where = f"history {self.number}, {client.request.request_id}, choice {choice}"
            assert len(answer.ends) <= 1, f"{where}: ended {len(answer.ends)} times"
            expected = whole.tokens[: len(answer.tokens)] if client.aborted else whole.tokens
            assert answer.tokens == expected, f"{where}: wrong tokens"
            assert answer.logprobs == whole.logprobs[: len(answer.logprobs)], f"{where}: wrong log-probabilities"
            if not client.aborted:
                assert answer.ends == whole.ends, f"{where}: another end"


def _add(answer: Answer, delta: Delta) -> None:
    answer.tokens += delta.tokens
    answer.logprobs += [one.logprob for one in delta.logprobs or ()]
    if delta.finish_reason is not None:
        answer.ends.append((delta.finish_reason, delta.stop_token))


def run_process_histories(first: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """Run histories of these numbers; return their events and outcomes."""
    events: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            history = ProcessHistory(number, folder).run()
            events.update(history.events)
            outcomes.update(history.outcomes)
    return events, outcomes


def main() -> None:
    count, began_s = int(sys.argv[1]) if len(sys.argv) > 1 else 20, time.perf_counter()
    events, outcomes = run_process_histories(0, count)
    sys.stdout.write(f"{count} histories in {time.perf_counter() - began_s:.1f} s\nevents: {dict(events)}\n")
    sys.stdout.write(f"outcomes: {dict(outcomes)}\n")


if __name__ == "__main__":
    main()
