"""The OpenAI-compatible HTTP server around a front: routes, API keys, body limits.

A request is aborted as soon as its client disconnects. Owns no request state: the front does. Made by `program`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from stoker.engine.http.api_document import DOCS_PATH, OPENAPI_PATH, REQUESTS_PATH, docs_page, openapi_document
from stoker.engine.http.api_keys import check_api_key
from stoker.engine.http.call import Events, Handler, HttpCall, Result, Stream
from stoker.engine.http.errors import RETRY_AFTER_S, ApiError, bad_request, shortened
from stoker.engine.http.event_stream import chunk_events, send_stream, typed_events
from stoker.engine.http.generation import Generation
from stoker.engine.http.openai.chat import ChatAnswer
from stoker.engine.http.openai.completions import CompletionAnswer
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from stoker.engine.http.openai.responses_body import ResponsesBody
from stoker.engine.http.openai.resume import TokenMarks, parse_resume, resumable
from stoker.engine.http.reply import Page, Reply
from stoker.engine.http.served_models import ServedModels
from stoker.pod.asgi import (
    BodyTooLarge,
    ClientLeft,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    request_id,
)
from stoker.pod.beginnings import BEGINNING_HEADER, beginning_in
from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent, BodyShare
from stoker.pod.class_place import PLACE_HEADER, place_in
from stoker.pod.client_presence import while_present
from stoker.pod.data_rank import RANK_HEADER, rank_in
from stoker.pod.marked_streams import RESUME_HEADER, RESUME_PATH
from stoker.pod.split_requests import PREFILL_HEADER
from stoker.pod.stream_comments import COMMENTS_HEADER
from stoker.pod.tracing import TRACE_HEADER, trace_of

log = logging.getLogger("stoker.engine")

POST: Sequence[str] = ("POST",)
MODELS_PATH, LOAD = "/v1/models", "/load"
PARENTS = (MODELS_PATH, REQUESTS_PATH)
"""Paths below which the next part is a name."""
GET: Sequence[str] = ("GET", "HEAD")
LOAD_PATH, RESPONSES_PATH = "/load", "/v1/responses"
OPEN_PATHS = frozenset((LOAD_PATH, "/health", "/ping", "/version", OPENAPI_PATH, DOCS_PATH))
"""Answered without an API key."""


class OpenAiServer:
    """An ASGI application. Paths that are not OpenAI's go to `own`: probes, metrics, control routes."""

    def __init__(
        self, front: ServedModels, own: list[BaseRoute], *, api_keys: tuple[str, ...], max_body_bytes: int,
        max_body_bytes_in_flight: int = 128 * 2**20, allowed_origins: Sequence[str] = (), pod_uid: str = "",
        version: str = "", load_reports: Callable[[], Events] | None = None, comment_interval_s: float = 0.0,
        num_ranks: int = 1,
    ) -> None:  # fmt: skip
        """`load_reports`: what `GET /load` tells routers; without it the path is unknown. `num_ranks`: data ranks,
        among which a router may choose."""
        self.front = front
        self.api_keys = tuple(key.encode() for key in api_keys)
        self.max_body_bytes = max_body_bytes
        self.bodies = BodyBudget(max(max_body_bytes_in_flight, max_body_bytes))
        self.pod_uid = pod_uid
        self.version = version
        self.comment_interval_s = comment_interval_s
        self.num_ranks = num_ranks
        self.running = 0
        """Answers that have not ended."""
        self._own = Starlette(routes=own, exception_handlers={404: _nowhere})
        self._posts: dict[str, Handler] = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            RESPONSES_PATH: self._responses,
            "/v1/embeddings": self._embeddings,
            RESUME_PATH: self._resume,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        self._gets: dict[str, Handler] = {
            "/v1/models": self._models,
            REQUESTS_PATH: self._request,
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            OPENAPI_PATH: self._openapi,
            DOCS_PATH: self._docs,
        }
        if load_reports is not None:
            self._gets[LOAD_PATH] = _streams(load_reports)
        self._app: Callable[[Scope, Receive, Send], Awaitable[None]] = self._dispatch
        if allowed_origins:
            self._app = CORSMiddleware(
                self._dispatch, allow_origins=allowed_origins, allow_methods=("*",), allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handler(scope["method"], scope["path"])
        if handler is None:
            await self._own(scope, receive, send)
            return
        self.running += 1
        try:
            with self.bodies.share() as share:
                await self._serve(handler, scope, share, receive, send)
        finally:
            self.running -= 1

    def _handler(self, method: str, path: str) -> Handler | None:
        """Return the handler of a path, or None for the paths of `own`."""
        routes, methods, known = self._posts, POST, path
        known = next((parent for parent in PARENTS if path.startswith(f"{parent}/")), path)
        if known == MODELS_PATH and path != known and (method == "DELETE" or _loads(path)):
            return self._change_model(method, path)
        if known in self._gets:
            routes, methods = self._gets, GET
        elif path.startswith(f"{RESPONSES_PATH}/"):
            return _not_stored
        elif path not in self._posts:
            return _unknown_path if path.startswith("/v1/") else None
        if method == "OPTIONS":
            return _options(methods)
        return routes[known] if method in methods else _wrong_method(methods)

    def _change_model(self, method: str, path: str) -> Handler:
        """Return the handler that loads or unloads a model."""
        if not _loads(path):
            return self._unload
        if method == "OPTIONS":
            return _options(POST)
        return self._load if method == "POST" else _wrong_method(POST)

    async def _serve(self, handler: Handler, scope: Scope, share: BodyShare, receive: Receive, send: Send) -> None:
        """Read, answer, and stop at once when the client disconnects, during any wait."""
        arrival_s = self.front.clock()
        reply = Reply(send, request_id(scope).decode(), self.pod_uid)
        try:
            self._authorise(scope)
            place, beginning = _named_by_router(scope)
            rank = _rank_named(scope, self.num_ranks)
            body = await self._read_body(receive, share)
        except ClientLeft:
            return
        except ApiError as error:
            await reply.error(error)
            self._count(scope, reply, 0, arrival_s)
            return
        size = len(body)
        marks = header(scope, RESUME_HEADER) == b"1"
        call = HttpCall(
            scope["path"], body, uuid.uuid4().hex, reply.request_id, arrival_s, marks,
            prefill=header(scope, PREFILL_HEADER).decode("latin-1"),
            trace=trace_of(header(scope, TRACE_HEADER)), place=place, beginning=beginning, rank=rank,
            comments=header(scope, COMMENTS_HEADER) != b"0" and not marks,
        )  # fmt: skip
        try:
            await while_present(_answer(handler, call, reply, self.comment_interval_s), scope, receive)
        finally:
            self._count(scope, reply, size, arrival_s)

    async def _read_body(self, receive: Receive, share: BodyShare) -> bytes:
        """Read the request's body.

        Raises:
            ApiError: it is too large, or the bodies of all requests are.
            ClientLeft: the client closed its connection.
        """
        try:
            return await read_body(receive, self.max_body_bytes, share)
        except BodyTooLarge as error:
            raise ApiError(413, str(error), code="request_too_large") from error
        except BodyBudgetSpent as error:
            message = f"Try again later: {error}."
            raise ApiError(503, message, code="too_many_body_bytes", retry_after_s=RETRY_AFTER_S) from error

    def _authorise(self, scope: Scope) -> None:
        """Check the API key where keys are configured; a key is compared as bytes, so that it may be any UTF-8.

        Raises:
            ApiError: 401, the key is missing or wrong.
        """
        if not self.api_keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        check_api_key(self.api_keys, scope)

    def _count(self, scope: Scope, reply: Reply, request_bytes: int, arrival_s: float) -> None:
        path = next((parent for parent in PARENTS if scope["path"].startswith(parent)), scope["path"])
        known = path in self._posts or path in self._gets
        seconds = self.front.clock() - arrival_s
        self.front.metrics.answered(
            path if known else "other", scope["method"], reply.status or 499, seconds, request_bytes, reply.body_bytes
        )

    # Handlers.

    async def _completions(self, call: HttpCall) -> Result:
        body = call.parse(CompletionBody)
        answer = await self.front.completion(body, call.id, call.arrival_s, call.request_id, call.resumed)
        return await _whole_or_stream(call, body, answer)

    async def _chat(self, call: HttpCall) -> Result:
        body = call.parse(ChatBody)
        answer = await self.front.chat(body, call.id, call.arrival_s, call.request_id, call.resumed)
        return await _whole_or_stream(call, body, answer)

    async def _resume(self, call: HttpCall) -> Result:
        """Go on with a stream that another engine began."""
        state, body = parse_resume(call.body)
        call = replace(call, path=state.path, body=body, marks_tokens=True, resumed=state, prefill="")
        return await self._posts[state.path](call)

    async def _responses(self, call: HttpCall) -> Result:
        body = call.parse(ResponsesBody)
        answer = await self.front.responses(body, call.id, call.arrival_s, call.request_id)
        _pass_on(call, answer.generation)
        return Stream(typed_events(answer), comments=call.comments) if body.stream else await answer.whole()

    async def _models(self, call: HttpCall) -> Mapping[str, Any]:
        name = call.path.removeprefix("/v1/models").removeprefix("/")
        return self.front.model(name) if name else self.front.models()

    async def _load(self, call: HttpCall) -> Mapping[str, Any]:
        return await self.front.load(call.path.removeprefix(f"{MODELS_PATH}/").removesuffix(LOAD))

    async def _unload(self, call: HttpCall) -> Mapping[str, Any]:
        return await self.front.unload(call.path.removeprefix(f"{MODELS_PATH}/"))

    async def _request(self, call: HttpCall) -> Mapping[str, Any]:
        return await self.front.request(call.path.removeprefix(REQUESTS_PATH).removeprefix("/"))

    async def _embeddings(self, _: HttpCall) -> Mapping[str, Any]:
        message = "This engine generates text: embeddings are not supported. Use a model server for embeddings."
        raise ApiError(400, message, code="embeddings_not_supported")

    async def _tokenize(self, call: HttpCall) -> Mapping[str, Any]:
        return await self.front.tokenize(call.parse(TokenizeBody))

    async def _detokenize(self, call: HttpCall) -> Mapping[str, Any]:
        return await self.front.detokenize(call.parse(DetokenizeBody))

    async def _health(self, _: HttpCall) -> Mapping[str, Any]:
        """Answer 200 if requests are accepted, else 503; the body has the status and its reason."""
        health = self.front.health()
        if not self.front.ready:
            message = f"Not ready: {health['reason']}"
            raise ApiError(503, message, code="not_ready", retry_after_s=1, fields=health)
        return health

    async def _version(self, _: HttpCall) -> Mapping[str, Any]:
        return {"version": self.version}

    async def _openapi(self, _: HttpCall) -> Mapping[str, Any]:
        return openapi_document(self.version)

    async def _docs(self, _: HttpCall) -> Page:
        return Page(200, {"content-type": "text/html; charset=utf-8"}, docs_page())


def _loads(path: str) -> bool:
    """Whether a path below `/v1/models/` is that by which a model is loaded. A model may be called `load`, too."""
    return path.removeprefix(f"{MODELS_PATH}/").endswith(LOAD)


def _named_by_router(scope: Scope) -> tuple[int, str]:
    """The number of the request's class, and the name of the prompt's beginning. Raises ApiError 400."""
    try:
        return place_in(header(scope, PLACE_HEADER)), beginning_in(header(scope, BEGINNING_HEADER))
    except ValueError as error:
        raise bad_request(str(error), code="invalid_value") from error


def _rank_named(scope: Scope, num_ranks: int) -> int | None:
    """The data rank that is to answer; None where the router names none. Raises ApiError 400."""
    try:
        return rank_in(header(scope, RANK_HEADER), num_ranks)
    except ValueError as error:
        raise bad_request(str(error), code="invalid_value") from error


def _wrong_method(methods: Sequence[str]) -> Handler:
    async def refuse(call: HttpCall) -> Result:
        allow = ", ".join((*methods, "OPTIONS"))
        message = f"This method is not allowed on {shortened(call.path)}; allowed: {allow}."
        raise ApiError(405, message, code="method_not_allowed", headers={"allow": allow})

    return refuse


def _options(methods: Sequence[str]) -> Handler:
    async def allow(_: HttpCall) -> Result:
        return Page(204, {"allow": ", ".join((*methods, "OPTIONS"))})

    return allow


def _streams(events: Callable[[], Events]) -> Handler:
    async def stream(_: HttpCall) -> Result:
        return Stream(events())

    return stream


async def _unknown_path(call: HttpCall) -> Result:
    raise unknown_path(call.path)


async def _not_stored(call: HttpCall) -> Result:
    """Answer what OpenAI's clients ask about an earlier response."""
    name = shortened(call.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")[0])
    message = f"The response {name} is not stored, as no response is: send the whole conversation as input each time."
    raise ApiError(404, message, param="response_id", code="response_not_found")


async def _nowhere(request: Request, _: Exception) -> JSONResponse:
    """Answer a path that is neither OpenAI's nor one of `own`, such as one without its `/v1`."""
    return JSONResponse(unknown_path(request.url.path).body(), status_code=404)


def unknown_path(path: str) -> ApiError:
    return ApiError(404, f"Unknown path {shortened(path)}; {OPENAPI_PATH} lists the paths.", code="unknown_path")


async def _whole_or_stream(call: HttpCall, body: GenerationBody, answer: CompletionAnswer | ChatAnswer) -> Result:
    _pass_on(call, answer.generation)
    if not body.stream:
        return await answer.whole()
    if not (call.marks_tokens and resumable(answer.jobs)):
        return Stream(chunk_events(answer), comments=call.comments)
    answer.marks = TokenMarks(answer.jobs)
    return Stream(chunk_events(answer), {RESUME_HEADER.decode(): "1"})


def _pass_on(call: HttpCall, generation: Generation) -> None:
    """Give the jobs what a router found out about the request."""
    generation.prefill, generation.trace, generation.place = call.prefill, call.trace, call.place
    generation.beginning, generation.rank = call.beginning, call.rank


async def _answer(handler: Handler, call: HttpCall, reply: Reply, comment_interval_s: float) -> None:
    """Run a handler and send its result. A stream begins with its first event, so that a refusal keeps its status."""
    try:
        result = await handler(call)
        if isinstance(result, Mapping):
            await reply.json(200, result)
        elif isinstance(result, Page):
            await reply.page(result)
        else:
            await send_stream(result, reply, comment_interval_s)
    except ApiError as error:
        await reply.error(error)
    except Exception as error:
        log.exception("request %s failed", reply.request_id)
        await reply.error(ApiError(500, f"Internal error: {type(error).__name__}", code="internal_error"))
