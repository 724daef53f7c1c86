"""Fields that say what the output must be, from the body to the core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.engine.output_grammar import OutputGrammar
from testing.engine.serving import run, serving

CHAT = {"messages": [{"role": "user", "content": "say:x"}]}


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
            pattern = await s.post("/v1/completions", prompt="x", guided_whitespace_pattern=" ")
            assert pattern.json()["error"]["param"] == "guided_whitespace_pattern"
            assert (answer.status_code, error["param"], error["code"]) == (400, "guided_regex", "invalid_value")

    run(scenario)
