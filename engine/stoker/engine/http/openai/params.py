"""Sampling parameters from a body's fields and the model's defaults, checked.

Pure; called by `front`. The result is a `SamplingParams`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.engine.errors import RequestRefused
from stoker.engine.http.beam_search import MAX_LENGTH_PENALTY, MAX_WIDTH, BeamSettings
from stoker.engine.http.errors import bad_request, from_refusal, too_long
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, GenerationBody
from stoker.engine.sampling import MAX_LOGPROBS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`."""
NOT_SEARCHED = {
    "stop": "stop", "stop_token_ids": "stop_token_ids", "min_tokens": "min_tokens", "logit_bias": "logit_bias",
    "bad_token_ids": "bad_token_ids", "bad_sequences": "bad_words", "allowed_token_ids": "allowed_token_ids",
    "grammar": "response_format", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "prompt_logprobs": "prompt_logprobs",
}  # fmt: skip
"""Parameters that a beam search does not follow -> the field that names them."""
PLAIN = SamplingParams()
DEFAULTS_FILE = "generation_config.json"
Tokens = tuple[int, ...]
TokenSequences = tuple[Tokens, ...]


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of the model's `generation_config.json` for fields that a request leaves out; shown in `/v1/models`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Read the model's own defaults, or OpenAI's where it has none. `do_sample: false` means greedy.

        Raises:
            ValueError: the file is there and cannot be used.
        """
        path = folder / DEFAULTS_FILE
        if not path.is_file():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        values: dict[str, Any] = {
            name: content[name] for name in cls.__dataclass_fields__ if content.get(name) is not None
        }
        if content.get("do_sample") is False and "temperature" not in values:
            values["temperature"] = 0.0
        try:
            SamplingParams(**values)
        except RequestRefused as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(**values)


def completion_params(
    body: CompletionBody, defaults: GenerationDefaults, room: int, bad_sequences: TokenSequences = ()
) -> SamplingParams:
    """Build the parameters of one prompt of `/v1/completions` after which `room` tokens fit."""
    limit = min(output_limit(body), max(room, 1)) if body.max_tokens is None else body.max_tokens
    scores = body.num_logprobs
    asked = [number for number in (scores if body.echo else None, body.prompt_logprobs) if number is not None]
    params = _params(body, defaults, limit, scores, max(asked, default=None), bad_sequences)
    if not body.picks_best or body.use_beam_search:
        return params
    try:
        return replace(params, n=body.num_choices, logprobs=scores or 0)
    except RequestRefused as refused:
        raise bad_request(str(refused).replace("n must", "best_of must", 1), "best_of", "invalid_value") from refused


def output_limit(body: CompletionBody) -> int:
    """The output tokens of one prompt of `/v1/completions`."""
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def chat_params(
    body: ChatBody, defaults: GenerationDefaults, room: int, bad_sequences: TokenSequences = ()
) -> SamplingParams:
    """Build the parameters of a chat request; without a limit the answer may fill the context."""
    limit = body.output_limit if body.output_limit is not None else max(room, 1)
    return _params(body, defaults, limit, body.num_logprobs, body.prompt_logprobs, bad_sequences)


def beam_settings(body: GenerationBody, params: SamplingParams, end_tokens: Iterable[int]) -> BeamSettings | None:
    """How to search for the most probable outputs; None: the request samples.

    Raises:
        ApiError: 400, a field has no effect on a search, or there are too many beams.
    """
    if not body.use_beam_search:
        return None
    if body.num_choices > MAX_WIDTH:
        field = "n" if body.num_choices == body.n else "best_of"
        message = f"{field}: at most {MAX_WIDTH} beams are searched, got {body.num_choices}"
        raise bad_request(message, field, "invalid_value")
    if not abs(body.length_penalty) <= MAX_LENGTH_PENALTY:  # a nan is nowhere
        message = f"length_penalty: must be from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise bad_request(f"{message}, got {body.length_penalty}", "length_penalty", "invalid_value")
    fields = {**NOT_SEARCHED, **_named_by(body, params)}
    for name, field in fields.items():
        if getattr(params, name) != getattr(PLAIN, name):
            beside = "logprobs and use_beam_search" if field == "echo" else "use_beam_search"
            raise bad_request(f"{field}: not allowed with {beside}", field, "invalid_value")
    return BeamSettings(body.num_choices, body.length_penalty, frozenset(() if body.ignore_eos else end_tokens))


def _named_by(body: GenerationBody, params: SamplingParams) -> dict[str, str]:
    """The fields of parameters that several fields can give."""
    scored = {} if body.prompt_logprobs is not None else {"prompt_logprobs": "echo"}
    return {**scored, **({"grammar": params.grammar.field} if params.grammar is not None else {})}


def truncated(body: GenerationBody, prompt: Tokens, max_model_len: int, output_tokens: int | None) -> Tokens:
    """The part of a prompt that `truncate_prompt_tokens` keeps; `output_tokens`: the output's limit."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    keep = max(max_model_len - (1 if output_tokens is None else output_tokens), 1) if keep == -1 else keep
    return prompt[:keep] if body.truncation_side == "right" else prompt[-keep:]


def check_length(body: CompletionBody | ChatBody, max_model_len: int, prompt_tokens: int, output_tokens: int) -> None:
    """Refuse what does not fit into the context, with the numbers and the field that has to change."""
    if prompt_tokens == 0:
        raise bad_request(f"{body.prompt_field}: at least one token is needed", body.prompt_field, "invalid_value")
    if prompt_tokens + output_tokens > max_model_len:
        fits = prompt_tokens < max_model_len
        raise too_long(max_model_len, prompt_tokens, output_tokens, body.limit_field if fits else body.prompt_field)


def _params(
    body: CompletionBody | ChatBody,
    defaults: GenerationDefaults,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_sequences: TokenSequences,
) -> SamplingParams:
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise bad_request(f"logprobs: must be from 0 to {MAX_LOGPROBS}, got {logprobs}", "logprobs", "invalid_value")
    try:
        return SamplingParams(
            n=body.n,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            temperature=_or(body.temperature, defaults.temperature),
            top_p=_or(body.top_p, defaults.top_p),
            top_k=body.top_k if body.top_k is not None else defaults.top_k,
            min_p=_or(body.min_p, defaults.min_p),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
            logit_bias=body.biases,
            seed=body.seed if body.seed is not None else secrets.randbits(63),
            stop=body.stops,
            include_stop=body.include_stop_str_in_output,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            bad_token_ids=tuple(body.bad_token_ids or ()),
            bad_sequences=bad_sequences,
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            grammar=body.output_grammar,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=body.skip_special_tokens,
            cache_salt=body.cache_salt,
        )
    except RequestRefused as refused:
        raise from_refusal(_with_limit_field(refused, body)) from refused


def _with_limit_field(refused: RequestRefused, body: CompletionBody | ChatBody) -> RequestRefused:
    """The refusal with the name under which the body has the limit of the output."""
    return RequestRefused(refused.kind, str(refused).replace("max_tokens", body.limit_field), refused.field)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
