"""The core process: its messages to a front while it loads, serves, drains and fails."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
import zmq

from stoker.engine.config import CacheConfig, EngineConfig, ServedModelConfig
from stoker.engine.core import messages as m
from stoker.engine.core.capture_pace import REST_S
from stoker.engine.core.core import Core
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.handover.desk import Desk
from stoker.engine.core.run import run_core
from stoker.engine.core.stats import Stats
from stoker.engine.core.step_clock import StepClock
from stoker.engine.core.step_pace import QuietLimits
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import InProcess, OnDevice
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.plan import EnginePlan
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import EXIT_CODES, Cause
from testing.engine.transfers import wait_for
from testing.forked import forked
from tests.engine.conftest import MakeEngine

Kind = TypeVar("Kind")
LONG = SamplingParams(max_tokens=120, ignore_eos=True)


class Front:
    """A front's socket."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.heard: list[m.Message] = []

    def say(self, message: m.Message) -> None:
        self.socket.send(m.pack(message))

    def hear(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True, timeout_s: float = 240) -> Kind:
        """Return the next message of this kind; others are kept in `heard`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.socket.poll(100):
                message = m.unpack(self.socket.recv())
                self.heard.append(message)
                if isinstance(message, kind) and wanted(message):
                    return message
        raise AssertionError(f"no {kind.__name__} in {timeout_s} s, but {self.heard[-5:]}")

    def phase(self, phase: str) -> m.CoreState:
        return self.hear(m.CoreState, lambda state: state.phase == phase)

    def ask(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.say(m.AddRequest(request_id, prompt, params, time.monotonic()))

    def answer(self, request_id: str) -> list[m.Delta]:
        deltas: list[m.Delta] = []
        while not deltas or deltas[-1].finish_reason is None:
            outputs = self.hear(m.Outputs)
            deltas += [delta for delta in outputs.deltas if delta.request_id == request_id]
        return deltas

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Running:
    """A core in a thread."""

    def __init__(self, address: str, folder: Path, build: Any, **more: Any) -> None:
        config = EngineConfig(model=ServedModelConfig(path=str(folder)))
        self.core = Core(config, address, folder, build=build, **more)
        self.cause: Cause | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        self.cause = self.core.serve()

    def join(self) -> Cause | None:
        self.thread.join(240)
        return self.cause


PLAN = EnginePlan("", None, "cpu", torch.float32, "reference", "sdpa", False, 1, 4, 1200, 160, 256, 64, 1)


@pytest.fixture
def start(make_engine: MakeEngine, tmp_path: Path) -> Iterator[Callable[..., tuple[Front, Running]]]:
    """Start a core over a tiny model, and a front that has sent its hello."""
    started: list[tuple[Front, Running]] = []

    def make(build: Any = None, *, wrap: Any = lambda runner: runner, **more: Any) -> tuple[Front, Running]:
        address = f"ipc://{tmp_path}/core"
        plan = EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})
        running = Running(address, tmp_path, build or (lambda config, progress: (make_engine(wrap=wrap), plan)), **more)
        front = Front(address)
        front.say(m.Hello())
        started.append((front, running))
        return front, running

    yield make
    for front, running in started:
        front.say(m.Stop())
        running.join()
        front.close()


def test_a_request_is_answered_and_counted(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start()
    facts = front.phase("Serving").model
    assert facts is not None
    assert (facts.vocab_size, facts.max_model_len, facts.block_size, facts.num_blocks) == (320, 160, 4, 1200)
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    deltas = front.answer("a")
    assert sum(len(delta.tokens) for delta in deltas) == 4
    assert deltas[-1].finish_reason == "length"
    stats = front.hear(Stats, lambda stats: stats.generation_tokens == 4)
    assert (stats.prompt_tokens, stats.finished["length"], stats.owned_blocks) == (3, 1, 0)


def test_two_fronts_may_use_the_same_id(start: Callable[..., tuple[Front, Running]]) -> None:
    one, running = start()
    one.phase("Serving")
    two = Front(running.core.address)
    two.say(m.Hello())
    two.phase("Serving")
    for front, prompt in ((one, (3, 4)), (two, (7, 8, 9))):
        front.ask("a", prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    for front, length in ((one, 2), (two, 3)):
        facts = front.answer("a")[-1].facts
        assert facts is not None
        assert facts.prompt_tokens == length
    two.close()


def test_a_front_that_knows_of_a_serving_core_has_its_stats(start: Callable[..., tuple[Front, Running]]) -> None:
    """Else `/status` of a ready engine would say that it has no blocks and no load."""
    early, running = start()
    early.phase("Serving")
    late = Front(running.core.address)
    late.say(m.Hello())
    late.phase("Serving")
    for front in (early, late):
        assert any(isinstance(heard, Stats) and heard.total_blocks == 1200 for heard in front.heard)
    late.close()


def test_a_loading_core_says_how_far_it_is_and_refuses(start: Callable[..., tuple[Front, Running]]) -> None:
    go_on = threading.Event()

    def build(config: EngineConfig, progress: Callable[[str], None]) -> tuple[LLMEngine, EnginePlan]:
        progress("LoadingWeights 43 %")
        go_on.wait(240)
        raise OSError("no such model")

    front, running = start(build)
    front.hear(m.CoreState, lambda state: state.message == "LoadingWeights 43 %")
    front.ask("a", (1,), SamplingParams())
    refused = front.hear(m.Refused)
    assert (refused.kind, refused.message) == ("not_ready", "the engine is not ready: LoadingWeights 43 %")
    go_on.set()
    assert front.phase("Failed").message == "ModelError: no such model"
    assert running.join() is Cause.MODEL_ERROR


def test_what_cannot_be_served_is_refused_with_its_field(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start()
    front.phase("Serving")
    front.ask("long", (3,) * 200, SamplingParams())
    refused = front.hear(m.Refused)
    assert (refused.request_id, refused.kind, refused.field) == ("long", "too_long", "prompt")


class HeldCompiler:
    """A compiler whose grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.compiled: dict[str, Future[None]] = {}

    def knows(self, grammar: OutputGrammar) -> bool:
        return grammar.text in self.compiled and self.compiled[grammar.text].done()

    def submit(self, grammar: OutputGrammar) -> Future[None]:
        return self.compiled.setdefault(grammar.text, Future())

    def compile(self, grammar: OutputGrammar) -> None:
        return None

    def close(self) -> None:
        pass


def test_others_are_answered_while_a_grammar_compiles(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    compiler, engine = HeldCompiler(), make_engine()
    engine.grammars = compiler  # type: ignore[assignment]
    front, _ = start(lambda config, progress: (engine, EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})))
    front.phase("Serving")
    for text in ("good", "bad", "gone"):
        grammar = OutputGrammar.regex(text, "guided_regex")
        front.ask(text, (3, 4), SamplingParams(max_tokens=3, ignore_eos=True, grammar=grammar))
    front.ask("free", (5, 6), SamplingParams(max_tokens=3, ignore_eos=True))
    assert front.answer("free")[-1].finish_reason == "length"
    front.say(m.Abort(("gone",)))
    compiler.compiled["bad"].set_exception(OutputGrammar.regex("bad", "guided_regex").refused("is wrong"))
    refused = front.hear(m.Refused)
    assert (refused.request_id, refused.kind, refused.field) == ("bad", "invalid", "guided_regex")
    compiler.compiled["good"].set_result(None)
    assert front.answer("good")[-1].finish_reason == "length"
    assert compiler.compiled["gone"].cancelled()
    assert all(delta.request_id != "gone" for one in front.heard if isinstance(one, m.Outputs) for delta in one.deltas)


def test_noise_on_the_wire_is_ignored(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start()
    front.phase("Serving")
    front.socket.send(b"noise")
    front.say(m.CoreState("Failed", "a front may not say so"))
    front.say(m.Abort(("unknown",)))
    front.say(m.Finish("unknown", 0))
    front.ask("a", (3,), SamplingParams(temperature=0, max_tokens=1))
    assert front.answer("a")[-1].finish_reason is not None


def test_a_front_of_another_protocol_is_told_so(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start()
    front.phase("Serving")
    front.say(m.Hello(protocol=99))
    assert front.phase("Failed").message == f"this core speaks protocol {m.PROTOCOL}, the front 99"


def test_abort_and_finish_end_a_request_without_a_word(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start(wrap=Slow)
    front.phase("Serving")
    front.ask("gone", (3, 4), LONG)
    front.ask("found", (5, 6), LONG)
    front.hear(m.Outputs)
    front.say(m.Abort(("gone",)))
    front.say(m.Finish("found", 0))
    stats = front.hear(Stats, lambda stats: stats.finished["abort"] == stats.finished["stop"] == 1)
    assert (stats.running, stats.owned_blocks) == (0, 0)
    assert all(
        delta.finish_reason is None for heard in front.heard if isinstance(heard, m.Outputs) for delta in heard.deltas
    )


def test_draining_lets_running_requests_end_and_takes_no_more(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start()
    front.phase("Serving")
    front.ask("a", (3, 4), LONG)
    front.hear(m.Outputs)
    front.say(m.Drain(60))
    front.ask("late", (3,), SamplingParams())
    assert front.hear(m.Refused).kind == "draining"
    assert front.answer("a")[-1].finish_reason == "length"
    front.phase("Drained")


def test_what_runs_at_the_end_of_a_drain_is_aborted(start: Callable[..., tuple[Front, Running]]) -> None:
    front, _ = start(wrap=Slow)
    front.phase("Serving")
    front.ask("a", (3, 4), LONG)
    front.hear(m.Outputs)
    front.say(m.Drain(0))
    assert front.answer("a")[-1].finish_reason == "abort"
    front.phase("Drained")


def test_requests_of_a_front_that_has_ended_are_aborted_at_once(start: Callable[..., tuple[Front, Running]]) -> None:
    """The program that started the front tells the core; the other fronts' requests go on."""
    parent, running = start(wrap=Slow)
    parent.phase("Serving")
    dying, other = Front(running.core.address, b"front1.2"), Front(running.core.address, b"front0.1")
    for front in (dying, other):
        front.say(m.Hello())
        front.ask("a", (3, 4), LONG if front is dying else SamplingParams(max_tokens=4, ignore_eos=True))
        front.hear(m.Outputs)
    parent.say(m.Forget(b"front7.7".hex()))  # one that has never come
    parent.say(m.Forget(b"front1.2".hex()))
    parent.hear(Stats, lambda stats: stats.finished["abort"] == 1)
    assert other.answer("a")[-1].finish_reason == "length"
    for front in (dying, other):
        front.close()


def test_requests_of_a_silent_front_are_aborted(start: Callable[..., tuple[Front, Running]]) -> None:
    late_s = [0.0]
    silent, running = start(wrap=Slow, clock=lambda: time.monotonic() + late_s[0])
    silent.phase("Serving")
    other = Front(running.core.address)
    other.say(m.Hello())
    other.phase("Serving")
    silent.ask("a", (3, 4), LONG)
    silent.hear(m.Outputs)
    aborted: list[Stats] = []
    while not aborted:  # in steps, because a loop that was away for long blames no front
        late_s[0] += 4.0
        other.say(m.Ping())
        other.hear(m.Heartbeat)
        aborted = [heard for heard in other.heard if isinstance(heard, Stats) and heard.finished["abort"]]
    assert aborted[0].owned_blocks == 0
    assert silent.answer("a")[-1].finish_reason == "abort"  # it had only slept, and its client still waits
    other.close()


def test_a_core_that_was_away_blames_no_front_for_its_silence(start: Callable[..., tuple[Front, Running]]) -> None:
    late_s = [0.0]
    front, _ = start(clock=lambda: time.monotonic() + late_s[0])
    front.phase("Serving")
    front.ask("a", (3, 4), LONG)
    front.hear(m.Outputs)
    late_s[0] = 90.0  # the process was stopped, its front was not
    assert front.answer("a")[-1].finish_reason == "length"


def test_heartbeats_say_how_long_a_silence_is_healthy(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    go_on, may_load = threading.Event(), threading.Event()
    quiet = QuietLimits(floor_s=7, factor=2, first_s=33)

    def build(config: EngineConfig, progress: Callable[[str], None]) -> tuple[LLMEngine, EnginePlan]:
        may_load.wait(240)
        plan = EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})
        return make_engine(wrap=lambda runner: Waits(runner, go_on)), plan

    front, _ = start(build, quiet=quiet)
    assert front.hear(m.Heartbeat) == m.Heartbeat(33, None)  # loading
    may_load.set()
    front.phase("Serving")
    front.hear(m.Heartbeat, lambda beat: beat.quiet_s == 7)  # at rest
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert (
        front.hear(m.Heartbeat, lambda beat: beat.quiet_s != 7).quiet_s == 33
    )  # the first step of its size is announced
    assert not any(isinstance(heard, m.Outputs) for heard in front.heard)
    go_on.set()
    assert front.answer("a")[-1].finish_reason == "length"
    assert front.hear(m.Heartbeat, lambda beat: beat.quiet_s == 7).usual_step_s is not None


class Slow:
    """A runner that takes 0.2 s for each step of a request, so that a long one outlives the test."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, step: StepInput) -> StepOutput:
        if step.number >= 0:
            time.sleep(0.2)
        return self.runner.run(step)


class Waits:
    """A runner that computes its first step of a request only after a sign."""

    def __init__(self, runner: Runner, go_on: threading.Event) -> None:
        self.runner, self.go_on = runner, go_on

    def run(self, step: StepInput) -> StepOutput:
        if step.number >= 0:
            self.go_on.wait(240)
        return self.runner.run(step)


def test_an_engine_is_idle_in_its_metrics_when_the_last_answer_has_come(
    start: Callable[..., tuple[Front, Running]],
) -> None:
    front, _ = start(clock=lambda: 0.0)  # no regular stats: the clock stands still
    front.phase("Serving")
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    front.answer("a")
    stats = [heard for heard in front.heard if isinstance(heard, Stats)]
    assert (stats[-1].running, stats[-1].owned_blocks, stats[-1].finished["length"]) == (0, 0, 1)
    assert (sum(stats[-1].step_tokens), stats[-1].step_tokens_sum) == (3, 5)  # a prompt of three, then two decodes


def test_lost_blocks_are_given_back_and_counted(
    start: Callable[..., tuple[Front, Running]],
    make_engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    lost = [engine.scheduler.blocks._free.pop() for _ in range(3)]
    front, _ = start(lambda config, progress: (engine, EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})))
    front.phase("Serving")
    stats = front.hear(Stats, lambda stats: stats.leaked_blocks > 0)
    assert (stats.leaked_blocks, stats.free_blocks, stats.total_blocks) == (3, 1200, 1200)
    assert f"3 blocks were lost and are given back: {tuple(sorted(lost))}" in caplog.text
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert front.answer("a")[-1].finish_reason == "length"


def test_a_block_that_two_may_hold_ends_the_core(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.scheduler.blocks._free.append(engine.scheduler.blocks._free[0])
    front, running = start(lambda config, progress: (engine, EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})))
    state = front.phase("Failed")
    assert state.message == "Internal: cache audit: block 1199 is listed 2 times as free or cached"
    assert running.join() is Cause.INTERNAL


class DiesAfter:
    """A runner whose device is lost at its fourth step."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.steps = runner, 0

    def run(self, step: StepInput) -> StepOutput:
        self.steps += 1
        if self.steps > 3:
            raise ExecutorLost("the device is gone")
        return self.runner.run(step)


def test_a_lost_device_ends_every_request_and_the_core(start: Callable[..., tuple[Front, Running]]) -> None:
    front, running = start(wrap=DiesAfter)
    front.phase("Serving")
    front.ask("a", (3, 4), LONG)
    last = front.answer("a")[-1]
    assert (last.finish_reason, last.error) == ("error", "RankFailed: the device is gone")
    assert front.phase("Failed").message == "RankFailed: the device is gone"
    assert running.join() is Cause.RANK_FAILED


class RankLostAtTheDesk:
    """A desk that finds a lost rank while it moves blocks. The core may find it there at any point of its turn."""

    busy = False
    num_open = 0

    def __init__(self, *wakers: int) -> None:
        self.office = SimpleNamespace(post=SimpleNamespace(wakers=wakers), tally=SimpleNamespace(changes=0))

    def turn(self) -> None:
        raise ExecutorLost("rank 1: killed by signal 9")

    def stats(self) -> None:
        return None

    def faults(self) -> tuple[str, ...]:
        return ()

    def is_peer(self, front: str) -> bool:
        return False

    def abort_all(self) -> list[Any]:
        return []

    def drop(self, front: str) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def test_a_rank_that_the_hand_over_finds_lost_is_named_as_the_cause(
    start: Callable[..., tuple[Front, Running]],
) -> None:
    front, running = start()
    front.phase("Serving")
    running.core.desk = cast(Desk, RankLostAtTheDesk())
    assert front.phase("Failed").message == "RankFailed: rank 1: killed by signal 9"
    assert running.join() is Cause.RANK_FAILED


def test_a_rank_that_the_idle_engine_finds_lost_is_named_as_the_cause(
    start: Callable[..., tuple[Front, Running]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While tiers move blocks and no request is open."""
    front, running = start()
    front.phase("Serving")

    def lost(_: LLMEngine) -> None:
        raise ExecutorLost("rank 0: RuntimeError: CUDA error")

    monkeypatch.setattr(LLMEngine, "rest", lost)
    assert front.phase("Failed").message == "RankFailed: rank 0: RuntimeError: CUDA error"
    assert running.join() is Cause.RANK_FAILED


class OneAtAnother(RankLostAtTheDesk):
    """A desk with a request whose prompt another engine computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open, self.aborted = 1, 0

    def turn(self) -> None:
        pass

    def abort_all(self) -> list[Any]:
        self.aborted, self.num_open = self.aborted + self.num_open, 0
        return []


class ReadsLetters(RankLostAtTheDesk):
    """A desk at which a letter may come."""

    def __init__(self) -> None:
        self.letter = os.eventfd(0, os.EFD_NONBLOCK)
        super().__init__(self.letter)
        self.read = threading.Event()

    def turn(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.letter)
            self.read.set()

    def close(self) -> None:
        os.close(self.letter)


class OpenForEver(StepClock):
    """Foresees no end of the step that the device computes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def open_until(self, size: tuple[bool, int], began_s: float) -> float:
        self.asked.set()
        return began_s + 3600.0


def test_a_letter_of_another_engine_is_read_while_the_device_computes(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    clock = OpenForEver()
    engine = make_engine(execute=OnDevice, overlap=True)
    engine.step_clock = clock
    front, running = start(build=lambda config, progress: (engine, replace(PLAN, model_path=str(tmp_path))))
    front.phase("Serving")
    desk = ReadsLetters()
    running.core.desk = cast(Desk, desk)
    front.ask("a", (3, 4, 5), LONG)
    assert clock.asked.wait(240)
    os.eventfd_write(desk.letter, 1)
    assert desk.read.wait(240)


@pytest.mark.parametrize("in_time", [True, False])
def test_d_drains_while_p_computes_its_prompt(start: Callable[..., tuple[Front, Running]], in_time: bool) -> None:
    """It waits for requests that are still at another engine, until its deadline."""
    front, running = start()
    front.phase("Serving")
    desk = OneAtAnother()
    running.core.desk = cast(Desk, desk)
    front.say(m.Drain(3600.0 if in_time else 0.0))
    if in_time:
        front.phase("Draining")
        turns = front.hear(m.Heartbeat), front.hear(m.Heartbeat)
        assert all(turns)
        assert running.core.state.phase == "Draining"
        desk.num_open = 0
    front.phase("Drained")
    assert desk.aborted == (0 if in_time else 1)


class Warming(InProcess):
    """A runner with four parts to warm up."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.warmed = 0
        self.asked: list[bool] = []
        """For each call whether only a wanted graph was to be captured."""

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        self.asked.append(wanted)
        self.warmed += self.warmed < 4
        return self.warmed < 4


def test_idle_time_makes_things_ready_and_requests_come_first(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(execute=Warming)
    plan = EnginePlan(**{**vars(PLAN), "model_path": str(tmp_path)})
    front, _ = start(lambda config, progress: (engine, plan))
    assert list(front.phase("Serving").startup)[-2:] == ["Planning", "Warming"]
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert front.answer("a")[-1].finish_reason == "length"
    front.hear(Stats, lambda stats: stats.generation_tokens == 4)
    wait_for(lambda: engine.executor.warmed == 4, "the warm-up")  # type: ignore[attr-defined]


def after_a_request(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> tuple[Running, Warming, list[float]]:
    """A core that has answered, its executor, and its clock, which stands still."""
    engine, now_s = make_engine(execute=Warming), [100.0]
    plan = replace(PLAN, model_path=str(tmp_path))
    front, running = start(lambda config, progress: (engine, plan), clock=lambda: now_s[0])
    front.phase("Serving")
    front.ask("a", (3, 4, 5), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    front.answer("a")
    return running, cast(Warming, engine.executor), now_s


def test_soon_after_a_request_only_wanted_graphs_are_captured(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The next request would wait for the others."""
    _, executor, now_s = after_a_request(start, make_engine, tmp_path)
    before = len(executor.asked)
    wait_for(lambda: len(executor.asked) > before + 3, "captures at rest")
    assert all(executor.asked[before + 1 :])
    now_s[0] += REST_S
    wait_for(lambda: not executor.asked[-1], "captures of any graph")


def test_while_another_engine_computes_a_prompt_is_no_rest(
    start: Callable[..., tuple[Front, Running]], make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Its first token would wait for a capture."""
    running, executor, now_s = after_a_request(start, make_engine, tmp_path)
    desk = OneAtAnother()
    running.core.desk = cast(Desk, desk)
    before = len(executor.asked)
    wait_for(lambda: len(executor.asked) > before + 1, "a turn with the desk")
    for _ in range(3):
        now_s[0] += REST_S
        before = len(executor.asked)
        wait_for(lambda before=before: len(executor.asked) > before + 1, "captures")  # type: ignore[misc]
        assert all(executor.asked[before:])
    desk.num_open = 0
    now_s[0] += REST_S
    wait_for(lambda: not executor.asked[-1], "captures of any graph")


def test_a_core_whose_parent_is_gone_ends(start: Callable[..., tuple[Front, Running]]) -> None:
    alive = [True]
    front, running = start(parent_alive=lambda: alive[0])
    front.phase("Serving")
    alive[0] = False
    assert running.join() is Cause.INTERNAL


def test_a_core_whose_parent_died_while_it_was_importing_ends(twins: dict[str, Any], tmp_path: Path) -> None:
    twins["llama"].save_pretrained(tmp_path / "model")
    config = EngineConfig(model=ServedModelConfig(path=str(tmp_path / "model")), cache=CacheConfig(num_blocks=20))
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = forked().Process(target=run_core, args=(config, f"ipc://{tmp_path}/core", str(tmp_path), gone.pid))
    process.start()
    process.join(300)
    assert process.exitcode == EXIT_CODES[Cause.INTERNAL]


def test_a_core_process_serves_a_folder_and_exits_with_a_code(twins: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    twins["llama"].save_pretrained(model)
    config = EngineConfig(
        model=ServedModelConfig(path=str(model), dtype="float32"), threads=1, cache=CacheConfig(num_blocks=20)
    )
    address = f"ipc://{tmp_path}/core"
    process = forked().Process(target=run_core, args=(config, address, str(tmp_path)))
    process.start()
    front = Front(address)
    front.say(m.Hello())
    facts = front.phase("Serving").model
    assert facts is not None
    assert (facts.tokenizer_folder, facts.dtype, facts.eos_token_ids) == (str(model), "float32", (2,))
    front.ask("a", (3, 4), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(front.answer("a")) == 3
    front.say(m.Stop())
    process.join(300)
    assert process.exitcode == EXIT_CODES[Cause.COMPLETED]
    front.close()
