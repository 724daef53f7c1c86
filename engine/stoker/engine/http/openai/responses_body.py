"""`POST /v1/responses`: its body, and the chat request that it means. Stateless: nothing is stored.

Values; parsed by `server`. The answer's shape belongs to `responses`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from stoker.engine.http.errors import ApiError, bad_request, from_validation, not_supported, shown
from stoker.engine.http.openai.body import Body, Count, Int
from stoker.engine.http.openai.protocol import MAX_MESSAGES, ChatBody
from stoker.engine.http.openai.tools import ALLOWED, calls_for_template

FIELDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Chat's field -> this route's."""
TOOL_FIELD = re.compile(r"(tools\.\d+)\.function")
"""Chat has a tool's fields one level deeper."""
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""OpenAI's values of `include`. Those of tools and inputs that are not built have no effect: answers have none."""
MAX_TOP_LOGPROBS = 20


SHARED = frozenset({*ChatBody.model_fields, *ChatBody.refused}) - FIELDS.keys() - {"stream_options"}
"""Fields that mean what they mean in a chat, or are refused as there. `stream_options` has another meaning here."""


class TextFormat(Body):
    """`text.format`: the fields of `response_format.json_schema`, one level higher."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema is needed with type json_schema")
        return self


class TextOptions(Body):
    format: TextFormat = TextFormat()


class ReasoningOptions(Body):
    effort: str | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: TextOptions = TextOptions()
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    seed: Int | None = None
    priority: Int = 0
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    metadata: dict[str, str] | None = None
    """Comes back with the answer."""
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Most probable tokens beside each of the message; log-probabilities come with it, or with `include`."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: the oldest items that do not fit beside the output are left out."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "max_tool_calls": (None,),
        "n": (None, 1),
        "logprobs": (None, False),
        "use_beam_search": (None, False),
        "return_token_ids": (None, False),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
    }
    """Fields that are not built, with the values that have no effect."""

    def check_supported(self) -> None:
        """Refuse fields that are not built.

        Raises:
            ApiError: 400, names the field.
        """
        extra = self.model_extra or {}
        for name, harmless in self.refused.items():
            if extra.get(name) not in harmless:
                raise not_supported(name, harmless)
        for chats, own in FIELDS.items():
            if extra.get(chats) is not None:
                raise bad_request(f"{chats}: this route has {own} for it", chats, "invalid_value")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the message has log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self) -> ChatBody:
        """The same request for the chat route.

        Raises:
            ApiError: 400, names the field.
        """
        self.check_supported()
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [*([{"role": "system", "content": self.instructions}] if self.instructions else [])]
        for number, item in enumerate(items):
            add_item(messages, item, f"input.{number}")
        fields = {
            "model": self.model,
            "messages": messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "priority": self.priority,
            "tools": [chat_tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            **{name: value for name, value in (self.model_extra or {}).items() if name in SHARED},
        }
        try:
            return ChatBody.model_validate({key: value for key, value in fields.items() if value is not None})
        except ValidationError as error:
            raise renamed(from_validation(error)) from error

    def _response_format(self) -> dict[str, Any]:
        form = self.text.format
        if form.type != "json_schema":
            return {"type": form.type}
        return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}


def renamed(error: ApiError) -> ApiError:
    """Name this route's own fields in an error about the chat request that was made of them."""
    for chats, own in FIELDS.items():
        if error.param is not None and error.param.startswith(chats):
            error.message = error.message.replace(chats, own)
            error.param = own + error.param.removeprefix(chats)
            break
    if error.param is not None and TOOL_FIELD.match(error.param):
        error.message, error.param = TOOL_FIELD.sub(r"\1", error.message), TOOL_FIELD.sub(r"\1", error.param)
    if error.param == "min_tokens":  # its limit is the output's
        error.message = error.message.replace("max_completion_tokens", "max_output_tokens")
    return error


def add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Add an input item as a message; calls join the assistant's message before them.

    Raises:
        ApiError: 400, the item is of a kind that is not built, or lacks a field.
    """
    kind = item.get("type", "message")
    if kind == "message":
        if not isinstance(item.get("role"), str):
            raise bad_request(f"{place}.role: a text is needed", f"{place}.role", "invalid_value")
        messages.append({"role": item["role"], "content": item.get("content")})
    elif kind == "function_call":
        call = chat_call(item, place)
        if not messages or "tool_calls" not in messages[-1]:
            messages.append({"role": "assistant", "content": None, "tool_calls": []})
        messages[-1]["tool_calls"].append(call)
    elif kind == "function_call_output":
        for field in ("call_id", "output"):
            if item.get(field) is None:
                raise bad_request(f"{place}.{field}: Field required", f"{place}.{field}", "invalid_value")
        output = item["output"]
        content = output if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind != "reasoning":  # the model's own earlier reasoning is not repeated
        raise not_supported(f"{place}.type={shown(kind)}", ITEMS)


def chat_call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    """An earlier call in chat's form.

    Raises:
        ApiError: 400, it has no name, or its arguments are no JSON object.
    """
    if not isinstance(item.get("name"), str):
        message = f"{place}.name: the function's name is needed, got {shown(item.get('name'))}"
        raise bad_request(message, f"{place}.name", "invalid_value")
    function = {"name": item["name"], "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    try:
        calls_for_template([call])
    except ApiError as error:
        message = error.message.replace("messages.tool_calls: function.", f"{place}.")
        raise bad_request(message, f"{place}.arguments", "invalid_value") from error
    return call


def chat_tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in chat's form, which has the function's fields one level deeper.

    Raises:
        ApiError: 400, the tool is none of functions.
    """
    if tool.get("type") != "function":
        raise not_supported(f"tools.{number}.type={shown(tool.get('type'))}", ("function",))
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice in chat's form, which has the fields of functions and of allowed tools one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        tools = choice.get("tools")
        chats = [chat_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": ALLOWED, ALLOWED: {"mode": choice.get("mode"), "tools": chats}}
    return choice
