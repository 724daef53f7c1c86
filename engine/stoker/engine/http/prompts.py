"""Between the text of a request and its token ids: render, encode, decode, echo. Run in threads by `front`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.engine.http.errors import ApiError, bad_request, shown
from stoker.engine.http.openai.completions import EchoedPrompt
from stoker.engine.http.openai.protocol import ChatBody, ChatMessage, CompletionBody, GenerationBody
from stoker.engine.http.text import TextCodec
from stoker.engine.sampling import MAX_BAD_SEQUENCES, MAX_BAD_TOKENS

OWN_SETTINGS = frozenset({"self", "messages", "add_generation_prompt", "tools"})
"""Variables of a chat template that `chat_template_kwargs` may not set."""
DEVELOPER = "developer"
USER, TOOL = "user", "tool"
STANDING_IN = "\ue000\ue001"
"""A content that no template writes by itself: characters for private use."""
INSTRUCTING = ("system", DEVELOPER)
"""Roles whose messages a shortened conversation keeps."""


def check_tokens(tokens: Sequence[int], vocab_size: int, field: str) -> None:
    """Check token ids that a client sent. Raises ApiError 400."""
    wrong = _unknown(tokens, vocab_size)
    if wrong is not None:
        raise _unknown_token(wrong, vocab_size, field)


def check_prompt(body: CompletionBody | ChatBody, tokens: Sequence[int], vocab_size: int) -> None:
    """Check the token ids of one of the body's prompts.

    Raises:
        ApiError: 400, the client sent one that the model does not have; 500, the tokenizer made it of a text.
    """
    wrong = _unknown(tokens, vocab_size)
    if wrong is None:
        return
    if isinstance(body, CompletionBody) and not any(isinstance(prompt, str) for prompt in body.prompts):
        raise _unknown_token(wrong, vocab_size, "prompt")
    message = f"The tokenizer made the token {wrong} of the prompt, and the model has those up to {vocab_size - 1}"
    raise ApiError(500, f"{message}: they do not belong together.", code="foreign_tokenizer")


def _unknown(tokens: Sequence[int], vocab_size: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocab_size), None)


def _unknown_token(token: int, vocab_size: int, field: str) -> ApiError:
    message = f"{field}: token ids from 0 to {vocab_size - 1} are allowed, got {shown(token)}"
    return bad_request(message, field, "invalid_value")


def encode(codec: TextCodec, text: str, special: bool) -> list[int]:
    return codec.encode(text, add_special_tokens=special)


def decode(codec: TextCodec, tokens: Sequence[int], skip_special_tokens: bool) -> str:
    return codec.decode(tokens, skip_special_tokens=skip_special_tokens)


def encode_all(codec: TextCodec, body: CompletionBody) -> list[tuple[int, ...]]:
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    return [tuple(encode(codec, prompt, special) if isinstance(prompt, str) else prompt) for prompt in body.prompts]


def encode_bad_words(codec: TextCodec, body: GenerationBody) -> tuple[tuple[int, ...], ...]:
    """The tokens of each bad word, at the beginning of a text and behind a blank."""
    words = body.bad_words or ()
    if len(words) > MAX_BAD_SEQUENCES // 2 or not all(word.strip() for word in words):
        message = f"bad_words: at most {MAX_BAD_SEQUENCES // 2} words that are not blank are allowed"
        raise bad_request(message, "bad_words", "invalid_value")
    spellings = (text for word in words for text in (word.strip(), f" {word.strip()}"))
    return tuple(dict.fromkeys(_bad_word(codec, text) for text in spellings))


def _bad_word(codec: TextCodec, text: str) -> tuple[int, ...]:
    tokens = tuple(encode(codec, text, False))
    if len(tokens) > MAX_BAD_TOKENS:
        message = f"bad_words: words of at most {MAX_BAD_TOKENS} tokens are allowed, got {len(tokens)} of {shown(text)}"
        raise bad_request(message, "bad_words", "invalid_value")
    return tokens


def encode_chat(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
    continues: bool = False,
    special: bool | None = None,
) -> tuple[int, ...]:
    """The prompt's token ids."""
    text = render_chat(codec, messages, add_generation_prompt, tools, settings, continues)
    return encode_rendered(codec, text, special)


def encode_rendered(codec: TextCodec, text: str, special: bool | None) -> tuple[int, ...]:
    """The token ids of a conversation's text. Most templates write the special tokens themselves; else `special`."""
    return tuple(encode(codec, text, special or False))


def render_chat(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
    continues: bool = False,
) -> str:
    """The prompt's text. `continues`: it ends with the last message's content."""
    if not codec.has_chat_template:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
    if taken := sorted(OWN_SETTINGS & settings.keys()):
        raise bad_request(
            f"chat_template_kwargs: {taken[0]} cannot be set here", "chat_template_kwargs", "invalid_value"
        )
    prepared = [_known_role(message.for_template(), codec.template_source or "") for message in messages]
    if tools:
        settings = {**settings, "tools": tools}

    def render(shown: Sequence[Mapping[str, Any]]) -> str:
        return codec.render_chat(shown, add_generation_prompt=add_generation_prompt, **settings)

    if not continues:
        return render(prepared)
    *before, last = prepared
    behind = render([*before, {**last, "content": STANDING_IN}]).rpartition(STANDING_IN)[2]
    return _until_content(render(prepared).removesuffix(behind), last["content"])


def without_oldest(codec: TextCodec, body: ChatBody, most_tokens: int) -> ChatBody:
    """Return the conversation without its oldest messages: as few as leave a prompt of at most so many tokens.

    Instructions stay. Where even the newest messages are too long, these are what is left.
    """

    def fits(start: int) -> bool:
        rendered = render_chat(
            codec, since(body.messages, start), body.add_generation_prompt, body.tools, body.template_settings
        )
        return len(encode_rendered(codec, rendered, body.add_special_tokens)) <= most_tokens

    starts = conversation_starts(body.messages)
    if not starts or fits(0):
        return body
    start = starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)]
    return body.model_copy(update={"messages": since(body.messages, start)})


def conversation_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """Return where a shortened conversation may begin: at a user's message, or behind the last one.

    Never at a tool's result, whose call would be missing.
    """
    users = [place for place, message in enumerate(messages) if message.role == USER]
    later = enumerate(messages[users[-1] + 1 :], users[-1] + 1) if users else enumerate(messages)
    return [*users, *(place for place, message in later if message.role not in (*INSTRUCTING, TOOL))]


def since(messages: Sequence[ChatMessage], start: int) -> list[ChatMessage]:
    """Return the messages from `start` on, behind the earlier ones that instruct."""
    return [message for place, message in enumerate(messages) if place >= start or message.role in INSTRUCTING]


def _until_content(text: str, content: str) -> str:
    """The prompt's text up to the end of its last message's content. A template may strip the content's blanks.

    `text`: without what the template writes behind the content, such as `<|im_end|>`, which could hold a short one.

    Raises:
        ApiError: 400, the content is empty, or the template changes it.
    """
    place = text.rfind(content.strip()) if content.strip() else -1
    if place < 0:
        message = (
            "continue_final_message: the chat template must write the last message's content, which may not be empty"
        )
        raise bad_request(message, "continue_final_message", "invalid_value")
    kept = content.lstrip() if text.startswith(content.lstrip(), place) else content.strip()
    return text[: place + len(kept)]


def _known_role(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with OpenAI's role `developer` as `system` for templates that do not know it."""
    return {**message, "role": "system"} if message["role"] == DEVELOPER and DEVELOPER not in template else message


def echo_all(codec: TextCodec, prompts: Sequence[tuple[int, ...]], skip_special_tokens: bool) -> list[EchoedPrompt]:
    return [echo(codec, prompt, skip_special_tokens) for prompt in prompts]


def echo(codec: TextCodec, prompt: tuple[int, ...], skip_special_tokens: bool) -> EchoedPrompt:
    """Return the prompt detokenised, with the begin of each token."""
    detokenizer = codec.detokenizer(skip_special_tokens=skip_special_tokens)
    text, offsets = "", []
    for token in prompt:
        offsets.append(len(text))
        text += detokenizer.add(token)
    return EchoedPrompt(text + detokenizer.finish(), prompt, tuple(offsets))
