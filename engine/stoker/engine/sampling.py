"""Sampling parameters of one request: checked values without behaviour. Imports no torch, because fronts use them.

Made by `http/openai/params` or by the caller of `LLM`; read by engine and sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stoker.engine.errors import RequestRefused
from stoker.engine.output_grammar import OutputGrammar

MAX_LOGPROBS = 20
"""Of a request, for each token."""
MAX_SCORED = 128
"""Most probable tokens of a position that the engine tells at all: a search needs two for each beam."""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGIT_BIASES = 1024
MAX_BAD_SEQUENCES = 256
MAX_BAD_TOKENS = 64
"""Tokens of one bad sequence."""
SEED_LIMIT = 2**63
COUNT_LIMIT = 2**31
"""Upper bound of token ids and limits, which tensors hold as int32."""
COLDEST = 1e-6
"""Lower temperatures count as 0: the best token has all probability, and quotients would not be finite."""
MAX_SHOWN = 60
"""Characters of a wrong value that an error quotes."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's choices. Every wrong value raises `RequestRefused` (kind `invalid`) that names the field.

    Order of work on the raw logits: grammar, allowed tokens and bad sequences, bad tokens and `min_tokens`, logit bias,
    repetition, frequency and presence penalties, temperature, min-p, top-k, top-p (over what top-k left). Equal logits
    at a threshold are all kept.
    """

    n: int = 1
    """Independent answers to one prompt; they share its cache blocks."""
    max_tokens: int | None = None
    """Most output tokens; default: up to the model's length. 0: the prompt alone is computed, and may be as
    long."""
    min_tokens: int = 0
    """Number of output tokens before an end or stop token can be chosen."""
    temperature: float = 1.0
    """0 is greedy, and so is any value too small to divide by."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    """Drops tokens less probable than this share of the most probable one."""
    presence_penalty: float = 0.0
    """Subtracted from each token that is already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that are in prompt or output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Random numbers depend on (seed, choice, position) only. The front, or `LLM`, draws a missing one."""
    stop: tuple[str, ...] = ()
    """Texts that end the output. The front, or `LLM`, finds them in the text; the core does not see text."""
    include_stop: bool = False
    """Keep the stop text in the output."""
    stop_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that never come: after all but its last token, the last one is never chosen."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be chosen, beside the end tokens if they are among them; None: all."""
    grammar: OutputGrammar | None = None
    """What the whole output must be. An output that `max_tokens` cuts follows it as far as it goes. It ends when the
    grammar is complete, even before `min_tokens`."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most probable tokens to report beside the chosen one, from the raw logits; 0 to 128, at the API 20."""
    prompt_logprobs: int | None = None
    """As `logprobs` (0 to 20), for each token of the prompt. Such a request does not read the prefix cache."""
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    """Blocks of the cache are shared only between requests with the same one, or with none."""

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_numbers(self)
        _check_lists(self)

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is simply the largest raw logit."""
        return (
            self.greedy
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.min_tokens == 0
            and not self.logit_bias
            and not self.bad_token_ids
            and not self.penalised
            and not self.constrained
        )

    @property
    def prompt_only(self) -> bool:
        """Whether there is no output. One token is sampled, as behind every prompt, and dropped."""
        return self.max_tokens == 0

    @property
    def constrained(self) -> bool:
        """Whether the tokens that may be chosen are given as a mask at each step."""
        return self.grammar is not None or self.allowed_token_ids is not None or bool(self.bad_sequences)

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name in ("logit_bias", "stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise _refused(name, token, f"token ids from 0 to {vocab_size - 1}")
        for token in (token for sequence in self.bad_sequences for token in sequence):
            if not 0 <= token < vocab_size:
                raise _refused("bad_sequences", token, f"token ids from 0 to {vocab_size - 1}")

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


def _check_counts(params: SamplingParams) -> None:
    _integer("n", params.n, 1, MAX_CHOICES)
    _integer("min_tokens", params.min_tokens, 0, None)
    _integer("top_k", params.top_k, -1, COUNT_LIMIT - 1)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 0, None)
        if params.min_tokens > params.max_tokens:
            raise _refused("min_tokens", params.min_tokens, f"at most max_tokens, {params.max_tokens}")
    if params.seed is not None:
        _integer("seed", params.seed, -SEED_LIMIT, SEED_LIMIT - 1)
    for name, most in (("logprobs", MAX_SCORED), ("prompt_logprobs", MAX_LOGPROBS)):
        if getattr(params, name) is not None:
            _integer(name, getattr(params, name), 0, most)


def _check_numbers(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0.0, 100.0)
    _number("top_p", params.top_p, 0.0, 1.0, above=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)


def _check_lists(params: SamplingParams) -> None:
    _check_kinds(params)
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise _refused("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_LOGIT_BIASES} entries")
    for token, bias in params.logit_bias.items():
        _integer("logit_bias", token, 0, COUNT_LIMIT - 1)
        _number("logit_bias", bias, -100.0, 100.0)
    if len(params.stop) > MAX_STOPS:
        raise _refused("stop", f"{len(params.stop)} texts", f"at most {MAX_STOPS} texts")
    for text in params.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise _refused("stop", text, f"texts of 1 to {MAX_STOP_CHARACTERS} characters")
    for name in ("stop_token_ids", "bad_token_ids"):
        tokens = getattr(params, name)
        if len(tokens) > MAX_LOGIT_BIASES:
            raise _refused(name, f"{len(tokens)} tokens", f"at most {MAX_LOGIT_BIASES} tokens")
        for token in tokens:
            _integer(name, token, 0, COUNT_LIMIT - 1)
    _check_constraints(params)


def _check_kinds(params: SamplingParams) -> None:
    """Refuse a single value where several are meant: the characters of a text would be stop texts."""
    if not isinstance(params.logit_bias, Mapping):
        raise _refused("logit_bias", params.logit_bias, "a mapping of token ids to numbers")
    if params.grammar is not None and not isinstance(params.grammar, OutputGrammar):
        raise _refused("grammar", params.grammar, "an OutputGrammar")
    if params.cache_salt is not None and (not isinstance(params.cache_salt, str) or not params.cache_salt):
        raise _refused("cache_salt", params.cache_salt, "a text that is not empty")
    for name, of in (("stop", "texts"), ("stop_token_ids", "token ids"), ("bad_token_ids", "token ids")):
        _sequence(name, getattr(params, name), of)
    if params.allowed_token_ids is not None:
        _sequence("allowed_token_ids", params.allowed_token_ids, "token ids")
    _sequence("bad_sequences", params.bad_sequences, "sequences of token ids")
    for sequence in params.bad_sequences:
        _sequence("bad_sequences", sequence, "token ids")


def _check_constraints(params: SamplingParams) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise _refused("allowed_token_ids", [], "a list of at least one token")
    for token in params.allowed_token_ids or ():
        _integer("allowed_token_ids", token, 0, COUNT_LIMIT - 1)
    if len(params.bad_sequences) > MAX_BAD_SEQUENCES:
        allowed = f"at most {MAX_BAD_SEQUENCES} sequences"
        raise _refused("bad_sequences", f"{len(params.bad_sequences)} sequences", allowed)
    for sequence in params.bad_sequences:
        if not 0 < len(sequence) <= MAX_BAD_TOKENS:
            raise _refused("bad_sequences", sequence, f"sequences of 1 to {MAX_BAD_TOKENS} tokens")
        for token in sequence:
            _integer("bad_sequences", token, 0, COUNT_LIMIT - 1)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _refused(name, value, allowed)


def _sequence(name: str, value: object, of: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refused(name, value, f"a tuple of {of}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    allowed = f"a number {'above' if above else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(name, value, allowed)
    if not low <= value <= high or (above and value == low):  # a nan is nowhere
        raise _refused(name, value, allowed)


def _refused(name: str, value: object, allowed: str) -> RequestRefused:
    shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}... ({len(shown)} characters)"
    return RequestRefused("invalid", f"{name} must be {allowed}, got {shown}", name)
