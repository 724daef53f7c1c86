"""The fields of a body that say what the output must be, as OpenAI and vLLM spell them, and the grammar they mean.

Pure; the bodies of `protocol` have these fields, `params` calls `grammar_of`.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from stoker.engine.closed_schema import is_composed
from stoker.engine.http.errors import bad_request
from stoker.engine.http.openai.body import Body, Texts
from stoker.engine.http.openai.structural_tag import structural_tags
from stoker.engine.output_grammar import OutputGrammar

Schema = dict[str, Any] | bool | str
"""A JSON schema, or its text."""


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    """Without effect: the schema always holds."""


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is needed with type json_schema")
        return self

    def grammar(self, blanks: str | None) -> OutputGrammar | None:
        if self.type == "json_object":
            return OutputGrammar.json_object("response_format", blanks)
        if self.type == "json_schema" and self.json_schema is not None:
            return OutputGrammar.json_schema(self.json_schema.schema_, "response_format.json_schema.schema", blanks)
        if self.type == "structural_tag":
            tags = structural_tags(self.model_extra or {}, "response_format")
            return OutputGrammar.structural_tags(tags, "response_format", blanks)
        return None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    """What may stand between two parts of a JSON value, as a regular expression."""
    disable_any_whitespace: bool = False
    """Nothing stands between them."""
    disable_additional_properties: bool = False
    """Without effect: objects have no others than they name, except in schemas with composed objects."""

    @model_validator(mode="after")
    def _one_kind_of_blanks(self) -> StructuredOutputs:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace is not allowed together with whitespace_pattern")
        return self

    @property
    def blanks(self) -> str | None:
        """`OutputGrammar.blanks`."""
        return "" if self.disable_any_whitespace else self.whitespace_pattern

    def given(self, root: str, separator: str = ".") -> dict[str, OutputGrammar]:
        """The grammars of the fields that are set, by the name that the client used."""
        made: dict[str, OutputGrammar] = {}
        if self.json_ is not None:
            name = f"{root}{separator}json"
            made[name] = OutputGrammar.json_schema(self.json_, name, self.blanks)
            self._check_closed(made[name])
        if self.json_object:
            name = f"{root}{separator}json_object"
            made[name] = OutputGrammar.json_object(name, self.blanks)
        if self.regex is not None:
            name = f"{root}{separator}regex"
            made[name] = OutputGrammar.regex(self.regex, name)
        if self.choice is not None:
            name = f"{root}{separator}choice"
            made[name] = OutputGrammar.choice(self.choice, name)
        if self.grammar is not None:
            name = f"{root}{separator}grammar"
            made[name] = OutputGrammar.grammar(self.grammar, name)
        if self.structural_tag is not None:
            name = f"{root}{separator}structural_tag"
            made[name] = OutputGrammar.structural_tags(structural_tags(self.structural_tag, name), name, self.blanks)
        return made

    def _check_closed(self, grammar: OutputGrammar) -> None:
        """Refuse to close the objects of a schema in which several schemas apply to one object. Raises ApiError 400."""
        if self.disable_additional_properties and is_composed(json.loads(grammar.text)):
            message = (
                "must be false for a schema with allOf, not, if or the like: none of their parts names all properties"
            )
            field = "structured_outputs.disable_additional_properties"
            raise bad_request(f"{field}: {message}", field, "invalid_value")


class FormattedBody(Body):
    """The fields of both kinds of completion that constrain the output. At most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def output_grammar(self) -> OutputGrammar | None:
        """What the output must be; None: any text.

        Raises:
            ApiError: 400, several fields say so, or an option is not built.
            RequestRefused: a value is not allowed.
        """
        given = self._guided().given("guided", "_")
        if self.structured_outputs is not None:
            chosen = self.structured_outputs.given("structured_outputs")
            if not chosen:
                message = (
                    "structured_outputs: one of json, json_object, regex, choice, grammar, structural_tag is needed"
                )
                raise bad_request(message, "structured_outputs", "invalid_value")
            given |= chosen
        form = self.response_format
        if form is not None and (grammar := form.grammar(self.guided_whitespace_pattern)) is not None:
            given["response_format"] = grammar
        if len(given) > 1:
            first, second, *_ = given
            raise bad_request(f"{second}: not allowed together with {first}", second, "invalid_value")
        return next(iter(given.values()), None)

    def _guided(self) -> StructuredOutputs:
        """vLLM's older fields, `guided_json` and its like."""
        return StructuredOutputs.model_construct(
            json_=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar,
            whitespace_pattern=self.guided_whitespace_pattern,
        )  # fmt: skip
