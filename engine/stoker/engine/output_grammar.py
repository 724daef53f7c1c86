"""The grammar that an output must follow: a checked value without behaviour. Imports values and errors only.

A front makes it from a body's field, `LLM` takes it in `SamplingParams`; `core/grammars` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stoker.engine.closed_schema import closed
from stoker.engine.errors import RequestRefused
from stoker.engine.structural_tags import StructuralTags

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
MAX_GRAMMAR_CHARACTERS = 128 * 1024
MAX_SCHEMA_DEPTH = 64
"""Objects and lists inside each other."""
MAX_CHOICES = 1024
MAX_BLANKS_CHARACTERS = 1000
ReasoningPlace = Literal["none", "before", "begun"]
BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"


@dataclass(frozen=True)
class OutputGrammar:
    """What the whole output must be. Every wrong value raises `RequestRefused` that names `field`.

    Make it with `json_schema`, `json_object`, `regex`, `choice`, `grammar` or `structural_tags`.
    """

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression (Rust's syntax, no look-around), a JSON list of texts, a grammar in Lark's
    or GBNF's syntax, or the JSON of `StructuralTags`."""
    field: str = "grammar"
    """The field of the request that an error names."""
    blanks: str | None = None
    """A regular expression of what may stand between two parts of a JSON value, empty for nothing; None: up to 32
    blanks and line ends. Without effect on other kinds."""
    reasoning: ReasoningPlace = "none"
    """before: the output may begin with reasoning and follows the grammar behind it; begun: the prompt has begun it."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise self.refused(f"must be one of {', '.join(get_args(GrammarKind))}")
        if self.reasoning not in get_args(ReasoningPlace):
            raise self.refused(f"must have reasoning {', '.join(get_args(ReasoningPlace))}, got {self.reasoning!r}")
        if not self.text.strip():
            raise self.refused("must not be empty")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise self.refused(f"must have at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(self.text)}")
        if len(self.blanks or "") > MAX_BLANKS_CHARACTERS:
            raise self.refused(f"must have a pattern of blanks of at most {MAX_BLANKS_CHARACTERS} characters")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, field: str = "grammar", blanks: str | None = None
    ) -> OutputGrammar:
        """The grammar of JSON values that a schema allows, without properties that it does not name (`closed_schema`).

        A text is a schema that is not parsed yet.
        """
        if isinstance(schema, str):
            schema = _parsed(schema, field)
        if schema is False:
            raise RequestRefused("invalid", f"{field} must allow a value, got false", field)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise RequestRefused("invalid", f"{field} must be a JSON schema: an object, true or false", field)
        if depth_exceeds(schema, MAX_SCHEMA_DEPTH):
            message = f"{field} must have at most {MAX_SCHEMA_DEPTH} objects and lists inside each other"
            raise RequestRefused("invalid", message, field)
        return cls("json_schema", json.dumps(closed(schema)), field, blanks)

    @classmethod
    def json_object(cls, field: str = "grammar", blanks: str | None = None) -> OutputGrammar:
        """The grammar of any JSON object."""
        return cls("json_schema", '{"type": "object"}', field, blanks)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> OutputGrammar:
        """The grammar of texts that match the pattern as a whole."""
        return cls("regex", pattern, field)

    @classmethod
    def choice(cls, texts: Sequence[str], field: str = "grammar") -> OutputGrammar:
        """The grammar of exactly one of these texts."""
        if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
            message = f"{field} must be a list of 1 to {MAX_CHOICES} texts that are not empty"
            raise RequestRefused("invalid", message, field)
        return cls("choice", json.dumps(list(texts)), field)

    @classmethod
    def grammar(cls, text: str, field: str = "grammar") -> OutputGrammar:
        """A context-free grammar in Lark's or GBNF's syntax; its first rule is `start` or `root`."""
        return cls("grammar", text, field)

    @classmethod
    def structural_tags(cls, tags: StructuralTags, field: str = "grammar", blanks: str | None = None) -> OutputGrammar:
        """The grammar of free text with structures in it; their objects are closed as those of `json_schema`."""
        tags.check(field)
        schemas = (cls.json_schema(tag.schema, field).text for tag in tags.tags)
        own = (replace(tag, schema=schema) for tag, schema in zip(tags.tags, schemas, strict=True))
        return cls("structural_tag", replace(tags, tags=tuple(own)).dump(), field, blanks)

    def refused(self, problem: str) -> RequestRefused:
        return RequestRefused("invalid", f"{self.field} {problem}", self.field)


def depth_exceeds(value: object, limit: int) -> bool:
    """Whether objects and lists stand deeper inside each other than `limit`. Does not recurse."""
    layer: list[object] = [value]
    for _ in range(limit + 1):
        layer = [item for container in layer for item in _items(container)]
        if not layer:
            return False
    return True


def _items(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _parsed(text: str, field: str) -> Any:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        message = f"{field} must have at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(text)}"
        raise RequestRefused("invalid", message, field)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("invalid", f"{field} must be JSON: {error}", field) from error
