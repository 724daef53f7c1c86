"""Text from tokens: characters in pieces, stop texts at any cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.http.text import OutputText, StopTexts
from testing.engine.fake_core import ByteCodec

CODEC = ByteCodec(Path("/nowhere"))


def output(text: str, stops: tuple[str, ...], chunk: int, **options: object) -> tuple[str, int, bool]:
    """Return shown text, counted tokens and whether a stop was found, with tokens given `chunk` at a time."""
    made = OutputText(CODEC.detokenizer(skip_special_tokens=True), stops, **options)  # type: ignore[arg-type]
    tokens = list(text.encode())
    shown, counted = "", 0
    for begin in range(0, len(tokens), chunk):
        piece = made.add(tokens[begin : begin + chunk])
        shown, counted = shown + piece.text, counted + piece.num_tokens
        if piece.stopped:
            return shown, counted, True
    piece = made.finish()
    return shown + piece.text, counted, piece.stopped


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "include", "expected"),
    [
        pytest.param("hello world", (), False, ("hello world", 11, False), id="no stop"),
        pytest.param("hello world", ("o w",), False, ("hell", 7, True), id="stop inside"),
        pytest.param("hello world", ("o w",), True, ("hello w", 7, True), id="stop kept"),
        pytest.param("hello", ("lox",), False, ("hello", 5, False), id="only the beginning of a stop"),
        pytest.param("aab", ("ab",), False, ("a", 3, True), id="a beginning inside a beginning"),
        pytest.param("abcd", ("bcd", "bc"), False, ("a", 3, True), id="the first to be complete wins"),
        pytest.param("naïve €", ("€",), False, ("naïve ", 10, True), id="characters of several tokens"),
    ],
)
def test_a_stop_text_cuts_whatever_the_chunks(
    text: str, stops: tuple[str, ...], include: bool, expected: tuple[str, int, bool], chunk: int
) -> None:
    assert output(text, stops, chunk, include_stop=include) == expected


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    made = OutputText(CODEC.detokenizer(skip_special_tokens=True))
    assert made.add(list("a€".encode()[:3])).text == "a"
    assert made.finish().text == "\ufffd"


def test_stop_texts_count_only_after_min_tokens() -> None:
    assert output("xxxaxb", ("x",), 1, min_tokens=3) == ("xxxa", 5, True)


def test_offsets_are_where_each_tokens_text_begins() -> None:
    made = OutputText(CODEC.detokenizer(skip_special_tokens=True))
    assert made.add(list("a€b".encode())).offsets == (0, 1, 1, 1, 2)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_streaming_a_stop_equals_searching_the_whole(text: str, stops: list[str]) -> None:
    watched, seen, stopped = StopTexts(stops, include=False), "", None
    for character in text:
        shown, stopped = watched.add(character)
        seen += shown
        if stopped:
            break
    if not stopped:
        seen += watched.finish()
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, negative_length = min(found, default=(len(text), 0))
    assert seen == text[: end + negative_length]
