"""The way of one job's output at the front: what the core has computed comes in, text goes out, usage is counted.

One object per job, made by `Generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stoker.engine.core.core_client import RunningRequest
from stoker.engine.core.messages import Delta, RequestFacts
from stoker.engine.http.beam_search import Beam
from stoker.engine.http.errors import ApiError, bad_request, engine_lost
from stoker.engine.http.job import Job, Usage
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.http.text import OutputText, Piece
from stoker.engine.http.update import Finish, Update
from stoker.pod.causes import Cause


class JobFollower:
    """Follows the choices of one job: text, usage, metrics."""

    def __init__(
        self, number: int, job: Job, usage: Usage, texts: Sequence[OutputText], metrics: FrontMetrics,
        clock: Callable[[], float], load: LoadLedger, rank: int,
    ) -> None:  # fmt: skip
        self._load, self._rank = load, rank
        self._number = number
        self._job = job
        self._usage = usage
        self._texts = texts
        """One for each choice."""
        self._metrics = metrics
        self._clock = clock
        self._started = False
        self._seen_s: dict[int, float] = {}
        self._facts: dict[int, RequestFacts] = {}
        ended = {choice: one for choice, one in enumerate(job.emitted) if one.ended}
        self._output_tokens: dict[int, int] = {choice: one.num_tokens for choice, one in ended.items()}
        """Output tokens of each choice that has ended."""

    def follow(self, delta: Delta, running: RunningRequest) -> Update:
        """Turn a delta into an update.

        Raises:
            ApiError: the core gave the choice up.
        """
        self._note_start()
        if delta.facts is not None:
            self._facts[delta.choice] = self._usage.facts[delta.choice] = delta.facts
            self._usage.cached_tokens = max(self._usage.cached_tokens, delta.facts.cached_tokens)
        if delta.finish_reason in ("error", "abort"):
            self._metrics.finished(self._facts.get(delta.choice))
            raise given_up(delta)
        piece = self._piece(delta)
        self._count(delta, piece)
        if piece.stopped and delta.finish_reason is None:
            running.finish(delta.choice)
        finish: Finish | None = "stop" if piece.stopped else _finish(delta)
        if finish is not None:
            self._finish_choice(delta.choice, self._final_facts(delta, piece))
        return self._update(delta, piece, finish)

    def follow_beam(self, choice: int, beam: Beam) -> Update:
        """Turn a whole output of a search into the update of its choice."""
        self._note_start()
        count = self._job.params.logprobs
        scores = tuple(replace(score, top=score.top[:count]) for score in beam.scores) if count is not None else None
        reason: Finish = "length" if beam.end_token is None else "stop"
        self._facts[choice] = replace(self._usage.facts[choice], output_tokens=beam.num_tokens)
        delta = Delta(
            self._job.id, choice, beam.tokens, scores, None, reason, beam.end_token, None, self._facts[choice]
        )
        piece = self._piece(delta)
        self._count(delta, piece)
        self._finish_choice(choice, self._facts[choice])
        return self._update(delta, piece, reason)

    def _note_start(self) -> None:
        """Count the job, once: a core that refuses it sends no output."""
        if not self._started:
            self._started = True
            self._metrics.started(self._job.params)

    def _finish_choice(self, choice: int, facts: RequestFacts | None) -> None:
        if facts is not None:
            self._usage.facts[choice] = facts
        self._metrics.finished(facts)
        self._output_tokens[choice] = facts.output_tokens if facts is not None else 0
        if len(self._output_tokens) == self._job.params.n:
            self._metrics.finished_request(max(self._output_tokens.values()))

    def _piece(self, delta: Delta) -> Piece:
        piece = self._texts[delta.choice].add(delta.tokens)
        if delta.finish_reason is None or piece.stopped:
            return piece
        rest = self._texts[delta.choice].finish()
        return Piece(piece.text + rest.text, piece.num_tokens, piece.offsets, rest.stop)

    def _count(self, delta: Delta, piece: Piece) -> None:
        """Count usage and observe times. An end token counts, because it was generated."""
        self._usage.completion_tokens += piece.num_tokens + (delta.stop_token is not None and not piece.stopped)
        now = self._clock()
        before = self._seen_s.get(delta.choice)
        if before is None:
            self._metrics.first_token(now - self._job.arrival_s)
        elif delta.tokens:
            self._metrics.more_tokens(now - before, len(delta.tokens))
            self._load.gap((now - before) / len(delta.tokens), self._rank)
        self._seen_s[delta.choice] = now

    def _final_facts(self, delta: Delta, piece: Piece) -> RequestFacts | None:
        """Return the facts of a choice that ended. After a stop text they are brought up to date: those of its first
        delta, and those of its last one where tokens behind the text came with it."""
        facts = self._facts.get(delta.choice)
        is_last = delta.finish_reason is not None and piece.num_tokens == len(delta.tokens)
        if facts is None or (is_last and delta.facts is facts):
            return facts
        now = self._clock()
        count = self._texts[delta.choice].num_tokens
        return replace(facts, output_tokens=count, last_token_s=now, finished_s=now)

    def _update(self, delta: Delta, piece: Piece, finish: Finish | None) -> Update:
        count = piece.num_tokens
        named = delta.stop_token if delta.stop_token in self._job.params.stop_token_ids else None
        return Update(
            job=self._number,
            choice=delta.choice,
            text=piece.text,
            tokens=delta.tokens[:count],
            offsets=piece.offsets,
            logprobs=delta.logprobs[:count] if delta.logprobs is not None else None,
            prompt_logprobs=delta.prompt_logprobs,
            finish=finish,
            stop_reason=named if piece.stop is None else piece.stop,
            end_token=None if piece.stopped else delta.stop_token,
            end_logprob=None if piece.stopped else end_logprob(delta),
        )


def _finish(delta: Delta) -> Finish | None:
    return delta.finish_reason if delta.finish_reason in ("stop", "length") else None


def end_logprob(delta: Delta) -> float | None:
    """The log-probability of the end or stop token; None where there is none, or it is not known."""
    behind = (delta.logprobs or ())[len(delta.tokens) :]
    return behind[0].logprob if behind else None


def given_up(delta: Delta) -> ApiError:
    """The error of a choice that the core gave up."""
    if delta.finish_reason == "abort":
        return ApiError(
            503,
            "The engine is shutting down; the answer is not complete. Send the request again.",
            code="aborted",
            retry_after_s=1,
        )
    if delta.error is not None and delta.error.startswith(f"{Cause.RANK_FAILED}: "):
        return engine_lost(delta.error)  # the core ends with all its requests; another engine can go on
    if delta.error_field is not None:
        message = f"{delta.error_field}: the answer cannot go on: {delta.error}"
        return bad_request(message, delta.error_field, "invalid_value")
    return ApiError(500, f"The request failed: {delta.error or 'no reason was given'}", code="generation_failed")
