"""The fields of a body that say what the output must be, as OpenAI and vLLM spell them, and the grammar they mean.

Pure; the bodies of `protocol` have these fields, `params` calls `grammar_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stoker.engine.http.errors import bad_request, not_supported
from stoker.engine.http.openai.body import Body, Texts
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

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is needed with type json_schema")
        return self

    @property
    def grammar(self) -> OutputGrammar | None:
        if self.type == "json_object":
            return OutputGrammar.json_object("response_format")
        if self.type == "json_schema" and self.json_schema is not None:
            return OutputGrammar.json_schema(self.json_schema.schema_, "response_format.json_schema.schema")
        return None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
    }

    def given(self, root: str, separator: str = ".") -> dict[str, OutputGrammar]:
        """The grammars of the fields that are set, by the name that the client used."""
        made: dict[str, OutputGrammar] = {}
        if self.json_ is not None:
            name = f"{root}{separator}json"
            made[name] = OutputGrammar.json_schema(self.json_, name)
        if self.json_object:
            name = f"{root}{separator}json_object"
            made[name] = OutputGrammar.json_object(name)
        if self.regex is not None:
            name = f"{root}{separator}regex"
            made[name] = OutputGrammar.regex(self.regex, name)
        if self.choice is not None:
            name = f"{root}{separator}choice"
            made[name] = OutputGrammar.choice(self.choice, name)
        if self.grammar is not None:
            name = f"{root}{separator}grammar"
            made[name] = OutputGrammar.grammar(self.grammar, name)
        return made

    def check_supported(self) -> None:
        """Refuse options that are not built.

        Raises:
            ApiError: 400, names the field.
        """
        for name, harmless in self.refused.items():
            if (self.model_extra or {}).get(name) not in harmless:
                raise not_supported(f"structured_outputs.{name}")


class FormattedBody(Body):
    """The fields of both kinds of completion that constrain the output. At most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @property
    def output_grammar(self) -> OutputGrammar | None:
        """What the output must be; None: any text.

        Raises:
            ApiError: 400, several fields say so, or an option is not built.
            RequestRefused: a value is not allowed.
        """
        given = self._guided().given("guided", "_")
        if self.structured_outputs is not None:
            self.structured_outputs.check_supported()
            chosen = self.structured_outputs.given("structured_outputs")
            if not chosen:
                message = "structured_outputs: one of json, json_object, regex, choice and grammar is needed"
                raise bad_request(message, "structured_outputs", "invalid_value")
            given |= chosen
        if self.response_format is not None and (grammar := self.response_format.grammar) is not None:
            given["response_format"] = grammar
        if len(given) > 1:
            first, second, *_ = given
            raise bad_request(f"{second}: not allowed together with {first}", second, "invalid_value")
        return next(iter(given.values()), None)

    def _guided(self) -> StructuredOutputs:
        """vLLM's older fields, `guided_json` and its like."""
        return StructuredOutputs.model_construct(
            json_=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
