"""Text to tokens and back, and conversations to text. Used by the trainer's data and the engine's front: no torch.

The files are those of a Hugging Face folder; a GGUF file gives the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from blake3 import blake3

from stoker.model.chat_template import ChatTemplate, ChatTemplateError, Message
from stoker.model.detokenizer import Detokenizer
from stoker.model.tokenizer_limits import (
    MAX_NORMALIZED_CHARACTERS,
    TokenizerLimitError,
    check_backend,
    check_size,
    panics_named,
)
from stoker.model.travelling_files import read_travelling_files

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerError(ValueError):
    """The tokenizer's files are missing or damaged, or cannot do what was asked."""


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation for training."""

    ids: list[int]
    mask: list[bool]
    """True for the assistant's tokens, its end-of-turn token included."""


class Tokenizer:
    """Threads may share it: nothing changes after construction."""

    def __init__(self, files: Mapping[str, bytes], *, name: str = "tokenizer") -> None:
        """`files`: name -> content, of which tokenizer.json is needed. `name` appears in errors."""
        if "tokenizer.json" not in files:
            raise TokenizerError(f"{name}: tokenizer.json is missing")
        self.files, self.name = files, name
        self.backend, self.growth = parse_backend(files["tokenizer.json"], name)
        self.config = parse_json(files, "tokenizer_config.json", name)
        self.generation_config = parse_json(files, "generation_config.json", name)
        self.special_texts = {
            key: special_text(self.config[key]) for key in SPECIAL_NAMES if self.config.get(key) is not None
        }
        self.special_ids = frozenset(
            number for number, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        """Tokens that decoding leaves out."""

    @classmethod
    def open(cls, path: Path | str) -> Tokenizer:
        """Open a Hugging Face folder, a checkpoint folder or a GGUF file."""
        path = Path(path)
        if path.is_dir():
            return cls(read_travelling_files(path), name=str(path))
        if not path.exists():
            raise TokenizerError(f"{path} does not exist")
        from stoker.model.weights.gguf_file import GgufFile  # the gguf library is only needed here
        from stoker.model.weights.gguf_tokenizer import tokenizer_files

        return cls(tokenizer_files(GgufFile(path)), name=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model's vocabulary may be padded beyond it."""
        return self.num_ids

    @property
    def bos_id(self) -> int | None:
        return self.special_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self.special_id("pad_token")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of generation_config.json, then the tokenizer's own."""
        listed = self.generation_config.get("eos_token_id")
        ids = listed if isinstance(listed, list) else [listed]
        return tuple(
            dict.fromkeys(number for number in (*ids, self.special_id("eos_token")) if isinstance(number, int))
        )

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything that decides which tokens a text or a conversation becomes."""
        hasher = blake3()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            hasher.update(f"{name} {len(self.files.get(name, b''))}\n".encode() + self.files.get(name, b""))
        return hasher.hexdigest()

    @cached_property
    def num_ids(self) -> int:
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    def special_id(self, name: str) -> int | None:
        text = self.special_texts.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's own spelling, special ones included."""
        number: int | None = self.backend.token_to_id(token)
        return number

    # Text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        `add_special_tokens`: add what the tokenizer puts around a text, such as the begin-of-text token.
        """
        self.check_length(text)
        with panics_named():
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode texts on all cores."""
        for text in texts:
            self.check_length(text)
        with panics_named():
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def check_length(self, text: str) -> None:
        """Refuse a text that normalizing could make too long. Raises TokenizerLimitError."""
        if (length := len(text) * self.growth) > MAX_NORMALIZED_CHARACTERS:
            raise TokenizerLimitError(
                f"{self.name}: a text of {len(text)} characters may be normalized to {length:.0f}; "
                f"at most {MAX_NORMALIZED_CHARACTERS} are allowed"
            )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; parts of characters become the replacement character."""
        with panics_named():
            text: str = self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for one growing sequence that follows `prompt`."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.backend, prompt, skip_special_tokens=skip_special_tokens, hidden=hidden)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; a part of a character is no valid UTF-8.

        An id outside the vocabulary gives nothing.
        """
        piece: str | None = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if token in self.added_ids or not self.is_byte_level:
            return piece.replace("\u2581", " ").encode() if token not in self.added_ids else piece.encode()
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def is_byte_level(self) -> bool:
        decoder = json.loads(self.files["tokenizer.json"]).get("decoder") or {}
        return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))

    # Conversations

    @property
    def has_chat_template(self) -> bool:
        return self.template_source is not None

    @cached_property
    def template_source(self) -> str | None:
        """Return chat_template.jinja, or the template in tokenizer_config.json (of several, `default`)."""
        if (file := self.files.get("chat_template.jinja")) is not None:
            return file.decode()
        listed = self.config.get("chat_template")
        if isinstance(listed, list):
            listed = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}.get(
                "default"
            )
        return listed if isinstance(listed, str) else None

    @cached_property
    def template(self) -> ChatTemplate:
        if self.template_source is None:
            raise TokenizerError(f"{self.name}: there is no chat template")
        return ChatTemplate(self.template_source, self.special_texts)

    def render_chat(self, messages: Sequence[Message], **settings: Any) -> str:
        """Return the text of a conversation.

        Settings: add_generation_prompt, tools, and further variables of the template. Raises ValueError with the
        template's own message where it refuses.
        """
        return self.template.render(messages, **settings)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **settings: Any
    ) -> list[int]:
        """Return the prompt's tokens; the template writes special tokens itself."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, **settings),
            add_special_tokens=False,
        )

    def encode_conversation(self, messages: Sequence[Message], **settings: Any) -> MaskedTokens:
        """Return the tokens of a whole conversation, with a mask of the assistant's.

        The text is cut as the engine will see it: the prompt's tokens, then the answer's. Raises ValueError where the
        template writes a message differently once others follow, because then there is no one answer to learn.
        """
        text = self.render_chat(messages, **settings)
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for begin, end in [*self.answer_spans(messages, text, settings), (len(text), len(text))]:
            for piece, is_answer in ((text[position:begin], False), (text[begin:end], True)):
                tokens = self.encode(piece, add_special_tokens=False)
                ids += tokens
                mask += [is_answer] * len(tokens)
            position = end
        return MaskedTokens(ids, mask)

    def answer_spans(
        self, messages: Sequence[Message], text: str, settings: Mapping[str, Any]
    ) -> list[tuple[int, int]]:
        """Return where each answer lies in the rendered text, found by rendering the conversation up to it."""
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self.render_chat(messages[:index], **{**settings, "add_generation_prompt": True})
            done = self.render_chat(messages[: index + 1], **settings)
            if not done.startswith(prompt) or not text.startswith(done):
                raise ChatTemplateError(
                    f"{self.name}: the chat template writes messages[{index}] differently once others follow, so its "
                    "answer cannot be marked"
                )
            spans.append((len(prompt), self.end_of_turn(text, len(prompt), len(done))))
        return spans

    def end_of_turn(self, text: str, begin: int, end: int) -> int:
        """Return where an answer ends: behind its end-of-turn token.

        Generation stops there, so blanks that the template writes after it are not learned.
        """
        for special in self.end_texts:
            last = text.rfind(special, begin, end)
            if last >= 0 and not text[last + len(special) : end].strip():
                return last + len(special)
        return end

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        return tuple(text for number in self.eos_ids if (text := self.backend.id_to_token(number)))


def parse_backend(data: bytes, name: str) -> tuple[Any, float]:
    """Return the library's tokenizer, and how many times longer its normalizer may make a text."""
    try:
        check_size(data)
        with panics_named():
            backend = tokenizers.Tokenizer.from_buffer(data)
            growth = check_backend(backend)
    except Exception as error:
        raise TokenizerError(f"{name}: tokenizer.json is not valid: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend, growth


def parse_json(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """A file's object; empty where the file is missing."""
    try:
        value = json.loads(files.get(file, b"{}"))
    except ValueError as error:
        raise TokenizerError(f"{name}: {file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{name}: {file} must hold an object")
    return value


def special_text(value: object) -> str:
    """Return a special token's text: the value itself, or what an object holds."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = byte_alphabet()
