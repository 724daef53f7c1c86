"""Compilation of output grammars to matchers over the model's tokens, by the library llguidance.

A matcher gives the tokens that may come next as bits, and follows the tokens that were chosen. Compiling releases the
interpreter's lock and is bounded by the library's own limits. Compiled grammars are kept for the next request.

Owned by the engine. `submit` compiles in threads, so that the core's loop never waits for it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from stoker.engine.core.tag_grammar import answer_behind_reasoning, tag_grammar
from stoker.engine.errors import RequestRefused
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.structural_tags import StructuralTags

MAX_KEPT = 64
"""Compiled grammars that are kept; the one that was not used for longest goes first."""
THREADS = 2
ASCII = "dws"
"""Classes of regular expressions that mean ASCII: a digit is 0 to 9, not one of any script."""
MAX_REASON_CHARACTERS = 400
EXPLAINED = {
    "NoExtensionBias": "no text satisfies it",
    "coerce_one_of": "oneOf is possible only where its parts exclude each other, by a property or the type; use anyOf",
}
"""Part of a reason of the library that means nothing to a client -> what it means."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Blanks between two parts of a JSON value. Without a limit a weak model may write blanks up to `max_tokens`."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the vocabulary: a fraction of a second, in which the interpreter's lock is held.

        Raises:
            ValueError: the library cannot use this tokenizer.
        """
        import llguidance  # takes time to load, and a front does not need it

        self.vocab_size = vocab_size
        self._library = llguidance
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        eos: list[int] | None = list(eos_token_ids) or None
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos)
        self._kept: OrderedDict[GrammarKey, Any] = OrderedDict()
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def knows(self, grammar: OutputGrammar) -> bool:
        """Whether the grammar is compiled and kept."""
        return _key(grammar) in self._kept

    def submit(self, grammar: OutputGrammar) -> Future[Any]:
        """Compile in a thread."""
        return self._threads.submit(self.compile, grammar)

    def compile(self, grammar: OutputGrammar) -> Any:
        """Return a matcher at its start. It is kept: a caller copies it (`deep_copy`) before use.

        Raises:
            RequestRefused: the grammar is not valid, too large or not supported; names the request's field.
        """
        key = _key(grammar)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        matcher = self._compiled(grammar)
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: OutputGrammar) -> Any:
        matcher = self._library.LLMatcher(self._tokenizer, self._source(grammar), log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one finds what the grammar cannot do, and is the slowest
        if matcher.is_error():
            blanks = f" (with blanks of {grammar.blanks!r})" if grammar.blanks else ""
            raise grammar.refused(f"cannot be used{blanks}: {explained(matcher.get_error())}")
        return matcher

    def _source(self, grammar: OutputGrammar) -> str:
        """The grammar in the library's own form."""
        source = self._answer(grammar)
        if grammar.reasoning == "none":
            return source
        whole = {"name": "whole", "lark_grammar": answer_behind_reasoning(grammar.reasoning, self._text_parts)}
        is_schema = grammar.kind == "json_schema"
        answer = json.loads(source)["grammars"][0] if is_schema else {"lark_grammar": source}
        return json.dumps({"grammars": [whole, {**answer, "name": "answer"}]})

    def _answer(self, grammar: OutputGrammar) -> str:
        """The grammar without reasoning: JSON of the library's grammars for a schema, else in its Lark syntax."""
        matcher = self._library.LLMatcher
        if grammar.kind == "json_schema":
            schema: str = matcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": _blanks(grammar)})
            return schema
        if grammar.kind == "structural_tag":
            return self._tags(grammar)
        if grammar.kind == "regex":
            return f"start: /{self._library.regex_to_lark(grammar.text, ASCII)}/"
        if grammar.kind == "choice":
            return f"start: {' | '.join(json.dumps(text) for text in json.loads(grammar.text))}"
        return self._lark(grammar)

    def _lark(self, grammar: OutputGrammar) -> str:
        from llguidance.gbnf_to_lark import any_to_lark  # only for grammars

        try:
            return str(any_to_lark(grammar.text))
        except Exception as error:  # the converter has no common class of errors
            raise grammar.refused(f"cannot be used: {shortened(str(error))}") from error

    def _tags(self, grammar: OutputGrammar) -> str:
        try:
            tags = StructuralTags.load(grammar.text)
            return tag_grammar(tags, self._text_parts, _blanks(grammar), grammar.reasoning)
        except ValueError as error:
            raise grammar.refused(f"cannot be used: {error}") from error

    def _text_parts(self, text: str) -> list[str | int]:
        """Runs of plain text, and the ids of special tokens."""
        parts: list[str | int] = []
        for token in filter(self._tokenizer.is_special_token, self._tokenizer.tokenize_str(text, parse_special=True)):
            plain, found, rest = text.partition(self._tokenizer.decode_str([token]))
            if found:  # else the tokenizer has added it
                parts, text = [*parts, *([plain] if plain else []), token], rest
        return [*parts, text] if text else parts


GrammarKey = tuple[str, str, str | None, str]


def _key(grammar: OutputGrammar) -> GrammarKey:
    """What the compiled grammar depends on."""
    return grammar.kind, grammar.text, grammar.blanks, grammar.reasoning


def _blanks(grammar: OutputGrammar) -> str:
    return WHITESPACE if grammar.blanks is None else grammar.blanks


def no_compiler(grammar: OutputGrammar) -> RequestRefused:
    """Refuse a grammar where the engine has no tokenizer for it."""
    return grammar.refused("cannot be used: structured output is not possible with this model's tokenizer")


def explained(reason: str) -> str:
    """Return the library's reason, in the words of the request."""
    return next((words for part, words in EXPLAINED.items() if part in reason), shortened(reason))


def shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= MAX_REASON_CHARACTERS else reason[: MAX_REASON_CHARACTERS - 3] + "..."
