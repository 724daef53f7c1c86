"""The engine in a script: prompts in, answers out, with a progress bar.

llm = LLM("path/to/model")
for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(answer.completions[0].text)

Called by user scripts; owns an engine in the caller's thread, without a core process.
"""

from __future__ import annotations

import math
import operator
import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stoker.engine.config import EngineConfig, ServedModelConfig
from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.fetched_model import with_fetched_model
from stoker.engine.core.messages import Delta, FinishReason, RequestFacts
from stoker.engine.core.request_check import check_prompt
from stoker.engine.errors import EngineClosed
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.beam_search import MAX_LENGTH_PENALTY, MAX_WIDTH, Beam, BeamSearch, BeamSettings
from stoker.engine.http.text import OutputText
from stoker.engine.sampling import SamplingParams
from stoker.model.tokenizer import Tokenizer
from stoker.pod.config_file import ConfigError

Prompt = str | Sequence[int]
"""A text, which gets the tokenizer's special tokens, or token ids as they are."""


@dataclass
class Completion:
    """One choice."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Output tokens without the end token, cut where a stop text was found."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if requested."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop text or stop token of the parameters that ended it; None for an end token or another reason."""
    error: str | None = None
    """The reason, when `finish_reason` is `error`."""
    facts: RequestFacts | None = None
    """Counts and times; None where a stop text ended the choice."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities; None where they were not requested."""
        return None if self.logprobs is None else math.fsum(score.logprob for score in self.logprobs)


@dataclass
class Generated:
    """The answers to one prompt."""

    prompt_tokens: tuple[int, ...]
    completions: list[Completion]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """One model in this process. Not safe for several threads. Close it, or use it in a `with`."""

    def __init__(self, model: str | EngineConfig) -> None:
        """`model`: a path or URI to load with default settings, or a whole configuration.

        Raises:
            ConfigError: a setting cannot be used.
            ValueError: the weights or the tokenizer cannot be loaded.
        """
        self.config = model if isinstance(model, EngineConfig) else EngineConfig(model=ServedModelConfig(path=model))
        refuse_copies(self.config)
        self.config, _ = with_fetched_model(self.config)
        self.tokenizer = Tokenizer.open(self.config.model.path)
        self._engine: LLMEngine | None
        self._engine, self.plan = build_engine(self.config)
        self._number = 0

    @property
    def engine(self) -> LLMEngine:
        """The engine. Raises EngineClosed."""
        if self._engine is None:
            raise EngineClosed(f"the engine of {self.config.model.path} is closed: make a new LLM")
        return self._engine

    def __enter__(self) -> Self:
        _ = self.engine
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release processes and memory. May be called twice; nothing can be generated any more."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[[int, int], None] = True,
    ) -> list[Generated]:
        """Answer all prompts, batched as they fit; answers come in the order of the prompts.

        `progress`: whether a bar is shown, or what is called instead after each step, with the numbers of answered
        prompts and output tokens.

        Raises:
            RequestRefused: a prompt or its parameters cannot be served; nothing is left running.
            EngineClosed: it was closed.
        """
        batch = _Batch(self.engine, self.tokenizer, [self._tokens(prompt) for prompt in _listed(prompts)], params)
        try:
            shown = nullcontext(progress) if callable(progress) else shown_progress(len(batch.waiting), progress)
            with own_threads(self.plan.threads), shown as bar:
                while batch.waiting or self.engine.has_unfinished:
                    self._fill(batch)
                    for _, delta in self.engine.step():
                        batch.take(delta)
                    bar(batch.num_done, batch.num_tokens)
        except BaseException:
            self.engine.end_everything("abort")  # interrupted or refused: the next call begins with an empty engine
            raise
        return batch.answers

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> list[Generated]:
        """Find the most probable outputs of each prompt, `width` of them, best first, with their log-probabilities.

        Outputs compare by log-probability / length ** `length_penalty`.

        Raises:
            ValueError: a limit cannot be used.
            RequestRefused: a prompt cannot be served.
            EngineClosed: it was closed.
        """
        _check_search(width, max_tokens, length_penalty)
        ends = frozenset(() if ignore_eos else self.engine.limits.eos_token_ids)
        settings = BeamSettings(width, length_penalty, ends)
        searches = [(self._tokens(prompt), BeamSearch(settings, max_tokens)) for prompt in _listed(prompts)]
        for prompt, _ in searches:
            check_prompt(self.engine.limits, prompt, SamplingParams(max_tokens=max_tokens))
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=2 * width)
        while open_ones := [(prompt, search) for prompt, search in searches if not search.done]:
            asked = [(*prompt, *beam.tokens) for prompt, search in open_ones for beam in search.running]
            scores = iter(self.generate(asked, params, progress=False))
            for _, search in open_ones:
                search.step([_first_score(next(scores)) for _ in search.running])
        return [Generated(prompt, self._completions(prompt, search.ended)) for prompt, search in searches]

    def _completions(self, prompt: tuple[int, ...], beams: Sequence[Beam]) -> list[Completion]:
        made = []
        for choice, beam in enumerate(beams):
            text = OutputText(self.tokenizer.detokenizer(skip_special_tokens=True, prompt=prompt))
            shown = text.add(beam.tokens).text + text.finish().text
            reason: FinishReason = "length" if beam.end_token is None else "stop"
            made.append(Completion(choice, shown, list(beam.tokens), list(beam.scores), reason))
        return made

    def _fill(self, batch: _Batch) -> None:
        """Queue as many prompts as the queue takes."""
        while batch.waiting and len(self.engine.scheduler.waiting) < self.engine.scheduler.max_queued_requests:
            batch.add(batch.waiting.pop(), f"llm-{self._number}")
            self._number += 1

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt. Raises TypeError."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        try:
            return tuple(map(operator.index, prompt))
        except TypeError:
            raise _no_prompts(prompt) from None


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    """Compute with so many threads: another engine of this process, or the script, may have set its own number."""
    others = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(others)


def refuse_copies(config: EngineConfig) -> None:
    """Refuse several copies of the model, which need processes of their own. Raises ConfigError."""
    data = config.parallelism.data
    if data > 1:
        raise ConfigError(f"parallelism.data must be 1 for an engine in this process, got {data}")


def _first_score(answer: Generated) -> TokenLogprobs:
    scores = answer.completions[0].logprobs
    assert scores, "one token was asked for, with its score"
    return scores[0]


class _Batch:
    """The prompts of one call and their answers so far."""

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: Tokenizer,
        prompts: list[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> None:
        one = SamplingParams() if params is None else params
        self.params = [one] * len(prompts) if isinstance(one, SamplingParams) else list(one)
        if wrong := [each for each in self.params if not isinstance(each, SamplingParams)]:
            raise TypeError(f"params must be SamplingParams, got {type(wrong[0]).__name__}")
        if len(self.params) != len(prompts):
            raise ValueError(
                f"params must be one for all or one for each of {len(prompts)} prompts, got {len(self.params)}"
            )
        self.engine, self.tokenizer = engine, tokenizer
        self.answers = [
            Generated(prompt, [Completion(choice) for choice in range(one.n)])
            for prompt, one in zip(prompts, self.params, strict=True)
        ]
        self.waiting = list(reversed(range(len(prompts))))
        self.num_done = 0
        self.num_tokens = 0
        self._index: dict[str, int] = {}
        self._texts: dict[tuple[str, int], OutputText] = {}

    def add(self, index: int, request_id: str) -> None:
        params, prompt = self.params[index], self.answers[index].prompt_tokens
        self.engine.add_request(request_id, prompt, params)
        self._index[request_id] = index
        for choice in range(params.n):
            self._texts[request_id, choice] = OutputText(
                self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens, prompt=prompt),
                params.stop,
                include_stop=params.include_stop,
                min_tokens=params.min_tokens,
            )

    def take(self, delta: Delta) -> None:
        """Add one delta to its answer; a stop text ends the choice."""
        index = self._index[delta.request_id]
        answer = self.answers[index]
        completion = answer.completions[delta.choice]
        text = self._texts[delta.request_id, delta.choice]
        piece = text.add(delta.tokens)
        completion.text += piece.text
        completion.tokens += delta.tokens[: piece.num_tokens]
        self.num_tokens += piece.num_tokens
        if delta.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or []), *delta.logprobs[: piece.num_tokens]]
        answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        if piece.stopped:
            self.engine.finish_choice(delta.request_id, delta.choice)
            self._done(answer, completion, "stop", piece.stop)
        elif delta.finish_reason is not None:
            rest = text.finish()
            completion.text += rest.text
            completion.error, completion.facts = delta.error, delta.facts
            named = delta.stop_token if delta.stop_token in self.params[index].stop_token_ids else None
            reason = "stop" if rest.stopped else delta.finish_reason
            self._done(answer, completion, reason, named if rest.stop is None else rest.stop)

    def _done(self, answer: Generated, completion: Completion, reason: FinishReason, stop: str | int | None) -> None:
        completion.finish_reason, completion.stop_reason = reason, stop
        self.num_done += all(other.finish_reason is not None for other in answer.completions)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt as a list of one. Raises TypeError."""
    is_tokens = isinstance(prompts, Sequence) and _is_list(prompts) and prompts and isinstance(prompts[0], int)
    if isinstance(prompts, str) or is_tokens:
        return [prompts]  # type: ignore[list-item]
    if _is_list(prompts) and all(isinstance(prompt, str) or _is_list(prompt) for prompt in prompts):
        return prompts  # type: ignore[return-value]
    raise _no_prompts(prompts)


def _is_list(value: object) -> bool:
    """Whether a value has items in an order, and is no text: the keys of a mapping are no prompts, bytes no tokens."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping | Set)


def _no_prompts(value: object) -> TypeError:
    return TypeError(f"prompts must be texts or lists of token ids, got {reprlib.repr(value)}")


def _check_search(width: int, max_tokens: int, length_penalty: float) -> None:
    """Refuse limits that no search can have. Raises ValueError."""
    whole = all(isinstance(number, int) for number in (width, max_tokens))
    if not whole or not 1 <= width <= MAX_WIDTH or max_tokens < 1:
        raise ValueError(f"width must be from 1 to {MAX_WIDTH} and max_tokens at least 1, got {width}, {max_tokens}")
    if not abs(length_penalty) <= MAX_LENGTH_PENALTY:  # a nan is nowhere
        most = f"{MAX_LENGTH_PENALTY:g}"
        raise ValueError(f"length_penalty must be from -{most} to {most}, got {length_penalty}")


class _Bar:
    """A progress bar over prompts, with the rate of tokens."""

    def __init__(self, display: Progress, total: int) -> None:
        self.display, self.began_s = display, time.monotonic()
        self.task = display.add_task("Generating", total=total, rate="")

    def __call__(self, num_done: int, num_tokens: int) -> None:
        seconds = max(time.monotonic() - self.began_s, 1e-9)
        self.display.update(self.task, completed=num_done, rate=f"{num_tokens / seconds:,.0f} tokens/s")


@contextmanager
def shown_progress(total: int, visible: bool) -> Iterator[_Bar]:
    """Show a progress bar with the throughput on standard error, if `visible`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), disable=not visible, console=Console(stderr=True)) as display:
        yield _Bar(display, total)
