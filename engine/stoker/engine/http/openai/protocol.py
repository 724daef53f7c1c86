"""The bodies of OpenAI's API: fields that are built, refused, or without effect.

Fields that only describe the caller (`user`, `metadata`, `store`, ...) have no effect, and neither have unknown fields.
A known field that would change the answer and is not built is refused by name.

Values; parsed by `server` and read by the front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from stoker.engine.http.errors import bad_request, not_supported, shown
from stoker.engine.http.openai.body import Body, Count, Int, Texts, Tokens
from stoker.engine.http.openai.output_format import FormattedBody
from stoker.engine.http.openai.tools import ToolUse, calls_for_template, tool_use
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import COUNT_LIMIT, MAX_LOGPROBS


def prompts_within_limit(prompt: object) -> object:
    """Refuse more prompts than are allowed, before each of them is checked."""
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise ValueError(f"at most {MAX_PROMPTS} prompts")
    return prompt


def biases_within_limit(biases: object) -> object:
    """Refuse a `logit_bias` with more tokens than any client needs, before each of them is checked."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens are allowed")
    return biases


Priority = Annotated[Int, Field(ge=-COUNT_LIMIT, lt=COUNT_LIMIT)]
MAX_PROMPTS = 2048
MAX_MESSAGES = 10_000
MAX_BIASES = 10_000
MAX_TOKEN_DIGITS = len(str(COUNT_LIMIT))
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kind of a content part -> its field with the text."""
REASONING_FIELDS = ("reasoning", "reasoning_content")
"""The names of a message's reasoning: vLLM's, and DeepSeek's, which most templates read."""


class StreamOptions(Body):
    include_usage: bool = False
    """One last chunk without choices carries `usage`."""
    continuous_usage_stats: bool = False
    """Every chunk carries the usage so far."""


class GenerationBody(FormattedBody):
    """The fields that both kinds of completion share. None stands for the model's default, listed in `/v1/models`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Int = 1
    stop: str | Texts | None = None
    seed: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(biases_within_limit)] | None = None
    min_tokens: Int = 0
    ignore_eos: bool = False
    stop_token_ids: Tokens | None = None
    bad_token_ids: Tokens | None = None
    allowed_token_ids: Tokens | None = None
    """The only tokens of the output."""
    bad_words: Texts | None = None
    """Words that never come, with or without a blank before them."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Priority = 0
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens with so many alternatives; only in whole answers."""
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    """Keep only the prompt's last tokens; -1: as many as fit beside the output."""
    truncation_side: Literal["left", "right"] = "left"
    """Where tokens are cut off; right keeps the first ones."""
    include_timing: bool = False
    """`usage.timing` has the seconds in the queue, to the first token, to the last one, and in total."""
    add_special_tokens: bool | None = None
    """Default: for prompts, not for conversations, where the template writes them."""
    use_beam_search: bool = False
    """Return the `n` most probable outputs that a search with `best_of` or `n` beams finds, without sampling."""
    length_penalty: float = 1.0
    """Of a beam search: outputs compare by log-probability / length ** this."""
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Blocks of the prefix cache are shared only between requests with the same salt, or with none."""
    return_token_ids: bool = False
    """The token ids of prompt and output are in the answer, in vLLM's form."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens `token_id:5` instead of by their text."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "logits_processors": (None, []),
        "vllm_xargs": (None, {}),
        "detokenize": (None, True),
        "thinking_token_budget": (None,),
        "repetition_detection": (None,),
        "logprob_token_ids": (None, []),
        "kv_transfer_params": (None,),
    }
    """Fields that are not built, with the values that have no effect."""

    @model_validator(mode="after")
    def _streams(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not allowed with stream=true")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: must be -1 or at least 1")
        return self

    def check_supported(self) -> None:
        """Refuse fields that are not built.

        Raises:
            ApiError: 400, names the field.
        """
        extra = self.model_extra or {}
        for name, harmless in self.refused.items():
            value = getattr(self, name) if name in type(self).model_fields else extra.get(name)
            if value not in harmless:
                raise not_supported(name, harmless)

    @property
    def num_choices(self) -> int:
        """Answers that are made for each prompt."""
        return self.n

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id.

        Raises:
            ApiError: 400, a key is not a token id.
        """
        biases = self.logit_bias or {}
        for token in biases:
            if not token.isascii() or not token.isdecimal() or len(token) > MAX_TOKEN_DIGITS:
                message = f"logit_bias: keys must be token ids (got {shown(token)})"
                raise bad_request(message, "logit_bias", "invalid_value")
        return {int(token): bias for token, bias in biases.items()}

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)], BeforeValidator(prompts_within_limit)
    ]
    max_tokens: Annotated[Count, Field(ge=0)] | None = None
    """Default 16, as OpenAI's; 0 only with `echo`, to score a prompt."""
    echo: bool = False
    logprobs: Int | bool | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None
    """Answers that are made; the `n` with the highest mean log-probability of a generated token are returned."""
    suffix: str | None = None

    prompt_field: ClassVar[str] = "prompt"
    limit_field: ClassVar[str] = "max_tokens"
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.refused,
        "suffix": (None, ""),
        "prompt_embeds": (None,),
    }

    @model_validator(mode="after")
    def _prompts(self) -> CompletionBody:
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError("prompt: at least one prompt is needed")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only allowed with echo=true")
        if self.max_tokens == 0 and self.use_beam_search:
            raise ValueError("max_tokens: 0 is not allowed with use_beam_search")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: must be at least n, {self.n}, got {self.best_of}")
        if self.picks_best and self.stream:
            raise ValueError("best_of: greater than n is not allowed with stream=true")
        return self

    @property
    def picks_best(self) -> bool:
        """Whether more answers are made than returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def num_choices(self) -> int:
        """Answers that are made for each prompt."""
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):  # all of them are, and looking at 8,192 would take 0.1 ms
            return [prompt]
        return cast("list[str | list[int]]", prompt)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to report; None: no log-probabilities."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return int(self.logprobs)


class ContentPart(Body):
    """A part of a message's content; only text is built."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def read(self) -> str:
        """Return the part's text.

        Raises:
            ApiError: 400, the part is not text.
        """
        if self.type not in TEXT_PARTS:
            raise not_supported(f"messages.content.{self.type}", ("text",))
        field = TEXT_PARTS[self.type]
        text: str | None = getattr(self, field)
        if text is None:
            message = f"messages.content.{field}: a part of type {self.type} needs it"
            raise bad_request(message, f"messages.content.{field}", "invalid_value")
        return text


class ChatMessage(Body):
    """One message; further keys are passed to the chat template."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for the template, with its content as text.

        Raises:
            ApiError: 400, a part is not text.
        """
        more = dict(self.model_extra or {})
        if more.get("tool_calls"):
            more["tool_calls"] = calls_for_template(more["tool_calls"])
        if (thought := next((more[name] for name in REASONING_FIELDS if more.get(name)), None)) is not None:
            more |= dict.fromkeys(REASONING_FIELDS, thought)
        return {**more, "role": self.role, "content": self._content()}

    def _content(self) -> str:
        """The content as one text: parts are lines of their own, as with vLLM and llama.cpp."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.read() for part in self.content)


def check_continues(continues: bool, begins: bool) -> None:
    """Refuse to go on with the last message and to begin one. Raises ValueError."""
    if continues and begins:
        raise ValueError("continue_final_message: only allowed with add_generation_prompt=false")


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    """Default: what the context has left."""
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on with the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Shown to the chat template; the model may call them."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto (the default with tools), required, one function, or the functions that may be called."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning_effort: str | None = None
    """A variable of the chat template; without effect where the template does not read it."""
    include_reasoning: bool = True
    """False: the answer's reasoning is left out."""

    prompt_field: ClassVar[str] = "messages"
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.refused,
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": (None, []),
        "echo": (None, False),
        "best_of": (None, 1),
    }

    @property
    def template_settings(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def tool_use(self) -> ToolUse:
        """The tools and how they may be called.

        Raises:
            ApiError: 400, names the field.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def output_grammar(self) -> OutputGrammar | None:
        """What the output must be; forced calls are a grammar, too."""
        chosen, forced = super().output_grammar, self.tool_use.grammar
        if chosen is not None and forced is not None:
            message = f"tool_choice: a forced call is not allowed together with {chosen.field.partition('.')[0]}"
            raise bad_request(message, "tool_choice", "invalid_value")
        return forced or chosen

    @model_validator(mode="after")
    def _alternatives(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs=true")
        check_continues(self.continue_final_message, self.add_generation_prompt)
        return self

    @property
    def limit_field(self) -> str:
        """The name under which `output_limit` was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if self.prompt is None and self.messages is None:
            raise ValueError("prompt: a text is needed, or messages")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("messages: not allowed together with prompt")
        check_continues(self.continue_final_message, self.add_generation_prompt)
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Tokens
    skip_special_tokens: bool = False
