"""Tool calls and reasoning in a model's text, in every form and however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.http.errors import ApiError
from stoker.engine.http.openai.tool_parser import (
    FORMATS,
    LISTED,
    OutputParser,
    Part,
    ReasoningParser,
    ToolCallParser,
    detected_format,
)
from stoker.engine.http.openai.tools import tool_use

PARIS = '{"city": "Paris", "unit": {"name": "C", "q": "a\\"}b"}}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
TIME = '{"name": "time", "parameters": {}}'
Read = tuple[str, str, list[tuple[str, str]]]


def collect(parts: Iterator[Part] | list[Part]) -> Read:
    """(content, reasoning, calls as name and arguments)."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "content":
            content += part.text
        elif part.kind == "reasoning":
            reasoning += part.text
        elif part.kind == "call":
            assert part.call == len(calls)
            calls.append((part.text, ""))
        else:
            assert part.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, reasoning, calls


OPEN, SHUT = "<tool_call>", "</tool_call>"
WEATHER, CLOCK = ("weather", PARIS), ("time", "{}")
CASES: list[Any] = [
    pytest.param("hermes", "Hello there.\n", "Hello there.\n", [], id="no call"),
    pytest.param("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER], id="one"),
    pytest.param("hermes", f"{OPEN}{CALL}{SHUT}\n{OPEN}{TIME}{SHUT}\n", "", [WEATHER, CLOCK], id="two"),
    pytest.param("hermes", f"I look.\n{OPEN}{CALL}{SHUT} Done.", "I look. Done.", [WEATHER], id="text around"),
    pytest.param("hermes", f"<tool_call>{CALL}", "", [WEATHER], id="no end marker"),
    pytest.param("hermes", f"<tool_call>{CALL}<tool_call>{TIME}", "", [WEATHER, CLOCK], id="markers not closed"),
    pytest.param("hermes", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", [], id="no JSON"),
    pytest.param("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', [], id="no name"),
    pytest.param("hermes", '<tool_call>{"na', '<tool_call>{"na', [], id="cut in the name's key"),
    pytest.param("hermes", OPEN + '{"name": "f", "arguments": {"a": [1,', "", [("f", '{"a": [1,')], id="cut in them"),
    pytest.param("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')], id="name last"),
    pytest.param("hermes", OPEN + '{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')], id="as text"),
    pytest.param("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], id="no arguments"),
    pytest.param("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")], id="null"),
    pytest.param("hermes", "a < b and <tool_cal is text", "a < b and <tool_cal is text", [], id="like a marker"),
    pytest.param("llama3_json", f"<|python_tag|>{TIME}", "", [CLOCK], id="python tag"),
    pytest.param("llama3_json", f"{CALL}; {TIME}", "", [WEATHER, CLOCK], id="bare, two"),
    pytest.param("llama3_json", "It is warm {really}.", "It is warm {really}.", [], id="braces in text"),
    pytest.param("llama3_json", '{"answer": 42}', '{"answer": 42}', [], id="JSON that is no call"),
    pytest.param("mistral", f"[TOOL_CALLS] [{CALL}, {TIME}]", "", [WEATHER, CLOCK], id="list"),
    pytest.param("mistral", f"[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]time[ARGS]{{}}", "", [WEATHER, CLOCK], id="named"),
    pytest.param("mistral", "[TOOL] is text", "[TOOL] is text", [], id="other brackets"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart(form: Any, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = ToolCallParser(FORMATS[form])
    assert collect([*whole.add(text), *whole.finish()]) == (content, "", calls)
    single = ToolCallParser(FORMATS[form])
    parts = [part for character in text for part in single.add(character)]
    assert collect([*parts, *single.finish()]) == (content, "", calls)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 90)))
def test_any_cut_of_the_text_gives_the_same(case: Any, cuts: list[int]) -> None:
    form, text, content, calls = case.values
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parser = ToolCallParser(FORMATS[form])
    parts = [part for begin, end in pairwise(places) for part in parser.add(text[begin:end])]
    assert collect([*parts, *parser.finish()]) == (content, "", calls)


PIECES = [
    OPEN, SHUT, "[TOOL_CALLS]", "<|python_tag|>", "{", "}", '"name": "f"', ",", '"arguments": {', "[", "]", " ", "x",
    '"', "\\", ":",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=12),
)
def test_any_text_is_read_to_its_end_and_the_same_in_pieces(form: Any, pieces: list[str]) -> None:
    whole, parts = ToolCallParser(FORMATS[form]), ToolCallParser(FORMATS[form])
    text = "".join(pieces)
    expected = collect([*whole.add(text), *whole.finish()])
    assert collect([*(part for piece in text for part in parts.add(piece)), *parts.finish()]) == expected


def test_arguments_arrive_as_they_are_written() -> None:
    parser = ToolCallParser(FORMATS["hermes"])
    assert parser.add('<tool_call>{"name": "f') == []
    assert parser.add('", "arguments": {"a') == [Part("call", "f", 0), Part("arguments", '{"a', 0)]
    assert parser.add('": 1') == [Part("arguments", '": 1', 0)]
    assert parser.add("}}") == [Part("arguments", "}", 0)]


def test_only_the_first_call_is_given_out_where_calls_may_not_be_parallel() -> None:
    parser = ToolCallParser(FORMATS["hermes"], most=1)
    text = f"<tool_call>{CALL}</tool_call><tool_call>{TIME}</tool_call>"
    assert collect([*parser.add(text), *parser.finish()]) == ("", "", [WEATHER])


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', '{"title": "x", "name": "Bob"}', '{"name": "Bob", "arguments": {}}']
)
def test_json_without_a_marker_is_a_call_only_of_a_function_that_exists(text: str) -> None:
    """JSON is how these models write calls, and an answer that is asked for in JSON."""
    parser = ToolCallParser(FORMATS["llama3_json"], functions=("weather", "time"))
    assert collect([*parser.add(text), *parser.finish()]) == (text, "", [])
    known = ToolCallParser(FORMATS["llama3_json"], functions=("weather", "time"))
    assert collect([*known.add(CALL), *known.finish()]) == ("", "", [WEATHER])


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_what_names_a_function_that_may_not_be_called_is_content(form: Any) -> None:
    begin = "" if form == "llama3_json" else FORMATS[form].begins[0]
    parser = ToolCallParser(FORMATS[form], names=["time"])
    parts = [part for character in begin + CALL for part in parser.add(character)]
    assert collect([*parts, *parser.finish()]) == (begin + CALL, "", [])
    own = ToolCallParser(FORMATS[form], names=["weather"])
    assert collect([*own.add(begin + CALL), *own.finish()]) == ("", "", [WEATHER])


def test_forced_calls_are_lists_or_arguments_alone() -> None:
    required = ToolCallParser(LISTED, forced=True)
    text = f" [ {CALL.replace('arguments', 'parameters')}, {TIME}]"
    assert collect([*required.add(text), *required.finish()]) == ("", "", [WEATHER, CLOCK])
    named = ToolCallParser(LISTED, name="weather")
    assert collect([*named.add("\n" + PARIS), *named.finish()]) == ("", "", [WEATHER])


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        pytest.param(False, "<think>\na < b</think>\n\nYes.", "\na < b", "Yes.", id="both markers"),
        pytest.param(True, "hmm</think>\n\n Yes. ", "hmm", "Yes. ", id="begun by the prompt"),
        pytest.param(False, "Yes <think>x</think>", "", "Yes <think>x</think>", id="not at the begin"),
        pytest.param(True, "still thinking </thi", "still thinking </thi", "", id="cut"),
        pytest.param(False, "<thi", "", "<thi", id="cut in the begin"),
        pytest.param(False, "  <think>a</think>", "a", "", id="nothing behind"),
    ],
)
def test_reasoning_is_taken_out(begun: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parser = OutputParser(ReasoningParser(begun=begun), None)
        parts = [part for piece in pieces for part in parser.add(piece)]
        assert collect([*parts, *parser.finish()]) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{{ x }}{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('Environment: ipython {"name": f, "parameters": d}', "llama3_json"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_form_of_calls_is_found_in_the_template(template: str | None, form: str | None) -> None:
    assert detected_format(template) == form


NODE = {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "properties": {"a": {"$ref": "#/$defs/n"}}}  # fmt: skip  # noqa: E501


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more}}


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [function(name) if isinstance(name, str) else name for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_schema_of_required_calls_holds_each_functions_own() -> None:
    use = tool_use([function("walk", NODE), function("stop")], "required", True)
    assert use.grammar is not None
    schema = json.loads(use.grammar.text)
    walk = {"name": "walk", "parameters": {"a": {"next": {"next": {}}}}}
    jsonschema.validate([walk, {"name": "stop", "parameters": {}}], schema)
    for wrong in ([], [{"name": "run", "parameters": {}}], [{"name": "walk", "parameters": {"a": {"next": 3}}}], walk):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    only = tool_use([function("walk", NODE), function("stop")], allowed("required", "stop"), True).grammar
    assert only is not None
    jsonschema.validate([{"name": "stop", "parameters": {}}], json.loads(only.text))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([walk], json.loads(only.text))
    single = tool_use([function("stop")], "required", False).grammar
    assert single is not None
    assert json.loads(single.text)["maxItems"] == 1


WRONG: list[Any] = [
    pytest.param([{"type": "file"}], None, "tools.0.type", id="type"),
    pytest.param([{"type": "function"}], None, "tools.0.function", id="no function"),
    pytest.param([function("a b")], None, "tools.0.function.name", id="name"),
    pytest.param([function("a", {"type": "array"})], None, "tools.0.function.parameters", id="parameters"),
    pytest.param([function("a")] * 129, None, "tools", id="too many"),
    pytest.param(None, "required", "tool_choice", id="required without tools"),
    pytest.param([function("a")], "always", "tool_choice", id="no such choice"),
    pytest.param([function("a")], function("b"), "tool_choice", id="not among the tools"),
    pytest.param([function("a")], {"type": "function"}, "tool_choice", id="no name"),
    pytest.param(None, allowed("auto", "a"), "tool_choice", id="allowed without tools"),
    pytest.param([function("a")], {"type": "allowed_tools"}, "tool_choice.allowed_tools", id="no allowed"),
    pytest.param([function("a")], allowed("none", "a"), "tool_choice.allowed_tools.mode", id="mode"),
    pytest.param([function("a")], allowed({}, "a"), "tool_choice.allowed_tools.mode", id="mode of another type"),
    pytest.param([function("a")], allowed("auto"), "tool_choice.allowed_tools.tools", id="empty"),
    pytest.param([function("a")], allowed("auto", "a", "b"), "tool_choice.allowed_tools.tools.1", id="unknown"),
    pytest.param([function("a")], allowed("auto", {"type": "mcp"}), "tool_choice.allowed_tools.tools.0", id="MCP"),
    pytest.param([function("a")], allowed("auto", 3), "tool_choice.allowed_tools.tools.0", id="number"),
]


@pytest.mark.parametrize(("tools", "choice", "field"), WRONG)
def test_wrong_tools_are_refused_with_their_field(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        tool_use(tools, choice, None)
    assert (refused.value.status, refused.value.param) == (400, field)
