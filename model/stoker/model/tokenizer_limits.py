"""Limits on a tokenizer.json, a file from outside that the tokenizers library parses without limits.

Parts are counted in the text before the library makes objects of them. What a normalizer may make of a text is computed
from its own definition, because no probe finds the one character that it multiplies.

Pure; called by `tokenizer` before it loads a file.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MAX_BYTES = 64 * 2**20
MAX_PARTS = 4_000_000
"""Commas: Gemma's vocabulary and merges have 1.6 million."""
MAX_CONTAINERS = 2_000_000
MAX_TOKEN_CHARACTERS = 64 * 1024
"""Longest token: a decoded text grows by it at each step."""
MAX_GROWTH = 64
"""Largest growth of a text by normalizing, and of a token by decoding."""
MAX_NORMALIZED_CHARACTERS = 64 * 2**20
"""Longest text after normalizing."""

EMPTY_MATCH = ("*", "?", "{0", "{,", "|", "^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z", "\\G", "()")
"""Signs of a pattern that may match between two characters, and so insert text there."""
CLASS = re.compile(r"\[\^?\]?(?:[^\[\]]|\[:\^?\w+:\])*\]")
INNERMOST_GROUP = re.compile(r"\(([^()]*)\)([*+{]?)")


class TokenizerLimitError(ValueError):
    """The tokenizer exceeds a limit, or its library gave up."""


def check_size(data: bytes) -> None:
    """Refuse a tokenizer.json with more bytes or parts than a tokenizer has."""
    for what, count, limit in (
        ("bytes", len(data), MAX_BYTES),
        ("objects and lists", data.count(b"{") + data.count(b"["), MAX_CONTAINERS),
        ("parts", data.count(b","), MAX_PARTS),
    ):
        if count > limit:
            raise TokenizerLimitError(f"{count} {what}; at most {limit} are allowed")


def check_backend(backend: Any) -> float:
    """Check what the library has read; return how many times longer normalizing may make a text."""
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise TokenizerLimitError(f"a token of {longest} characters; at most {MAX_TOKEN_CHARACTERS} are allowed")
    growths = {}
    for kind in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, kind)
        definition = {} if part is None else json.loads(part.__getstate__())
        for pattern in patterns(definition):
            refuse_exponential(pattern)
        growths[kind] = growth(definition)
        if growths[kind] > MAX_GROWTH:
            raise TokenizerLimitError(
                f"its {kind} may make a text {growths[kind]:.0f} times longer; at most {MAX_GROWTH} times is allowed"
            )
    return growths["normalizer"]


def growth(part: Mapping[str, Any]) -> float:
    """Return how many times more characters a normalizer or decoder may give back, by its own definition.

    Unicode's normal forms are left out: they grow a text at most 18 times, and no file can change that.
    """
    kind = part.get("type")
    if kind == "Sequence":
        return math.prod(growth(item) for item in (part.get("normalizers") or part.get("decoders") or ()))
    if kind == "Replace":
        return replace_growth(part.get("pattern") or {}, str(part.get("content", "")))
    if kind == "Prepend":
        return 1 + len(str(part.get("prepend", "")))
    if kind == "Precompiled":
        return precompiled_growth(str(part.get("precompiled_charsmap", "")))
    return 1


def replace_growth(pattern: Mapping[str, Any], content: str) -> float:
    if (literal := pattern.get("String")) is not None:
        return max(1.0, len(content) / len(literal)) if literal else 1 + len(content)
    may_be_empty = any(sign in str(pattern.get("Regex", "")) for sign in EMPTY_MATCH)
    return max(1, len(content)) + may_be_empty * min(1, len(content))


def precompiled_growth(charsmap: str) -> float:
    """Return the length of sentencepiece's longest replacement: texts with a zero byte behind each, after a trie."""
    data = base64.b64decode(charsmap, validate=False)
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))


def patterns(part: Any) -> Iterator[str]:
    """Yield every regular expression of a definition."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            if key == "Regex" and isinstance(value, str):
                yield value
            else:
                yield from patterns(value)
    elif isinstance(part, list):
        for item in part:
            yield from patterns(item)


def refuse_exponential(pattern: str) -> None:
    """Refuse a repeated group with a repetition or a choice inside, such as `(a+)+` or `(a|aa)*`.

    Such a pattern takes time exponential in the text. The tokenizers of published models have none.
    """
    plain = CLASS.sub("x", re.sub(r"\\(?:p\{\^?\w+\}|.)", "x", pattern, flags=re.DOTALL))
    plain = re.sub(r"(?<!\))\{\d+\}", "", plain)  # a fixed count leaves no choice
    while group := INNERMOST_GROUP.search(plain):
        inner, repeated = re.sub(r"^\?(?:[:=!>]|<[=!]|\w+:)", "", group[1]), group[2] not in ("",)
        is_wide = re.search(r"[*+{|]", inner) is not None
        if repeated and is_wide:
            raise TokenizerLimitError(f"not supported: a repetition inside of a repetition: {pattern[:200]!r}")
        plain = plain[: group.start()] + ("x+" if is_wide or repeated else "x") + plain[group.end() - len(group[2]) :]


def is_panic(error: BaseException) -> bool:
    """Whether the library has panicked: its PanicException has no public name."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_named() -> Iterator[None]:
    """Raise TokenizerLimitError where the library panics, for example at a pattern that needs too many steps.

    Its PanicException is no Exception, so that a program would end of it.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerLimitError(f"the tokenizer's library gave up: {error}") from None
