"""The run of a beam search at the core: a request of one token for each beam and step.

A step's prompt is the one before with one token more, so the prefix cache holds all but the last block, which beams
share as long as they agree. Called by `generation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.engine.core.core_group import Cores
from stoker.engine.core.messages import AddRequest, Delta, RequestFacts
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.beam_search import Beam, BeamSearch, BeamSettings
from stoker.engine.sampling import SamplingParams


@dataclass
class BeamRun:
    """One prompt's search."""

    core: Cores
    request: AddRequest
    """The prompt, with the limit of the outputs in its parameters."""
    settings: BeamSettings
    given_up: Callable[[Delta], Exception]
    """Makes the error of a step that the core gave up."""
    on_step: Callable[[RequestFacts], None]
    """Called with the facts of the first step's request, brought up to date after each step."""
    facts: RequestFacts | None = None
    rank: int = 0
    """The data rank that has the beams, for the blocks that they share."""

    async def beams(self) -> list[Beam]:
        """Search to the end; return the best outputs, best first.

        Raises:
            RequestRefused: the core did not take a step's request.
            CoreLost: the core ended.
        """
        max_tokens = self.request.params.max_tokens
        assert max_tokens is not None, "the front sets a limit"
        search = BeamSearch(self.settings, max_tokens)
        number = 0
        while not search.done:
            search.step(await self._step(number, search.running))
            number += 1
        return search.ended

    async def _step(self, number: int, running: list[Beam]) -> list[TokenLogprobs]:
        asked = (self._scores(f"{self.request.request_id}/{number}.{i}", beam) for i, beam in enumerate(running))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        scores = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            scores.append(answer[0])
            self._follow(answer[1], number)
        return scores

    async def _scores(self, request_id: str, beam: Beam) -> tuple[TokenLogprobs, RequestFacts | None]:
        """The most probable tokens behind a beam."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=2 * self.settings.width,
            cache_salt=self.request.params.cache_salt,
        )  # fmt: skip
        prompt = (*self.request.prompt_tokens, *beam.tokens)
        with self.core.request(
            replace(self.request, request_id=request_id, prompt_tokens=prompt, params=params), self.rank
        ) as one:
            async for delta in one.deltas():
                if delta.finish_reason in ("error", "abort") or not delta.logprobs:
                    raise self.given_up(delta)
                return delta.logprobs[0], delta.facts
        raise AssertionError("a request ends with a delta")

    def _follow(self, facts: RequestFacts | None, number: int) -> None:
        if facts is None:
            return
        first = self.facts or facts
        self.facts = replace(
            first, output_tokens=number + 1, last_token_s=facts.last_token_s, finished_s=facts.finished_s
        )
        self.on_step(self.facts)
