"""The tools of a chat request: what the template is shown, and what the answer must be when a call is forced.

Pure; `protocol` has the fields, the front reads `ToolUse`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.engine.http.errors import ApiError, bad_request, shown
from stoker.engine.output_grammar import OutputGrammar

MAX_TOOLS = 128
ALLOWED = "allowed_tools"
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Functions = Mapping[str, Mapping[str, Any]]
"""Function -> schema of its parameters."""
ToolMode = Literal["none", "auto", "required", "named"]
"""`none`: the tools are only shown to the template; `named`: one function is given."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, checked."""

    mode: ToolMode
    functions: Functions
    name: str | None = None
    """The function that `named` asks for."""
    parallel: bool = True
    allowed: tuple[str, ...] | None = None
    """The functions that may be called; None: all. The template is shown all."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")

    @property
    def most_calls(self) -> int | None:
        """Calls of an answer at most; None: any number."""
        return None if self.parallel else 1

    @property
    def callable(self) -> Functions:
        """The functions that may be called, with their schemas."""
        names = self.functions if self.allowed is None else self.allowed
        return {name: self.functions[name] for name in names}

    def beside(self, output: OutputGrammar | None) -> ToolUse:
        """The use of tools in an answer that must be `output`: JSON has no room for calls that need not be made."""
        is_json = output is not None and output.kind == "json_schema"
        return replace(self, mode="none") if is_json and self.mode == "auto" else self

    @property
    def grammar(self) -> OutputGrammar | None:
        """What the answer must be: the arguments of a named function, a list of calls where one is required.

        Where some functions may be called and none must, it depends on the model's form: `allowed_calls`.
        """
        if self.mode == "named" and self.name is not None:
            return OutputGrammar.json_schema(dict(self.functions[self.name]), "tools")
        if self.mode == "required":
            return OutputGrammar.json_schema(list_of_calls(self.callable, "parameters", self.most_calls), "tools")
        return None


def list_of_calls(functions: Functions, key: str, most: int | None) -> dict[str, Any]:
    """The schema of a list of at least one call, and `most` at most."""
    calls = call_schema(functions, key)
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": {"anyOf": calls["anyOf"]}, "minItems": 1, **limit, "$defs": calls["$defs"]}


def call_schema(functions: Functions, key: str) -> dict[str, Any]:
    """The schema of a call of one of the functions, with its arguments under `key`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in functions
    ]
    schemas = {name: moved(schema, f"#/$defs/{name}") for name, schema in functions.items()}
    return {"anyOf": calls, "$defs": schemas}


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
    _refuse_ambiguous(tools or ())
    if isinstance(choice, Mapping) and choice.get("type") == ALLOWED:
        return _allowed_use(functions, choice, parallel)
    mode, name = _choice(choice, bool(functions))
    if mode in ("required", "named") and not functions:
        raise _wrong("tool_choice", f"{shown(choice)} is only allowed with tools")
    if name is not None and name not in functions:
        raise _wrong("tool_choice", f"no tool has the name {shown(name)}; there are {', '.join(functions)}")
    return ToolUse(mode, functions, name, parallel is not False)


def _refuse_ambiguous(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two functions of one name: a call could not tell which is meant. Equal copies do no harm."""
    first: dict[str, int] = {}
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        before = first.setdefault(name, number)
        if tool["function"] != tools[before]["function"]:
            copies = "each name may stand for one function, of which equal copies are allowed"
            raise _wrong("tools", f"tools.{before} and tools.{number} differ and both have the name {name}; {copies}")


def _allowed_use(functions: Functions, choice: Mapping[str, Any], parallel: bool | None) -> ToolUse:
    """A choice of the functions that may be called. Raises ApiError 400."""
    field, given = f"tool_choice.{ALLOWED}", choice.get(ALLOWED)
    if not functions:
        raise _wrong("tool_choice", f"{ALLOWED} is only allowed with tools")
    if not isinstance(given, Mapping):
        raise _wrong(field, f"an object with mode and tools is needed, got {shown(given)}")
    mode: ToolMode | None = {"auto": "auto", "required": "required"}.get(str(given.get("mode")))  # type: ignore[assignment]
    if mode is None:
        raise _wrong(f"{field}.mode", f"auto or required is needed, got {shown(given.get('mode'))}")
    tools = given.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        allowed = f"a list of 1 to {MAX_TOOLS} of the request's functions ({', '.join(functions)}) is needed"
        raise _wrong(f"{field}.tools", f"{allowed}, got {shown(tools)}")
    names = [_allowed_name(f"{field}.tools.{number}", tool, functions) for number, tool in enumerate(tools)]
    return ToolUse(mode, functions, None, parallel is not False, tuple(dict.fromkeys(names)))


def _allowed_name(field: str, tool: Any, functions: Functions) -> str:
    """The function that an entry of the allowed tools names."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in functions:
        return name
    got = shown(tool if name is None else name)
    raise _wrong(field, f"must name one of the request's functions {', '.join(functions)}, got {got}")


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
    inside = {key: value for key, value in schema.items() if key != "$id"}  # references are relative to the whole
    return name, {"type": "object", **inside}


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
        allowed = 'none, auto, required, {"type": "function", "function": {"name": NAME}} or {"type": "allowed_tools"}'
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
    except (ValueError, RecursionError) as error:
        message = f"function.arguments must be a JSON object ({error}), got {shown(arguments)}"
        raise _wrong("messages.tool_calls", message) from error
    if not isinstance(value, Mapping):
        raise _wrong("messages.tool_calls", f"function.arguments must be a JSON object, got {shown(arguments)}")
    return {**call, "function": {**function, "arguments": value}}


def _wrong(field: str, message: str) -> ApiError:
    return bad_request(f"{field}: {message}", field, "invalid_value")
