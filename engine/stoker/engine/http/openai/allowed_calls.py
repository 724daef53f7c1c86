"""The grammar of an answer that may have text, and calls of some of its tools only: in the model's own form of calls.

The text ends where a call begins, so that none of a tool that is not allowed can be written; `tool_parser` reads it.

Pure; used by `parser_choice`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from stoker.engine.http.openai.tool_parser import ARGS_MARKERS, FORMATS, ToolParserName
from stoker.engine.http.openai.tools import ToolUse, call_schema, list_of_calls
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.structural_tags import StructuralTag, StructuralTags

Schema = Mapping[str, Any]


def allowed_calls(use: ToolUse, form: ToolParserName, template: str | None) -> OutputGrammar:
    """Return the grammar.

    Args:
        use: the request's tools, some of which may be called.
        form: how the model writes its calls.
        template: the model's chat template, which says how calls are written where the form has several ways.

    Raises:
        RequestRefused: the schemas are too large.
    """
    return OutputGrammar.structural_tags(TAGS[form](use, template or ""), "tools")


def _hermes(use: ToolUse, _: str) -> StructuralTags:
    """Text with calls, each between marks of its own."""
    begin, end = FORMATS["hermes"].begins[0], FORMATS["hermes"].ends[0]
    tag = _tag(begin, f"{begin}\n", call_schema(use.callable, "arguments"), f"\n{end}")
    return StructuralTags((tag,), stop_after_first=not use.parallel)


def _llama(use: ToolUse, _: str) -> StructuralTags:
    """Text, with one call at its end, or one call as the whole answer: these models write one at a time."""
    begin = FORMATS["llama3_json"].begins[0]
    tag = _tag(begin, begin, call_schema(use.callable, "parameters"))
    return StructuralTags((tag,), stop_after_first=True, bare=True)


def _mistral(use: ToolUse, template: str) -> StructuralTags:
    """Text, with calls at its end: one list, or each behind its function's name."""
    begin, arguments = FORMATS["mistral"].begins[0], ARGS_MARKERS[0]
    if arguments not in template:
        calls = list_of_calls(use.callable, "arguments", use.most_calls)
        return StructuralTags((_tag(begin, begin, calls),), stop_after_first=True)
    tags = [_tag(begin, f"{begin}{name}{arguments}", schema) for name, schema in use.callable.items()]
    return StructuralTags(tuple(tags), stop_after_first=not use.parallel, text_behind=False)


def _tag(trigger: str, begin: str, schema: Schema, end: str = "") -> StructuralTag:
    return StructuralTag(trigger, begin, json.dumps(schema), end)


TAGS: Mapping[ToolParserName, Callable[[ToolUse, str], StructuralTags]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
}
