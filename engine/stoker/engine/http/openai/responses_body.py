"""`POST /v1/responses`: its body, and the chat request that it means. Stateless: nothing is stored.

Values; parsed by `server`. The answer's shape belongs to `responses`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from stoker.engine.http.errors import ApiError, bad_request, from_validation, not_supported, shown
from stoker.engine.http.openai.body import Body, Int
from stoker.engine.http.openai.protocol import MAX_MESSAGES, ChatBody

FIELDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}
"""Chat's field -> this route's."""
SHARED = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop",
    "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "allowed_token_ids", "bad_token_ids",
    "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "structured_outputs", "cache_salt",
    "thinking_token_budget", "repetition_detection", "logprob_token_ids", "kv_transfer_params",
)  # fmt: skip
"""Fields that are not OpenAI's and mean what they mean in a chat, or are refused as there."""
LOGPROBS = "message.output_text.logprobs"


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
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
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
    include: list[str] | None = None

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "truncation": (None, "disabled"),
        "top_logprobs": (None, 0),
        "max_tool_calls": (None,),
    }
    """Fields that are not built, with the values that have no effect."""

    def check_supported(self) -> None:
        """Refuse fields that are not built.

        Raises:
            ApiError: 400, names the field.
        """
        for name, harmless in self.refused.items():
            if (self.model_extra or {}).get(name) not in harmless:
                raise not_supported(name)
        if LOGPROBS in (self.include or ()):
            raise not_supported(f"include={LOGPROBS}")

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
            **{name: (self.model_extra or {}).get(name) for name in SHARED},
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
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
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
        raise not_supported(f"{place}.type={shown(kind)}")


def chat_tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in chat's form, which has the function's fields one level deeper.

    Raises:
        ApiError: 400, the tool is none of functions.
    """
    if tool.get("type") != "function":
        raise not_supported(f"tools.{number}.type={shown(tool.get('type'))}")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
