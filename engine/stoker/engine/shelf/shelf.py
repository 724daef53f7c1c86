"""The models of a directory, loaded by request: one engine for each, beside or instead of others as memory allows.

To the server it is what a `Front` is. Lives in one event loop; owns the engines that it starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from stoker.checkpoint.manifest_file import being_read
from stoker.engine.core.messages import CoreState
from stoker.engine.http.errors import ApiError, bad_request, model_not_found, shortened
from stoker.engine.http.front import Front
from stoker.engine.http.metrics import HttpMetrics
from stoker.engine.http.openai.chat import ChatAnswer
from stoker.engine.http.openai.completions import CompletionAnswer
from stoker.engine.http.openai.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from stoker.engine.http.openai.responses import ResponsesAnswer
from stoker.engine.http.openai.responses_body import ResponsesBody
from stoker.engine.http.openai.resume import ResumeState
from stoker.engine.program import Engine
from stoker.engine.shelf.folders import ModelFolder, ModelFolders
from stoker.engine.shelf.room import LoadedModel, NoRoom, models_to_unload
from stoker.pod.termination_message import TerminationMessage

log = logging.getLogger("stoker.engine")

Status = Literal["unloaded", "loading", "ready", "draining", "failed"]
Start = Callable[[ModelFolder, Callable[[CoreState], None]], Engine]
"""(model, called with each state of its core) -> an engine that does not run yet."""


@dataclass
class LoadedEntry:
    """A model that was asked for."""

    folder: ModelFolder
    used_s: float
    engine: Engine | None = None
    """Once there is room for it."""
    task: asyncio.Task[None] | None = None
    ending: bool = False
    error: str = ""
    """The reason, when it has failed."""

    @property
    def status(self) -> Status:
        if self.error:
            return "failed"
        if self.ending:
            return "draining"
        return "ready" if self.engine is not None and self.engine.front.ready else "loading"


class ModelShelf:
    """Loads and unloads models, and hands each request to the one that it names."""

    def __init__(
        self,
        models: Callable[[], ModelFolders],
        start: Start,
        *,
        max_models: int,
        check: Callable[[ModelFolder], None] = lambda _: None,
        cache_bytes: int = 0,
        free_bytes: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`check`: refuses a model that cannot be loaded; run in a thread, before others make room for it.

        `cache_bytes`: of one engine's cache; `free_bytes`: memory that engines may still take, None if unknown."""
        self.models_found, self.start, self.check = models, start, check
        self.max_models, self.cache_bytes, self.free_bytes, self.clock = max_models, cache_bytes, free_bytes, clock
        self.metrics = HttpMetrics(registry if registry is not None else CollectorRegistry())
        self.entries: dict[str, LoadedEntry] = {}
        self.created = int(time.time())
        self.closing = False
        self._loading = asyncio.Lock()

    # Loading.

    async def load(self, name: str) -> dict[str, Any]:
        """`POST /v1/models/{name}/load`: begin to load a model, unless that has begun.

        Raises:
            ApiError: 404, there is no such model; 409, it cannot be read, does not fit or is being unloaded; 503, the
                server ends.
        """
        folder = self._folder(name)
        if self.closing:
            message = f"The model {name} cannot be loaded: this server is ending."
            raise ApiError(503, message, param="model", code="draining", retry_after_s=1)
        entry = self.entries.get(name)
        if entry is not None and entry.status == "draining":
            message = f"The model {name} is being unloaded; it can be loaded again once its requests have ended."
            raise ApiError(409, message, param="model", code="model_draining", retry_after_s=1)
        if entry is None or entry.error:
            others = [self._loaded(one) for other, one in self.entries.items() if other != name and not one.error]
            unload = self._room(folder, others)
            self.entries[name] = entry = LoadedEntry(folder, self.clock())
            entry.task = asyncio.create_task(self._run(entry, unload), name=f"model {name}")
        return self._card(folder)

    def _room(self, folder: ModelFolder, others: list[LoadedModel]) -> tuple[str, ...]:
        try:
            return models_to_unload(self._bytes(folder), self._free_bytes(), others, self.max_models)
        except NoRoom as error:
            message = f"The model {folder.name} cannot be loaded: {error}."
            raise ApiError(409, message, param="model", code="no_room") from error

    def _free_bytes(self) -> int | None:
        """Free memory without what models that are still loading will take."""
        free_bytes = self.free_bytes()
        loading = [entry for entry in self.entries.values() if entry.status == "loading"]
        return None if free_bytes is None else free_bytes - sum(self._bytes(entry.folder) for entry in loading)

    def _bytes(self, folder: ModelFolder) -> int:
        return folder.num_bytes + self.cache_bytes

    def _loaded(self, entry: LoadedEntry) -> LoadedModel:
        return LoadedModel(entry.folder.name, self._bytes(entry.folder), entry.used_s)

    async def _run(self, entry: LoadedEntry, unload: tuple[str, ...]) -> None:
        """Check the model, make room, then run its engine to its end."""
        name = entry.folder.name
        try:
            await asyncio.to_thread(self.check, entry.folder)
            async with self._loading:
                await asyncio.gather(*(self._end(self.entries[other]) for other in unload if other in self.entries))
                entry.engine = self.start(entry.folder, lambda state: log.info("%s: %s", name, state.phase))
            with being_read(entry.folder.path):
                message = await entry.engine.serve()
            if not entry.ending:
                entry.error = _reason(message)
        except Exception as error:  # noqa: BLE001 - the model's card shows any reason
            entry.error = str(error) or type(error).__name__
        finally:
            if entry.ending and self.entries.get(name) is entry:
                del self.entries[name]
            if entry.error:
                log.error("model %s: %s", name, entry.error)

    async def unload(self, name: str) -> dict[str, Any]:
        """`DELETE /v1/models/{name}`: take no new requests, let running ones end, free the memory, then answer.

        Raises:
            ApiError: 404, there is no such model; 409, it is not loaded.
        """
        folder = self._folder(name)
        entry = self.entries.get(name)
        if entry is None:
            raise ApiError(409, f"The model {name} is not loaded.", param="model", code="model_not_loaded")
        await asyncio.shield(asyncio.create_task(self._end(entry)))  # also where the client has gone
        return {"deleted": True, **self._card(folder)}

    async def _end(self, entry: LoadedEntry) -> None:
        entry.ending = True
        if entry.error:
            self.entries.pop(entry.folder.name, None)
        assert entry.task is not None, "set together with the entry"
        if entry.engine is None:
            entry.task.cancel()  # it waits for room
        else:
            entry.engine.stop.set()
        await asyncio.wait({entry.task})

    async def close(self) -> None:
        """Drain and end every engine."""
        self.closing = True
        await asyncio.gather(*(self._end(entry) for entry in list(self.entries.values())))

    # What a front answers.

    @property
    def ready(self) -> bool:
        """Whether requests are taken; a model need not be loaded."""
        return not self.closing

    def health(self) -> dict[str, str]:
        """`GET /health`."""
        if self.closing:
            return {"status": "degraded", "reason": "draining: no new requests are taken"}
        _, problem = self._found()
        failed = [f"{name}: {entry.error}" for name, entry in self.entries.items() if entry.error]
        failed = [problem, *failed] if problem else failed
        return {"status": "degraded" if failed else "healthy", "reason": "; ".join(failed)}

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`: every model of the directory, loaded or not."""
        return {"object": "list", "data": [self._card(folder) for folder in self._models().values()]}

    def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/{name}`."""
        return self._card(self._folder(name))

    def _card(self, folder: ModelFolder) -> dict[str, Any]:
        entry = self.entries.get(folder.name)
        card = {"id": folder.name, "object": "model", "created": self.created, "owned_by": "stoker"}
        card |= {"root": folder.name, "parent": None, "status": "unloaded" if entry is None else entry.status}
        if entry is not None and entry.error:
            card["error"] = entry.error
        if entry is not None and entry.engine is not None and (facts := entry.engine.front.served.facts) is not None:
            card["max_model_len"] = facts.max_model_len
        return card

    def unreadable(self) -> Mapping[str, str]:
        """What may be models -> why it cannot be read."""
        return self._found()[0].unreadable

    def _found(self) -> tuple[ModelFolders, str]:
        """The models of the directory, and why there are none where it cannot be read."""
        try:
            return self.models_found(), ""
        except OSError as error:
            return ModelFolders({}), f"{error.filename} cannot be read: {error.strerror}"

    def _models(self) -> Mapping[str, ModelFolder]:
        """The models of the directory, and loaded ones whose files have gone since: they can still be unloaded."""
        found, _ = self._found()
        gone = {name: entry.folder for name, entry in self.entries.items() if name not in found.models}
        return {**found.models, **gone}

    def _folder(self, name: str) -> ModelFolder:
        """A model by its name. The directory is not asked for one that is loaded.

        Raises:
            ApiError: 404, there is none of the name; 409, it cannot be read; 503, the directory cannot be read.
        """
        entry = self.entries.get(name)
        if entry is not None and not entry.error:
            return entry.folder
        found, problem = self._found()
        if name in found.models:
            return found.models[name]
        if entry is not None:
            return entry.folder
        if problem:
            message = f"The model {shortened(name)} is not loaded, and {problem}."
            raise ApiError(503, message, param="model", code="model_not_loaded")
        if name in found.unreadable:
            message = f"The model {shortened(name)} cannot be loaded: {found.unreadable[name]}."
            raise ApiError(409, message, param="model", code="model_unreadable")
        raise model_not_found(name, tuple(self._models()))

    def _front(self, name: str | None) -> Front:
        """The front of a ready model; without a name that of the only one.

        Raises:
            ApiError: 400, a name is needed; 404, there is no such model; 503, it takes no requests now.
        """
        if self.closing:
            raise ApiError(503, "This server is ending and takes no new requests.", code="draining", retry_after_s=1)
        name = name if name is not None else self._only_one()
        self._folder(name)
        entry = self.entries.get(name)
        if entry is None or entry.status in ("failed", "draining"):
            raise _not_taken(name, entry)
        entry.used_s = self.clock()
        if entry.engine is None or not entry.engine.front.ready:
            raise _not_ready(name, entry.engine)
        return entry.engine.front

    def _only_one(self) -> str:
        """The name of the only model that is loaded. Raises ApiError 400."""
        loaded = [name for name, entry in self.entries.items() if entry.status in ("loading", "ready")]
        if len(loaded) == 1:
            return loaded[0]
        named = f"; allowed: {', '.join(loaded)}" if loaded else ". POST /v1/models/{name}/load loads one"
        raise bad_request(f"model is needed: {len(loaded)} models are loaded{named}", "model", "model_needed")

    async def completion(
        self,
        body: CompletionBody,
        call_id: str,
        arrival_s: float,
        request_id: str = "",
        resumed: ResumeState | None = None,
    ) -> CompletionAnswer:
        return await self._front(body.model).completion(body, call_id, arrival_s, request_id, resumed)

    async def chat(
        self, body: ChatBody, call_id: str, arrival_s: float, request_id: str = "", resumed: ResumeState | None = None
    ) -> ChatAnswer:
        return await self._front(body.model).chat(body, call_id, arrival_s, request_id, resumed)

    async def responses(
        self, body: ResponsesBody, call_id: str, arrival_s: float, request_id: str = ""
    ) -> ResponsesAnswer:
        return await self._front(body.model).responses(body, call_id, arrival_s, request_id)

    async def request(self, name: str) -> dict[str, Any]:
        """`GET /v1/requests/{id}`, of any loaded model."""
        fronts = [entry.engine.front for entry in self.entries.values() if entry.engine is not None]
        owner = next((front for front in fronts if front.log.find(name) is not None), None)
        if owner is None:
            message = "No recent request of the loaded models has this id."
            raise ApiError(404, message, param="id", code="request_not_found")
        return await owner.request(name)

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        return await self._front(body.model).tokenize(body)

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        return await self._front(body.model).detokenize(body)


def _not_taken(name: str, entry: LoadedEntry | None) -> ApiError:
    """The error of a request to a model that is not loaded, or not for long; to repeat it would not help."""
    if entry is not None and entry.status == "draining":
        again = f"POST /v1/models/{name}/load loads it again once its requests have ended"
        message = f"The model {name} is being unloaded and takes no new requests. {again}."
        return ApiError(503, message, param="model", code="model_draining")
    failed = f": {entry.error}" if entry is not None else ""
    message = f"The model {name} is not loaded{failed}. POST /v1/models/{name}/load loads it."
    return ApiError(503, message, param="model", code="model_not_loaded")


def _not_ready(name: str, engine: Engine | None) -> ApiError:
    """The error of a request to a model that is still loading, or whose core is silent."""
    problem = engine.front.served.problem if engine is not None else "its files are read, or others end before it"
    message = f"The model {name} is not ready: {problem}. Try again; GET /v1/models/{name} shows its status."
    return ApiError(503, message, param="model", code="not_ready", retry_after_s=1)


def _reason(message: TerminationMessage) -> str:
    return f"{message.cause}: {message.detail}"
