"""HTTP around a front: routes, credentials, sizes, ids, streams, and an abort at once when the client leaves."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from stoker.engine.http.errors import ApiError, from_validation
from stoker.engine.http.front import Front
from stoker.engine.http.openai.answer import Answer
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from stoker.engine.http.openai.sse import DONE, event

log = logging.getLogger("stoker.engine")

B = TypeVar("B", bound=BaseModel)
Events = AsyncGenerator[bytes]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    path: str
    body: bytes
    id: str
    arrival_s: float

    def parse(self, cls: type[B]) -> B:
        """The body as `cls`.

        Raises:
            ApiError: 400, with the wrong field.
        """
        try:
            return cls.model_validate_json(self.body or b"{}")
        except ValidationError as error:
            raise from_validation(error) from error


Handler = Callable[[Call], Awaitable[Mapping[str, Any] | Events]]


class ClientLeft(Exception):
    """The client closed its connection before it had sent the whole request."""


def load_api_keys(path: str | None) -> tuple[str, ...]:
    """The keys in a file, one per line; none without a file.

    Raises:
        ValueError: the file holds no key, which would lock everybody out.
        OSError: it cannot be read.
    """
    if path is None:
        return ()
    keys = tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path}: at least one API key is needed")
    return keys


class OpenAiServer:
    """An ASGI application. Paths that are not OpenAI's go to `own`: probes, metrics, control routes."""

    def __init__(
        self, front: Front, own: list[BaseRoute], *, api_keys: tuple[str, ...], max_body_bytes: int, pod_uid: str = "",
        version: str = "",
    ) -> None:  # fmt: skip
        self.front = front
        self.api_keys = api_keys
        self.max_body_bytes = max_body_bytes
        self.pod_uid = pod_uid
        self.version = version
        self.running = 0
        """Answers that have not ended."""
        self._own = Starlette(routes=own)
        self._posts: dict[str, Handler] = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        handler = self._handler(scope["method"], path)
        if handler is None:
            await self._own(scope, receive, send)
            return
        self.running += 1
        try:
            await self._serve(handler, scope, receive, send)
        finally:
            self.running -= 1

    def _handler(self, method: str, path: str) -> Handler | None:
        """Who answers; None: not ours. A wrong method on a path of ours is an error in OpenAI's shape too."""
        if path in self._posts:
            return self._posts[path] if method == "POST" else _wrong_method
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return self._models if method == "GET" else _wrong_method
        if path in ("/health", "/ping"):
            return self._health
        if path == "/version":
            return self._version
        return _unknown_path if path.startswith("/v1/") else None

    async def _serve(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, answer, and stop at once when the client leaves, whatever is being waited for."""
        arrival_s = self.front.clock()
        request_id = _header(scope, b"x-request-id") or f"req-{uuid.uuid4().hex}"
        reply = _Reply(send, request_id, self.pod_uid)
        try:
            self._authorise(scope)
            body = await read_body(receive, self.max_body_bytes)
        except ClientLeft:
            return
        except ApiError as error:
            await reply.error(error)
            self._count(scope, reply, arrival_s)
            return
        call = Call(scope["path"], body, f"{uuid.uuid4().hex}", arrival_s)
        work = asyncio.create_task(_answer(handler, call, reply))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
            self._count(scope, reply, arrival_s)
        if not work.cancelled():
            work.result()

    def _authorise(self, scope: Scope) -> None:
        """Only with a key, where keys are asked for; health and version are everybody's."""
        if not self.api_keys or scope["path"] in ("/health", "/ping", "/version"):
            return
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        if scheme.lower() == "bearer":
            matches = [hmac.compare_digest(given.encode(), key.encode()) for key in self.api_keys]
            if any(matches):
                return
        raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    def _count(self, scope: Scope, reply: _Reply, arrival_s: float) -> None:
        path = "/v1/models" if scope["path"].startswith("/v1/models") else scope["path"]
        known = path in self._posts or path in ("/v1/models", "/health", "/version")
        seconds = self.front.clock() - arrival_s
        self.front.metrics.answered(path if known else "other", scope["method"], reply.status or 499, seconds)

    # Handlers.

    async def _completions(self, call: Call) -> Mapping[str, Any] | Events:
        body = call.parse(CompletionBody)
        return await _whole_or_stream(body, await self.front.completion(body, call.id, call.arrival_s))

    async def _chat(self, call: Call) -> Mapping[str, Any] | Events:
        body = call.parse(ChatBody)
        return await _whole_or_stream(body, await self.front.chat(body, call.id, call.arrival_s))

    async def _models(self, call: Call) -> Mapping[str, Any]:
        name = call.path.removeprefix("/v1/models").removeprefix("/")
        return self.front.model(name) if name else self.front.models()

    async def _tokenize(self, call: Call) -> Mapping[str, Any]:
        return await self.front.tokenize(call.parse(TokenizeBody))

    async def _detokenize(self, call: Call) -> Mapping[str, Any]:
        return await self.front.detokenize(call.parse(DetokenizeBody))

    async def _health(self, _: Call) -> Mapping[str, Any]:
        """Says what is true: a dead core is not healthy."""
        if not self.front.ready:
            raise ApiError(503, f"Not ready: {self.front.core.problem}", code="not_ready", retry_after_s=1)
        return {}

    async def _version(self, _: Call) -> Mapping[str, Any]:
        return {"version": self.version}


async def _wrong_method(call: Call) -> Mapping[str, Any]:
    raise ApiError(405, f"This method is not allowed on {call.path}.", code="method_not_allowed")


async def _unknown_path(call: Call) -> Mapping[str, Any]:
    raise ApiError(404, f"Unknown path {call.path}.", code="unknown_path")


async def _whole_or_stream(body: GenerationBody, answer: Answer) -> Mapping[str, Any] | Events:
    return _events(answer) if body.stream else await answer.whole()


async def _events(answer: Answer) -> Events:
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            yield event(chunk)
    yield DONE


async def _answer(handler: Handler, call: Call, reply: _Reply) -> None:
    """Run a handler and send what it gives. A stream begins with its first event, so that a refusal still has its status."""
    try:
        result = await handler(call)
        if isinstance(result, Mapping):
            await reply.json(200, result)
        else:
            await _stream(result, reply)
    except ApiError as error:
        await reply.error(error)
    except Exception as error:
        log.exception("request %s failed", reply.request_id)
        await reply.error(ApiError(500, f"Internal error: {type(error).__name__}", code="internal_error"))


async def _stream(events: Events, reply: _Reply) -> None:
    async with aclosing(events):
        first = await anext(events)
        await reply.begin_stream()
        await reply.chunk(first)
        async for part in events:
            await reply.chunk(part)
    await reply.end()


class _Reply:
    """The sending half of one exchange."""

    def __init__(self, send: Send, request_id: str, pod_uid: str) -> None:
        self.send = send
        self.request_id = request_id
        self.pod_uid = pod_uid
        self.status: int | None = None
        """None: nothing has been sent."""

    async def json(self, status: int, content: Mapping[str, Any], more: Mapping[str, str] | None = None) -> None:
        body = json.dumps(content, separators=(",", ":")).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **(more or {})}
        await self._start(status, headers)
        await self.send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._start(200, headers)

    async def chunk(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})

    async def error(self, error: ApiError) -> None:
        """As an answer, or, once a stream has begun, as its last event before `[DONE]`."""
        if self.status is None:
            await self.json(error.status, error.body(), error.headers())
            return
        await self.chunk(event(error.body()) + DONE)
        await self.end()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        own = {"x-request-id": self.request_id, **({"x-stoker-pod-uid": self.pod_uid} if self.pod_uid else {})}
        raw: Headers = [(key.encode(), value.encode("latin-1", "replace")) for key, value in {**headers, **own}.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, it is larger than `max_bytes`.
        ClientLeft: the client went away.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
