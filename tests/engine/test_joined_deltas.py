"""Deltas that wait for a busy front come to the client joined: the same answer in fewer pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from stoker.engine.core.core_client import CoreLost, News, RunningRequest
from stoker.engine.core.joined_deltas import MOST_JOINED, joined
from stoker.engine.core.messages import AddRequest, Delta, FinishReason, Message, Refused, RequestFacts
from stoker.engine.errors import RequestRefused
from stoker.engine.http.errors import ApiError
from stoker.engine.http.job import Job, Usage
from stoker.engine.http.job_follower import JobFollower
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.text import OutputText
from stoker.engine.http.update import Update
from stoker.engine.sampling import SamplingParams
from testing.engine.fake_core import ByteCodec, scored
from testing.engine.serving import run

REASONS: tuple[FinishReason, ...] = ("stop", "length", "error", "abort")


@dataclass
class Seen:
    """What a client got of one choice."""

    pieces: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)
    end: tuple[Any, ...] | None = None

    def take(self, update: Update) -> None:
        assert self.end is None, "nothing follows the end"
        self.pieces += 1
        self.text += update.text
        self.tokens += update.tokens
        self.offsets += update.offsets
        self.scores += update.logprobs or ()
        self.prompt_scores += update.prompt_logprobs or ()
        if update.finish is not None:
            self.end = update.finish, update.stop_reason, update.end_token

    @property
    def answer(self) -> tuple[Any, ...]:
        return self.text, self.tokens, self.offsets, self.scores, self.prompt_scores, self.end


def ignore(message: Message) -> None:
    """The way to a core that needs to hear nothing."""


def facts(tokens: int) -> RequestFacts:
    return RequestFacts(3, 1, tokens, 0, 0.0, 1.0, 2.0, 3.0, 4.0)


@st.composite
def outputs(draw: st.DrawFn) -> list[Delta]:
    """The deltas of a request in the order of its steps: text of few letters, so that stop texts are found."""
    lines = []
    for choice in range(draw(st.integers(1, 3))):
        steps = draw(
            st.lists(st.lists(st.sampled_from(b"abcd\xc3\xa4"), min_size=1, max_size=3), min_size=1, max_size=8)
        )
        parts, count = [], 0
        for number, tokens in enumerate(steps):
            count += len(tokens)
            scores = tuple(scored(token, 1) for token in tokens)
            prompt = (None, scored(1, 1)) if number == 0 and choice == 0 else None
            parts.append(Delta("r", choice, tuple(tokens), scores, prompt, facts=facts(1) if number == 0 else None))
        reason = draw(st.sampled_from(REASONS))
        end_token = 257 if reason == "stop" else None
        count += reason == "stop"
        parts[-1] = parts[-1]._replace(finish_reason=reason, stop_token=end_token, facts=facts(count), error="broken")
        lines.append(parts)
    order = draw(st.permutations([choice for choice, parts in enumerate(lines) for _ in parts]))
    left = [iter(parts) for parts in lines]
    return [next(left[choice]) for choice in order]


async def followed(
    deltas: Sequence[Delta], cuts: Sequence[int], stops: tuple[str, ...]
) -> tuple[dict[int, Seen], Usage, str]:
    """What a client sees of a request whose deltas reach a front in groups that begin at `cuts`, and its error."""
    count = 1 + max(delta.choice for delta in deltas)
    job = Job("r", (1, 2, 3), SamplingParams(max_tokens=99, n=count, logprobs=1, stop=stops), 0.0)
    running = RunningRequest(ignore, AddRequest("r", job.prompt_tokens, job.params, 0.0))
    codec, usage, seen = ByteCodec(Path()), Usage(3), {choice: Seen() for choice in range(count)}
    texts = [OutputText(codec.detokenizer(skip_special_tokens=True), stops) for _ in range(count)]
    metrics = FrontMetrics(CollectorRegistry(), "tiny")
    follower = JobFollower(0, job, usage, texts, metrics, lambda: 5.0, LoadLedger(), 0)

    async def take() -> str:
        try:
            async for delta in running.deltas():
                update = follower.follow(delta, running)
                seen[update.choice].take(update)
        except ApiError as error:
            return str(error)
        return ""

    taking = asyncio.create_task(take())
    for number, delta in enumerate(deltas):
        running.news.put_nowait(delta)
        while number + 1 in cuts and not running.news.empty() and not taking.done():
            await asyncio.sleep(0)
    return seen, usage, await asyncio.wait_for(taking, 30)


@given(outputs(), st.data(), st.sampled_from([(), ("ab",), ("b", "cc"), ("dab",)]))
def test_joined_deltas_give_the_answer_of_single_ones(deltas: list[Delta], data: st.DataObject, stops: Any) -> None:
    cuts = data.draw(st.sets(st.integers(0, len(deltas))), label="cuts")
    alone, counted, failed = run_result(followed(deltas, range(len(deltas) + 1), stops))
    together, counted_together, failed_together = run_result(followed(deltas, sorted(cuts), stops))
    assert bool(failed_together) is bool(failed)
    for choice, seen in together.items():
        if not failed:
            assert seen.answer == alone[choice].answer
            assert seen.pieces <= alone[choice].pieces
        else:  # the answer ends with the first failure; what came before it in the same group is seen in full
            assert seen.text.startswith(alone[choice].text)
    if not failed:
        assert counted_together.completion_tokens == counted.completion_tokens
        sizes = [
            {choice: one.output_tokens for choice, one in each.facts.items()} for each in (counted, counted_together)
        ]
        assert sizes[0] == sizes[1]


def run_result(work: Any) -> Any:
    return asyncio.run(work)


def test_what_waits_of_a_choice_is_one_delta() -> None:
    first = Delta("r", 0, (1,), (scored(1, 0),), (None,), facts=facts(1))
    more = [Delta("r", 0, (token,), (scored(token, 0),)) for token in (2, 3)]
    last = Delta("r", 0, (), None, None, "stop", 257, facts=facts(4))
    (one,) = joined([first, *more, last])
    assert one.tokens == (1, 2, 3)
    assert one.logprobs == tuple(scored(token, 0) for token in (1, 2, 3))
    assert (one.prompt_logprobs, one.finish_reason, one.stop_token, one.facts) == ((None,), "stop", 257, facts(4))
    assert joined([first, more[0]])[0].facts == facts(1), "the core sends facts with the first delta and the last"


def test_output_before_a_failure_of_another_choice_is_seen() -> None:
    failure = Delta("r", 0, (), finish_reason="error", error="broken")
    before, beside = Delta("r", 0, (1,)), Delta("r", 1, (2,))
    assert joined([before, failure, beside]) == [before, beside, failure]


def test_what_a_client_did_not_read_for_long_comes_in_events_of_a_bounded_size() -> None:
    async def scenario() -> None:
        running = RunningRequest(ignore, AddRequest("r", (1,), SamplingParams(), 0.0))
        count = 2 * MOST_JOINED + 10
        for token in range(count):
            running.news.put_nowait(Delta("r", 0, (token,), finish_reason="length" if token == count - 1 else None))
        pieces = [delta.tokens async for delta in running.deltas()]
        assert [len(piece) for piece in pieces] == [MOST_JOINED, MOST_JOINED, 10]
        assert [token for piece in pieces for token in piece] == list(range(count))

    run(scenario)


@pytest.mark.parametrize(
    ("end", "error"),
    [(Refused("r", "queue_full", "no room"), RequestRefused), (CoreLost("the core ended"), CoreLost)],
)
def test_output_before_the_end_of_a_core_is_seen(end: News, error: type[Exception]) -> None:
    async def scenario() -> None:
        running = RunningRequest(ignore, AddRequest("r", (1,), SamplingParams(), 0.0))
        for news in (Delta("r", 0, (1,)), Delta("r", 0, (2,)), end, Delta("r", 0, (3,))):
            running.news.put_nowait(news)
        got = running.deltas()
        assert (await anext(got)).tokens == (1, 2)
        with pytest.raises(error):
            await anext(got)

    run(scenario)
