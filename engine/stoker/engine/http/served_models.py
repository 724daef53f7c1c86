"""What an HTTP server needs of the models behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stoker.engine.http.metrics import HttpMetrics
from stoker.engine.http.openai.answer import Answer
from stoker.engine.http.openai.chat import ChatAnswer
from stoker.engine.http.openai.completions import CompletionAnswer
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker.engine.http.openai.responses_body import ResponsesBody
from stoker.engine.http.openai.resume import ResumeState


class ServedModels(Protocol):
    """What answers the requests: the `Front` of one model, or several models."""

    @property
    def metrics(self) -> HttpMetrics: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def ready(self) -> bool: ...
    def health(self) -> dict[str, str]: ...
    def models(self) -> dict[str, Any]: ...
    def model(self, name: str) -> dict[str, Any]: ...
    async def load(self, name: str) -> dict[str, Any]: ...
    async def unload(self, name: str) -> dict[str, Any]: ...
    async def request(self, name: str) -> dict[str, Any]: ...
    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]: ...
    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]: ...

    async def completion(
        self,
        body: CompletionBody,
        call_id: str,
        arrival_s: float,
        request_id: str = "",
        resumed: ResumeState | None = None,
    ) -> CompletionAnswer:
        """Prepare an answer. Raises ApiError, as the next two."""
        ...

    async def chat(
        self, body: ChatBody, call_id: str, arrival_s: float, request_id: str = "", resumed: ResumeState | None = None
    ) -> ChatAnswer: ...
    async def responses(self, body: ResponsesBody, call_id: str, arrival_s: float, request_id: str = "") -> Answer: ...
