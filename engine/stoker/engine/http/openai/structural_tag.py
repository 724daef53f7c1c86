"""The field `structural_tag` in both of its forms: the list of structures of vLLM's first one, and `triggered_tags`.

Pure; used by `output_format`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from stoker.engine.http.errors import ApiError, bad_request, from_validation
from stoker.engine.http.openai.body import Body, Texts
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.structural_tags import StructuralTag, StructuralTags

Schema = dict[str, Any] | bool


class Structure(Body):
    """One of `structures`."""

    begin: str
    schema_: Schema = Field(alias="schema")
    end: str


class Structures(Body):
    """The first form."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(fail_fast=True)]
    triggers: Texts

    def tags(self, field: str) -> StructuralTags:
        own = [(one.begin, one.schema_, one.end) for one in self.structures]
        return StructuralTags(_with_triggers(own, self.triggers, field))


class Exact(Body):
    """A part without unknown keys: each of them would change what the answer may be."""

    model_config = ConfigDict(extra="forbid")


class TagContent(Exact):
    type: Literal["json_schema"]
    json_schema: Schema


class Tag(Exact):
    type: Literal["tag"] = "tag"
    begin: str
    content: TagContent
    end: str


class TriggeredTags(Exact):
    type: Literal["triggered_tags"]
    triggers: Texts
    tags: Annotated[list[Tag], Field(fail_fast=True)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagFormat(Body):
    """The second form; of its formats only `triggered_tags` is built."""

    type: Literal["structural_tag"] = "structural_tag"
    format: TriggeredTags

    def tags(self, field: str) -> StructuralTags:
        form = self.format
        own = [(one.begin, one.content.json_schema, one.end) for one in form.tags]
        return StructuralTags(_with_triggers(own, form.triggers, field), form.at_least_one, form.stop_after_first)


def structural_tags(value: Mapping[str, Any] | str, field: str) -> StructuralTags:
    """Return the structures that a request asks for. A text is their JSON.

    Raises:
        ApiError: 400, names the wrong part below `field`.
        RequestRefused: a schema is not allowed.
    """
    if isinstance(value, str):
        value = _parsed(value, field)
    form = TagFormat if value.get("format") is not None else Structures
    try:
        return form.model_validate(dict(value)).tags(field)
    except ValidationError as error:
        raise _below(field, from_validation(error)) from error


def _parsed(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field}: must be JSON: {error}", field, "invalid_value") from error
    if not isinstance(value, dict):
        raise bad_request(f"{field}: must be the JSON of an object", field, "invalid_value")
    return value


def _with_triggers(
    structures: Sequence[tuple[str, Schema, str]], triggers: Sequence[str], field: str
) -> tuple[StructuralTag, ...]:
    """The structures, each with the one trigger with which it begins."""
    tags = []
    for begin, schema, end in structures:
        own = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
        if len(own) != 1:
            message = f"{field}: begin must start with exactly one of the triggers {list(triggers)}, got {begin!r}"
            raise bad_request(message, field, "invalid_value")
        tags.append(StructuralTag(own[0], begin, OutputGrammar.json_schema(schema, field).text, end))
    return tuple(tags)


def _below(field: str, error: ApiError) -> ApiError:
    """The error with its place below the field."""
    if error.param is None:
        return bad_request(f"{field}: {error.message}", field, error.code)
    return bad_request(f"{field}.{error.message}", f"{field}.{error.param}", error.code)
