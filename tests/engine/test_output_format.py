"""Fields that say what the output must be, from the body to the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.structural_tags import StructuralTag, StructuralTags
from testing.engine.serving import run, serving

CHAT = {"messages": [{"role": "user", "content": "say:x"}]}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f=", "[x]"],
}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}],
    "at_least_one": True,
    "stop_after_first": True,
}
TAGS = (StructuralTag("<f=", "<f=a>", '{"type": "integer"}', "</f>"),)


def test_the_output_format_reaches_the_core_under_each_of_its_names(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    table: list[tuple[dict[str, Any], OutputGrammar]] = [
        ({"response_format": {"type": "json_object"}}, OutputGrammar.json_object("response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema, "strict": True},
                }
            },
            OutputGrammar.json_schema(schema, "response_format.json_schema.schema"),
        ),
        ({"guided_json": schema}, OutputGrammar.json_schema(schema, "guided_json")),
        ({"guided_json": json.dumps(schema)}, OutputGrammar.json_schema(schema, "guided_json")),
        ({"guided_regex": "a+"}, OutputGrammar.regex("a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, OutputGrammar.choice(["a", "b"], "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, OutputGrammar.grammar('start: "a"', "guided_grammar")),
        ({"structured_outputs": {"json": schema}}, OutputGrammar.json_schema(schema, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "b"}}, OutputGrammar.regex("b", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["b"]}}, OutputGrammar.choice(["b"], "structured_outputs.choice")),
        (
            {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
            OutputGrammar.json_schema(schema, "structured_outputs.json", ""),
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            OutputGrammar.json_object("structured_outputs.json_object", " ?"),
        ),
        (
            {"structured_outputs": {"json": schema, "disable_additional_properties": True}},
            OutputGrammar.json_schema(schema, "structured_outputs.json"),
        ),
        (
            {"guided_json": schema, "guided_whitespace_pattern": " "},
            OutputGrammar.json_schema(schema, "guided_json", " "),
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
            OutputGrammar.json_object("response_format", ""),
        ),
        ({"response_format": STRUCTURES}, OutputGrammar.structural_tags(StructuralTags(TAGS), "response_format")),
        (
            {"response_format": {"type": "structural_tag", "format": FORMAT}},
            OutputGrammar.structural_tags(StructuralTags(TAGS, True, True), "response_format"),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES), "disable_any_whitespace": True}},
            OutputGrammar.structural_tags(StructuralTags(TAGS), "structured_outputs.structural_tag", ""),
        ),
    ]

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for fields, grammar in table:
                for path, body in (("/v1/completions", {"prompt": "say:x"}), ("/v1/chat/completions", CHAT)):
                    answer = await s.post(path, **body, **fields)
                    assert answer.status_code == 200, answer.text
                    assert s.core.requests[-1].params.grammar == grammar
            await s.post("/v1/completions", prompt="x", response_format={"type": "text"})
            assert s.core.requests[-1].params.grammar is None
            await s.post("/v1/completions", prompt="x", bad_words=["ab"], allowed_token_ids=[97, 98])
            params = s.core.requests[-1].params
            assert (params.bad_sequences, params.allowed_token_ids) == (((97, 98), (32, 97, 98)), (97, 98))

    run(scenario)


def test_the_cores_refusal_of_a_grammar_is_a_400_with_its_field(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.post("/v1/completions", prompt="badgrammar", guided_regex="(")
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "guided_regex", "invalid_value")

    run(scenario)


def tag_format(**changed: Any) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": {**FORMAT, **changed}}}


WRONG: list[Any] = [
    pytest.param(
        {"structured_outputs": {"json": True, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        "structured_outputs", "disable_any_whitespace is not allowed together", id="two kinds of blanks",
    ),
    pytest.param(
        {"structured_outputs": {"json": {"allOf": [{"type": "object"}]}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties", "must be false for a schema with allOf", id="composed",
    ),
    pytest.param(
        {"guided_json": True, "guided_whitespace_pattern": " " * 1001}, "guided_json", "at most 1000", id="long blanks"
    ),
    pytest.param(
        {"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "must be JSON", id="text"
    ),
    pytest.param(
        {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES).replace('"integer"', "[" * 70 + "]" * 70)}},
        "structured_outputs.structural_tag", "at most 64 objects and lists", id="deep schema",
    ),
    pytest.param(
        {"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag", "an object", id="list"
    ),
    pytest.param(
        {"response_format": {"type": "structural_tag"}}, "response_format.structures", "required", id="no structures"
    ),
    pytest.param(
        {"response_format": {**STRUCTURES, "triggers": ["<g"]}},
        "response_format", "exactly one of the triggers ['<g']", id="no trigger",
    ),
    pytest.param(
        {"response_format": {**STRUCTURES, "structures": []}}, "response_format", "1 to 128 tags, got 0", id="no tags"
    ),
    pytest.param(tag_format(type="any_text"), "response_format.format.type", "'triggered_tags'", id="other format"),
    pytest.param(tag_format(excludes=["x"]), "response_format.format.excludes", "not permitted", id="unknown part"),
    pytest.param(
        tag_format(tags=[{"begin": "<f=a>", "content": {"type": "regex", "pattern": "a"}, "end": ""}]),
        "response_format.format.tags.0.content.type", "'json_schema'", id="other content",
    ),
]  # fmt: skip


def test_wrong_options_of_the_output_format_are_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            for case in WRONG:
                fields, param, reason = case.values
                error = (await s.post("/v1/completions", prompt="say:x", **fields)).json()["error"]
                assert (error["param"], error["code"]) == (param, "invalid_value"), (case.id, error)
                assert reason in error["message"], (case.id, error)

    run(scenario)
