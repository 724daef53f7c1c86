"""Errors in the shape that OpenAI's clients expect: a status and `{"error": {"message", "type", "param", "code"}}`.

Raised by front, parameters and bodies; `reply` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from stoker.engine.errors import RequestRefused

RETRY_AFTER_S = 1
SHOWN_CHARACTERS = 60
"""The part of a wrong value that a message quotes."""


class ApiError(Exception):
    """A request that is answered with an error.

    Clients repeat a request after 429 and 503, `retry_after_s` later, never after 400. OpenAI's would also repeat it
    after 409 and 500; without `retry_after_s` they are told that nothing would change.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.more_headers = dict(headers or {})
        self.more_fields = dict(fields or {})
        """Fields of the answer beside `error`."""

    def body(self) -> dict[str, Any]:
        return {
            **self.more_fields,
            "error": {"message": self.message, "type": self._type(), "param": self.param, "code": self.code},
        }

    def late_body(self) -> dict[str, Any]:
        """The event of an error in a stream that has begun, whose headers are sent already."""
        body = self.body()
        if self.retry_after_s is not None:
            body["error"] |= {"retry_after_s": self.retry_after_s}
        return body

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is not None:
            return {**self.more_headers, "retry-after": str(self.retry_after_s)}
        return {**self.more_headers, **({"x-should-retry": "false"} if self._would_be_repeated() else {})}

    def _would_be_repeated(self) -> bool:
        return self.status in (408, 409, 429) or self.status >= 500

    def _type(self) -> str:
        types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_supported(field: str, allowed: Iterable[object] = (None,)) -> ApiError:
    """Refuse a parameter that would change the answer and is not built; `allowed` are the values without effect."""
    values = " or ".join(json.dumps(value) for value in allowed if value is not None)
    hint = f"allowed: {values}" if values else "leave it out"
    return bad_request(f"not supported yet: {field}; {hint}", field.split("=")[0], "unsupported_parameter")


def too_long(max_model_len: int, prompt_tokens: int, output_tokens: int, field: str) -> ApiError:
    """Refuse a prompt that does not fit, in the words that clients search for."""
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the prompt, {output_tokens} in the completion). "
        "Please reduce the length of the prompt or completion.",
        field,
        "context_length_exceeded",
    )


def model_not_found(name: str, names: tuple[str, ...]) -> ApiError:
    message = f"The model `{shortened(name)}` does not exist; served here: {', '.join(names) or 'none'}."
    return ApiError(404, message, param="model", code="model_not_found")


def from_refusal(refused: RequestRefused) -> ApiError:
    """Turn the core's refusal into an answer."""
    if refused.kind == "queue_full":
        return ApiError(429, str(refused), code="queue_full", retry_after_s=RETRY_AFTER_S)
    if refused.kind in ("draining", "not_ready"):
        return ApiError(503, str(refused), code=refused.kind, retry_after_s=RETRY_AFTER_S)
    code = "context_length_exceeded" if refused.kind == "too_long" else "invalid_value"
    return bad_request(str(refused), refused.field, code)


def engine_lost(why: str) -> ApiError:
    return ApiError(503, f"The engine core has ended: {why}", code="engine_lost", retry_after_s=1)


def from_validation(error: ValidationError) -> ApiError:
    """Turn pydantic's findings into an answer about the first wrong field, with its path."""
    item = error.errors(include_url=False, include_context=False)[0]
    if item["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {item['msg']}.", code="invalid_json")
    param = _path(item)
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "model_type" and not param:
        return bad_request(f"The body must be a JSON object (got {shown(item['input'])}).", code="invalid_value")
    if not param:  # a rule of the whole body; its message begins with the field
        field, colon, _ = message.partition(": ")
        return bad_request(message, field if colon else None, "invalid_value")
    if item["type"] == "missing":
        return bad_request(f"{param}: {message}", param, "invalid_value")
    union = _union(item)
    if union in UNIONS:
        param, message = union, UNIONS[union]
    return bad_request(f"{param}: {message} (got {shown(item['input'])})", param, "invalid_value")


UNIONS = {
    "prompt": "a text, a list of texts, token ids from 0, or a list of lists of them is needed",
    "stop": "a text or a list of texts is needed",
    "input": "a text or a list of at least one item is needed",
    "tool_choice": "a text or an object with a function or allowed_tools is needed",
}
"""Messages for fields of several shapes; pydantic's message covers the first shape only."""
UNION_MEMBERS = ("str", "int", "float", "bool", "constrained-str", "constrained-int")


def _path(item: Mapping[str, Any]) -> str:
    """`messages.0.content`, without the names of union members that pydantic adds."""
    return ".".join(str(part) for part in item["loc"] if not _is_member(part))


def _union(item: Mapping[str, Any]) -> str | None:
    """Return the field of the body if it has several shapes and none fits."""
    field, *inside = item["loc"]
    return str(field) if inside and _is_member(inside[0]) else None


def _is_member(part: object) -> bool:
    return part in UNION_MEMBERS or "[" in str(part)


def shown(value: object) -> str:
    """Return a wrong value as it appears in a message."""
    if isinstance(value, list):
        value = value[:SHOWN_CHARACTERS]
    return shortened(repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
