"""The text of a growing sequence: the library's stream, and what helps it on, give what whole decodes give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from stoker.model.detokenizer import MAX_PENDING_TOKENS, Detokenizer
from stoker.model.tokenizer_limits import TokenizerLimitError

REPLACEMENT = "\ufffd"
WORDS = ["▁the", "▁a", "x", "▁", "é", "日", "<s>", "\ufffd"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x61, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0)]


def byte_level() -> Any:
    """Tokens are bytes, and pairs of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    return made


def sentence_pieces() -> Any:
    """As Llama 2: blanks as marks, a first one dropped, unknown characters as bytes."""
    made = tokenizers.Tokenizer(models.WordLevel({token: number for number, token in enumerate([*WORDS, *BYTES])}, "x"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    return made


BACKENDS = {"byte level": byte_level(), "sentence pieces": sentence_pieces()}


class Twin:
    """Two whole decodes for each token: what it adds to those whose text was given out."""

    def __init__(self, backend: Any, prompt: Sequence[int], skip: bool) -> None:
        self.backend, self.skip = backend, skip
        self.context, self.pending = list(prompt[-MAX_PENDING_TOKENS:]), list[int]()

    def add(self, token: int) -> str:
        self.pending.append(token)
        text = self.rest()
        if (not text or text.endswith(REPLACEMENT)) and len(self.pending) < MAX_PENDING_TOKENS:
            return ""
        self.context, self.pending = self.pending if text else self.context, []
        return text

    def rest(self) -> str:
        shown = self.backend.decode(self.context, skip_special_tokens=self.skip)
        both: str = self.backend.decode([*self.context, *self.pending], skip_special_tokens=self.skip)
        return both[len(shown) :]


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_a_stream_gives_what_whole_decodes_give(name: str, data: st.DataObject, skip: bool) -> None:
    backend = BACKENDS[name]
    tokens = st.integers(0, backend.get_vocab_size() + 2)  # some are none
    prompt, output = (data.draw(st.lists(tokens, max_size=size), label=f"{size}") for size in (12, 40))
    ours, twin = Detokenizer(backend, prompt, skip_special_tokens=skip), Twin(backend, prompt, skip)
    pieces = [(ours.add(token), twin.add(token)) for token in output]
    assert [piece for piece, _ in pieces] == [piece for _, piece in pieces]
    assert ours.finish() == (twin.rest() if twin.pending else "")


def test_what_the_librarys_stream_refuses_is_decoded_whole() -> None:
    """A decoder that replaces what tokens make together: the text before is not the beginning of the text behind."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "b"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    with pytest.raises(Exception, match="prefix"):
        decoders.DecodeStream(ids=[0], skip_special_tokens=True).step(backend, 1)
    ours, twin = Detokenizer(backend, (), skip_special_tokens=True), Twin(backend, (), True)
    output = [0, 1, 0, 0, 1, 1, 0]
    assert [ours.add(token) for token in output] == [twin.add(token) for token in output]


def test_a_panic_of_the_library_is_an_error_of_the_request() -> None:
    class Panicking:
        def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
            raise type("PanicException", (BaseException,), {})(tokens, skip_special_tokens)

    with pytest.raises(TokenizerLimitError, match="gave up"):
        Detokenizer(Panicking(), (1,), skip_special_tokens=True)
