"""Where a request begins by the model that it names: at the own engines, or at another deployment's endpoint.

Credentials go along, so each deployment checks its own keys. The list of all models comes from the deployments
themselves, asked with the client's credentials: a client learns no name that its key does not show it.

Made by `Proxy` around `Dispatch`; used for every request, and without an effect where a deployment serves one model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from stoker.router.answer import BackendAnswer
from stoker.router.backends import Backends
from stoker.router.connection import BackendError, Outgoing, Silent
from stoker.router.dispatch import no_backend
from stoker.router.exchange import ask
from stoker.router.limits import ProxyLimits
from stoker.router.metrics import RouterMetrics
from stoker.router.other_models import PASSED_ON_HEADER, Other, OtherModels, asked_model, for_deployment, was_passed_on
from stoker.router.refusal import RETRY_AFTER_S, Refused

LIST_PATH = b"/v1/models"
LIST_S = 5.0
"""Longest time that the list waits for a deployment."""
LARGEST_LIST_BYTES = 1 << 20
Card = dict[str, Any]


@dataclass(frozen=True)
class OwnAnswer:
    """An answer that the router makes from those of several deployments."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class ByModel:
    """Begins the answer of a request where its model is served."""

    def __init__(
        self,
        backends: Backends,
        here: Callable[[Outgoing], Awaitable[BackendAnswer]],
        limits: ProxyLimits,
        metrics: RouterMetrics,
        deployment: str,
    ) -> None:
        self.backends = backends
        self.here = here
        self.limits = limits
        self.metrics = metrics
        self.deployment = deployment

    async def begin(self, request: Outgoing) -> BackendAnswer | OwnAnswer:
        """Begin the answer.

        Raises:
            Refused: the model is not known, or nothing that serves it took the request.
        """
        others = self.backends.others
        if others is None or was_passed_on(request):
            return await self.here(request)
        path = request.target.partition(b"?")[0]
        if request.method in ("GET", "HEAD") and (path == LIST_PATH or path.startswith(LIST_PATH + b"/")):
            asked = replace(request, method="GET")  # HEAD tells the list's length; the server sends no more of it
            return await self._listed(others, asked, unquote(path[len(LIST_PATH) + 1 :].decode("ascii", "replace")))
        name = asked_model(request)
        if name is None or name in others.own:
            return await self.here(request)
        if (other := others.by_name.get(name)) is None:
            return await self._unknown(others, request, name)
        return await self._there(other, request)

    async def _there(self, other: Other, request: Outgoing) -> BackendAnswer:
        """Begin it at another deployment.

        Raises:
            Refused: there is none, or it took no connection.
        """
        name, endpoint, problem = other.entry.deployment, other.endpoint, other.entry.problem
        if endpoint is None:
            raise unavailable(other, problem)
        passed_on = for_deployment(request, endpoint.target.model, self.deployment)
        self.metrics.passed_on.labels(name).inc()
        for attempt in range(self.limits.max_attempts):
            if attempt:
                self.metrics.retries.inc()
            try:
                answer = await ask(endpoint, passed_on)
            except Silent as silence:
                raise Refused(504, "timeout", f"InferenceDeployment {name} did not answer: {silence}.") from silence
            except BackendError as error:
                problem = f"InferenceDeployment {name}: {error}"
                continue
            named = (PASSED_ON_HEADER, name.encode())
            return replace(answer, head=replace(answer.head, headers=[*answer.head.headers, named]))
        raise unavailable(other, problem)

    async def _unknown(self, others: OtherModels, request: Outgoing, name: str) -> OwnAnswer:
        """Refuse a name with those that the client may use, or as the engines refuse its credentials.

        Raises:
            Refused: no model has the name.
        """
        kept = [(key, value) for key, value in request.headers if key not in (b"content-type", b"content-encoding")]
        found = await self._cards(others, Outgoing("GET", LIST_PATH, kept))
        if isinstance(found, OwnAnswer):
            return found
        raise not_found(name, [card["id"] for card in found])

    async def _listed(self, others: OtherModels, request: Outgoing, name: str) -> OwnAnswer:
        """The list of all models, or one card of it.

        Raises:
            Refused: no model has the name.
        """
        found = await self._cards(others, replace(request, target=LIST_PATH))
        if isinstance(found, OwnAnswer):
            return found
        if not name:
            return _json({"object": "list", "data": found})
        for card in found:
            if card["id"] == name:
                return _json(card)
        raise not_found(name, [card["id"] for card in found])

    async def _cards(self, others: OtherModels, request: Outgoing) -> list[Card] | OwnAnswer:
        """The cards of all models; where no deployment lists any, the own deployment's answer."""
        asked = {other.entry.deployment: other.endpoint for other in others.by_name.values() if other.endpoint}
        passed_on = for_deployment(request, "", self.deployment)
        own, *there = await asyncio.gather(
            self._own_list(request), *(_list_of(partial(ask, endpoint, passed_on)) for endpoint in asked.values())
        )
        lists = dict(zip(asked, there, strict=True))
        if own.status not in (200, 503) or not any(one.status == 200 for one in (own, *there)):
            return own
        cards = _cards_of(own) or [_absent(name, self.deployment) for name in others.own]
        for name, other in others.by_name.items():
            cards.extend(_card_of(name, other, lists.get(other.entry.deployment)))
        return cards

    async def _own_list(self, request: Outgoing) -> OwnAnswer:
        try:
            if not self.backends.ready:
                raise no_backend("no engine is ready")  # a list wakes none
            return await _list_of(partial(self.here, request))
        except Refused as refused:
            return OwnAnswer(refused.status, tuple(refused.headers(b"")[:2]), refused.body())


async def _list_of(begin: Callable[[], Awaitable[BackendAnswer]]) -> OwnAnswer:
    """The whole answer of one deployment; 503 where none comes in time.

    Raises:
        Refused: as `begin`.
    """
    try:
        async with asyncio.timeout(LIST_S):
            answer = await begin()
            try:
                body = await _whole(answer)
            except BaseException:
                answer.connection.close()
                raise
    except (BackendError, TimeoutError) as error:
        return OwnAnswer(503, (), str(error).encode())
    answer.backend.give_back(answer.connection)
    kind = answer.head.header(b"content-type")
    return OwnAnswer(answer.head.status, ((b"content-type", kind), (b"content-length", b"%d" % len(body))), body)


async def _whole(answer: BackendAnswer) -> bytes:
    collected = bytearray()
    async for part in answer.body():
        collected += part
        if len(collected) > LARGEST_LIST_BYTES:
            raise BackendError(f"the list of models has more than {LARGEST_LIST_BYTES} bytes")
    return bytes(collected)


def _cards_of(answer: OwnAnswer) -> list[Card]:
    if answer.status != 200:
        return []
    try:
        return [card for card in json.loads(answer.body)["data"] if isinstance(card.get("id"), str)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _card_of(name: str, other: Other, found: OwnAnswer | None) -> list[Card]:
    """The card of one model of another deployment; none where the client's key does not open that deployment."""
    if other.endpoint is None or found is None or found.status >= 500:
        return [_absent(name, other.entry.deployment)]
    theirs = other.endpoint.target.model
    return [
        {**card, "id": name, "deployment": other.entry.deployment} for card in _cards_of(found) if card["id"] == theirs
    ]


def _absent(name: str, deployment: str) -> Card:
    """The card of a model that cannot answer now."""
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "stoker", "deployment": deployment, "ready": False,
    }  # fmt: skip


def _json(content: Mapping[str, Any]) -> OwnAnswer:
    body = json.dumps(content).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    return OwnAnswer(200, headers, body)


def not_found(name: str, known: list[str]) -> Refused:
    message = f"The model {name[:128]!r} does not exist; this endpoint serves {', '.join(known)}."
    return Refused(404, "model_not_found", message, param="model")


def unavailable(other: Other, problem: str) -> Refused:
    message = f"The model {other.entry.name} cannot be served now: {problem}. Try again later."
    return Refused(503, "model_unavailable", message, RETRY_AFTER_S)
