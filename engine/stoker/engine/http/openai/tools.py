"""The tools of a chat request: what the template is shown, and what the answer must be when a call is forced.

Pure; `protocol` has the fields, the front reads `ToolUse`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.engine.http.errors import ApiError, bad_request, shown
from stoker.engine.output_grammar import OutputGrammar

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

ToolMode = Literal["none", "auto", "required", "named"]
"""`none`: the tools are only shown to the template; `named`: one function is given."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, checked."""

    mode: ToolMode
    functions: Mapping[str, Mapping[str, Any]]
    """Function -> schema of its parameters."""
    name: str | None = None
    """The function that `named` asks for."""
    parallel: bool = True

    @property
    def most_calls(self) -> int | None:
        """Calls of an answer at most; None: any number."""
        return None if self.parallel else 1

    @property
    def grammar(self) -> OutputGrammar | None:
        """What the answer must be: the arguments of a named function, a list of calls where one is required."""
        if self.mode == "named" and self.name is not None:
            return OutputGrammar.json_schema(dict(self.functions[self.name]), "tools")
        if self.mode == "required":
            return OutputGrammar.json_schema(self._list_of_calls(), "tools")
        return None

    def _list_of_calls(self) -> dict[str, Any]:
        limit = {} if self.most_calls is None else {"maxItems": self.most_calls}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in self.functions
        ]
        schemas = {name: moved(schema, f"#/$defs/{name}") for name, schema in self.functions.items()}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "$defs": schemas}


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolUse:
    """Check the fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400, names the field.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise _wrong("tools", f"at most {MAX_TOOLS} tools are allowed, got {len(tools or ())}")
    functions = dict(_function(number, tool) for number, tool in enumerate(tools or ()))
    mode, name = _choice(choice, bool(functions))
    if mode in ("required", "named") and not functions:
        raise _wrong("tool_choice", f"{shown(choice)} is only allowed with tools")
    if name is not None and name not in functions:
        raise _wrong("tool_choice", f"no tool has the name {shown(name)}; there are {', '.join(functions)}")
    return ToolUse(mode, functions, name, parallel is not False)


def _function(number: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A tool's name and the schema of its parameters."""
    place = f"tools.{number}"
    if tool.get("type") != "function":
        raise _wrong(f"{place}.type", f"must be function, got {shown(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{place}.function", "an object with a name is needed")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{place}.function.name", f"1 to 64 letters, digits, _, . and - are needed, got {shown(name)}")
    schema = function.get("parameters")
    if schema is None:
        return name, dict(NO_PARAMETERS)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _wrong(f"{place}.function.parameters", "a JSON schema of type object is needed")
    return name, {"type": "object", **schema}


def _choice(choice: str | Mapping[str, Any] | None, has_tools: bool) -> tuple[ToolMode, str | None]:
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if choice == "auto":
        return ("auto" if has_tools else "none"), None
    if choice == "none":
        return "none", None
    if choice == "required":
        return "required", None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        allowed = 'none, auto, required or {"type": "function", "function": {"name": NAME}}'
        raise _wrong("tool_choice", f"{allowed} is needed, got {shown(choice)}")
    return "named", name


def moved(schema: Any, root: str) -> Any:
    """A schema whose references are relative to `root`, where it stands inside another one."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved(value, root)
            for key, value in schema.items()
        }
    return [moved(item, root) for item in schema] if isinstance(schema, list) else schema


def calls_for_template(calls: Any) -> list[dict[str, Any]]:
    """An assistant message's `tool_calls` as templates read them: with the arguments as an object.

    Raises:
        ApiError: 400, a call is not OpenAI's form, or its arguments are no JSON object.
    """
    if not isinstance(calls, list):
        raise _wrong("messages.tool_calls", "a list of calls is needed")
    return [_call_for_template(call) for call in calls]


def _call_for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong("messages.tool_calls", 'each call needs {"function": {"name", "arguments"}}')
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError as error:
        message = f"function.arguments must be a JSON object ({error}), got {shown(arguments)}"
        raise _wrong("messages.tool_calls", message) from error
    if not isinstance(value, Mapping):
        raise _wrong("messages.tool_calls", f"function.arguments must be a JSON object, got {shown(arguments)}")
    return {**call, "function": {**function, "arguments": value}}


def _wrong(field: str, message: str) -> ApiError:
    return bad_request(f"{field}: {message}", field, "invalid_value")
