"""One engine in virtual time: the real scheduler and blocks over a runner whose steps take what a curve says.

Nothing sleeps and nothing is computed. A step that begins at `clock.now_s` ends when its tokens are due, and the engine
stamps them with that time. Counters are the engine's own (`LoadCounters`, `Stats`), so the autoscaler reads the same
report as from a real `/status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import Delta, ModelFacts
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_budget import StepBudget
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.load_reports import REPORT_S, LoadReports
from stoker.engine.sampling import SamplingParams
from stoker.operator.domain.autoscaling.load_report import LoadReport, read_load
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.router.load import Load
from stoker.router.snapshot import Role
from stoker.router.standing import Standing, standing_of
from testing.clocked.trace import TracedRequest

VOCABULARY = 1 << 62


@dataclass(frozen=True)
class EngineSettings:
    """An engine's limits and its step times."""

    curve: StepCurve
    kv_tokens: int = 400_000
    block_size: int = 64
    max_requests: int = 256
    max_batch_tokens: int = 2048
    mixed_tokens: int | None = 512
    """Prompt tokens of a step with decodes, while few wait."""
    prefix_cache: bool = True


@dataclass
class VirtualClock:
    """The time of one replica."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Served:
    """A request and its times."""

    request: TracedRequest
    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    uncached: int = 0
    """Tokens of the prompt that were computed."""

    @property
    def first_token_s(self) -> float:
        """Time to the first token; infinite without one."""
        return float("inf") if self.first_s is None else self.first_s - self.arrived_s

    @property
    def gap_s(self) -> float:
        """Mean time between tokens."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def meets(self, goals: Goals) -> bool:
        """Whether the first token came in time, and the others with small enough gaps on average."""
        in_time = goals.first_token_s is None or self.first_token_s <= goals.first_token_s
        return in_time and (goals.gap_s is None or self.gap_s <= goals.gap_s)


class _Due:
    """The output of a step that takes some time, from now on."""

    def __init__(self, step: StepInput, clock: VirtualClock, duration_s: float) -> None:
        self.step, self.clock, self.duration_s = step, clock, duration_s
        self.end_s = clock.now_s + duration_s

    def result(self) -> StepOutput:
        samples = len(self.step.sample_chunks)
        self.clock.now_s = self.end_s
        return StepOutput(
            self.step.number, (1,) * samples, (True,) * samples, (None,) * samples, ((),) * len(self.step.seats)
        )


class ClockedExecutor:
    """Computes nothing; a step takes what the curve says of its prompt tokens and its sequences that decode."""

    def __init__(self, curve: StepCurve, clock: VirtualClock) -> None:
        self.curve, self.clock = curve, clock

    def submit(self, step: StepInput) -> _Due:
        decodes = sum(length == 1 for length in step.lengths)
        seconds = self.curve.step_s(step.num_tokens - decodes, decodes)
        return _Due(step, self.clock, seconds)

    def capture_next_graph(self, *, wanted: bool = False) -> bool:
        return False

    def check(self) -> None:
        """Never lost."""

    def rank_states(self) -> tuple[RankState, ...]:
        return ()

    def close(self) -> None:
        pass


class ClockedReplica:
    """An engine replica, and what a router knows of it. `pending` counts its unfinished requests, as a router does."""

    role: Role = "colocated"
    revision = ""
    silent = False

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self.identity = name, "1"
        self.load: Load | None = None
        """The newest report to the router."""
        self.settings = settings
        self.pending = 0
        self.draining = False
        self.stepping = False
        """Whether a step is on its way in the simulation's order of events."""
        self._clock = VirtualClock()
        blocks = BlockManager(settings.kv_tokens // settings.block_size, settings.block_size, settings.prefix_cache)
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=settings.max_batch_tokens,
            max_requests=settings.max_requests,
            max_queued_requests=1 << 30,
            budget=StepBudget(settings.max_batch_tokens, settings.mixed_tokens),
        )
        limits = ModelLimits(VOCABULARY, settings.kv_tokens, ())
        self.engine = LLMEngine(ClockedExecutor(settings.curve, self._clock), scheduler, limits, self._clock)
        self.counters = LoadCounters()
        steps = settings.max_batch_tokens, settings.mixed_tokens
        self.ledger = LoadLedger()
        self.reports = LoadReports(self.ledger, clock=self._clock, step_tokens=lambda: steps)
        self._reported_s, self._unstarted = -REPORT_S, dict[str, int]()
        self._served: dict[str, Served] = {}
        self._facts = ModelFacts(
            "", "", None, "", VOCABULARY, settings.kv_tokens, (), settings.block_size, blocks.num_blocks
        )

    @property
    def busy(self) -> bool:
        return self.engine.has_unfinished

    @property
    def tokens_in_work(self) -> int:
        """Tokens, read and to be written, of its open requests, as a front counts them."""
        return sum(one.request.prompt + one.request.output for one in self._served.values())

    @property
    def unstarted(self) -> tuple[int, ...]:
        """Prompt tokens of requests without a first token, as a router counts them."""
        return tuple(self._unstarted.values())

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second by its newest report."""
        return self.load.measured_rate if self.load is not None else None

    @property
    def standing(self) -> Standing:
        """What the router computes of its load now."""
        return standing_of(self)

    @property
    def next_rank(self) -> ClockedReplica:
        """Who computes a request that is sent here: itself."""
        return self

    def tell(self, now_s: float) -> None:
        """Report its load to the router, if it may already."""
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self.load = Load.model_construct(seq=int(1000 * now_s), **{**self.reports.report(), "queue_s": {}})

    def add(self, now_s: float, served: Served, uncached: int = 0) -> None:
        """Queue a request now; `uncached`: tokens that the router expects to be computed."""
        request_id = str(served.request.number)
        params = SamplingParams(max_tokens=served.request.output, ignore_eos=True, seed=0)
        self._clock.now_s = now_s
        self._served[request_id] = served
        self.pending += 1
        self.counters.arrived += 1
        self.ledger.waiting[request_id] = served.request.prompt
        self._unstarted[request_id] = uncached
        self.engine.add_request(request_id, served.request.tokens(), params, arrival_s=served.arrived_s)

    def step(self, now_s: float) -> tuple[float, list[Served]]:
        """Compute one step from now; return its end, and the requests that ended with it."""
        self._clock.now_s = now_s
        ended = [found for _, delta in self.engine.step() if (found := self._take(delta)) is not None]
        return self._clock.now_s, ended

    def _take(self, delta: Delta) -> Served | None:
        served, now_s = self._served[delta.request_id], self._clock.now_s
        served.tokens += len(delta.tokens)
        if served.first_s is None:
            served.first_s = now_s
            self.counters.first_token(served.first_token_s)
            self.ledger.first_token(delta.request_id, delta.facts)
            del self._unstarted[delta.request_id]
        else:
            self.counters.more_tokens(now_s - (served.last_s or now_s), len(delta.tokens))
            self.ledger.gap(now_s - (served.last_s or now_s))
        served.last_s = now_s
        if delta.finish_reason is None:
            return None
        if delta.facts is not None:
            self.counters.finished(delta.facts)
            served.uncached = delta.facts.prompt_tokens - delta.facts.cached_tokens
        self.ledger.running.discard(delta.request_id)
        return self._served.pop(delta.request_id)

    def report(self) -> LoadReport:
        """The engine's load, through the form of `/status`."""
        settings = self.settings
        wire: Any = self.counters.report(
            self.engine.stats(), self._facts,
            max_requests=settings.max_requests, max_batch_tokens=settings.max_batch_tokens,
        )  # fmt: skip
        found = read_load({"load": wire})
        assert found is not None
        return found
