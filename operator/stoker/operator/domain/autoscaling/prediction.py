"""Latencies of a pool with N replicas, computed from its demand and its measured step times. Pure.

A replica computes prompts in chunks beside the sequences that decode (Sarathi, 2024). Its steps take a mean of
`base / (1 - work)`, where `work` is the share of time that tokens alone need; so the time between tokens and the
number of sequences follow from each other without iteration. Prompts queue for the tokens of a step: an M/G/c queue
with Erlang's C and the correction of Allen and Cunneen for burstiness (1978). The 95th percentile of the first token is
the longer of a long prompt after a usual wait and a usual prompt after a long wait.

A prefill and a decode pool are predicted alike: what their engines compute is measured. A decode engine computes the
prompts that routers do not split, and of those that arrive by transfer the rest; a prefill engine decodes until it is
relieved, and the whole answers of requests that no decode engine takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stoker.operator.domain.autoscaling.demand import Demand
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.pod.step_tokens import prompt_steps, prompt_tokens

TAIL = 0.05
"""Share of requests that may be slower: goals are 95th percentiles."""
SURE_OF_ROOM = 1.65
"""Standard deviations of the number of sequences for which a replica needs room."""
MAX_KV_USE = 0.9


@dataclass(frozen=True)
class EngineShape:
    """Limits of one copy of the model: of a replica without data-parallel ranks."""

    kv_tokens: int
    max_requests: int
    max_batch_tokens: int
    mixed_tokens: int | None = None
    """Prompt tokens of a step beside decodes while few wait; None: as many as fit."""


@dataclass(frozen=True)
class Goals:
    """95th percentiles in seconds; None where none is set."""

    first_token_s: float | None = None
    gap_s: float | None = None


@dataclass(frozen=True)
class Prediction:
    """95th percentiles in seconds, infinite where the work does not fit."""

    first_token_s: float
    gap_s: float
    busy: float
    """Share of time in which tokens are computed; at 1 queues grow for ever."""
    kv_use: float
    sequences: float
    step_s: float = 0.0
    """A usual step."""
    full_step_s: float = math.inf
    """A step that is full of prompts: more load cannot lengthen a gap beyond it but by more sequences."""

    def used(self, goals: Goals) -> float:
        """The share of a goal that is used up, the larger of both; infinite where the work does not fit."""
        if not self.fits:
            return math.inf
        first = self.first_token_s / goals.first_token_s if goals.first_token_s is not None else 0.0
        return max(first, self._gap_s(goals.gap_s) / goals.gap_s if goals.gap_s is not None else 0.0)

    def _gap_s(self, goal_s: float) -> float:
        """The gap that needs room for more load: none does beyond a usual step where full ones reach the goal, too."""
        return min(self.step_s, self.gap_s) if self.full_step_s <= goal_s else self.gap_s

    @property
    def fits(self) -> bool:
        return math.isfinite(self.first_token_s) and math.isfinite(self.gap_s) and self.kv_use <= 1


@dataclass(frozen=True)
class PoolModel:
    """What a prediction is computed from."""

    demand: Demand
    curve: StepCurve
    shape: EngineShape
    copies: int = 1
    """Of the model in a replica."""

    def at(self, replicas: int) -> Prediction:
        """Latencies with `replicas` that share the demand evenly."""
        return predict(self.demand, self.curve, self.shape, replicas * self.copies)

    def alone(self) -> Prediction:
        """Latencies of an engine with hardly a request: the best that any number of replicas can reach."""
        return predict(replace(self.demand, rate=1e-6, burstiness=1.0), self.curve, self.shape, 1)


def predict(demand: Demand, curve: StepCurve, shape: EngineShape, replicas: int) -> Prediction:
    """Latencies with `replicas` that share the demand evenly."""
    if replicas < 1:
        return _overrun(1.0) if demand.rate > 0 else Prediction(0.0, 0.0, 0.0, 0.0, 0.0)
    rate = demand.rate / replicas
    prompt, output = demand.uncached.moment(), demand.output
    busy = rate * (curve.prompt_token_s * prompt + curve.decode_token_s * output)
    if busy >= 1:
        return _overrun(busy)
    step_s = max(curve.base_s / (1 - busy), curve.decode_token_s)
    sequences = rate * max(output - 1, 0) * step_s
    if sequences >= shape.max_requests:
        return _overrun(busy)
    most = sequences + SURE_OF_ROOM * math.sqrt(sequences)
    kv_use = (most * (demand.prompt + output / 2) + demand.prompt) / (MAX_KV_USE * max(shape.kv_tokens, 1))
    chunk = max(shape.max_batch_tokens - sequences, 1.0)
    state = _Steps(demand, curve, chunk, shape.mixed_tokens or math.inf, prompt, sequences, step_s)
    first_s, gap_s = state.first_token_s(replicas), state.gap_s(rate)
    return Prediction(first_s, gap_s, busy, kv_use, sequences, step_s, state.full_s)


def _overrun(busy: float) -> Prediction:
    return Prediction(math.inf, math.inf, busy, math.inf, math.inf)


@dataclass(frozen=True)
class _Steps:
    """The steps of one replica in balance."""

    demand: Demand
    curve: StepCurve
    chunk: float
    """Prompt tokens of a full step."""
    mixed: float
    """Those of a step while few wait."""
    prompt: float
    sequences: float
    step_s: float

    def first_token_s(self, replicas: int) -> float:
        """Rest of the step that runs, wait in the queue, and the prompt itself."""
        demand, prompt = self.demand, self.prompt
        token_s = self.curve.prompt_token_s + self.curve.step_s(0, self.sequences) / self.chunk  # when steps are full
        load = demand.rate * token_s * prompt / replicas
        if load >= 1:
            return math.inf
        variation = demand.uncached.moment(2) / prompt**2 - 1 if prompt else 0.0
        waits = _erlang_c(replicas, load)
        wait_s = token_s * prompt * (demand.burstiness + variation) / 2 / (replicas * (1 - load))  # of those that wait
        long_wait_s = wait_s * max(math.log(waits / TAIL), 0.0) if waits else 0.0
        long = demand.uncached.quantile(1 - TAIL) or prompt
        return self.step_s / 2 + max(self._own_s(long) + waits * wait_s, self._own_s(prompt) + long_wait_s)

    def gap_s(self, rate: float) -> float:
        """A token's gap is a step; one in twenty has a large part of a prompt, if so many steps have one."""
        steps = 1 + self.prompt / prompt_tokens(self.mixed, self.prompt, self.chunk) if self.prompt else 0.0
        with_prompt = min(rate * self.step_s * steps, 1.0)
        if with_prompt <= TAIL:
            return self.step_s
        long = self.demand.uncached.quantile(1 - TAIL / with_prompt) or self.prompt
        tokens = min(long, prompt_tokens(self.mixed, long, self.chunk))
        return max(self.step_s, self.curve.step_s(tokens, self.sequences))

    @property
    def full_s(self) -> float:
        """A step with as many prompt tokens as it takes."""
        return max(self.step_s, self.curve.step_s(self.chunk, self.sequences)) if self.prompt else self.step_s

    def _own_s(self, tokens: float) -> float:
        return (
            prompt_steps(self.mixed, max(tokens, 1), self.chunk) * self.curve.step_s(0, self.sequences)
            + self.curve.prompt_token_s * tokens
        )


def _erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits, for `load` below 1 of each server; by Erlang's recursion for B."""
    offered = servers * load
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - load * (1 - blocked)) if blocked else 0.0
