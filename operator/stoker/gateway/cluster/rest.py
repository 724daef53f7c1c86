"""A cluster behind the Kubernetes API, over httpx: an API server, or the supervisor's socket.

One `RestCluster` has the rights of one caller; all share the connections of two clients. No other state.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from stoker.gateway.cluster.interface import (
    ApiError,
    Cause,
    Change,
    Kind,
    Object,
    Page,
    Relayed,
    Selection,
    Target,
    Watch,
)
from stoker.pod.error_text import text_of
from stoker.pod.log_position import LogRequest
from stoker.pod.whole_lines import coming_lines_of, line_batches_of

MERGE_PATCH = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
WATCH_S = 60
WATCH_SILENCE_S = WATCH_S + 30.0
RELAY_S = 600.0
MANAGER = "stoker-gateway"
API_KEY = "X-Api-Key"


class RestCluster:
    """Requests with fixed headers: those of the gateway's own account, or of a caller.

    Args:
        streams: has connections of its own for answers that go on, so that they keep none from other requests.
        log_silence_s: time after which a silent log is lost: its connection may break without a word.
        timeout: longest waits for an answer and its parts.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        streams: httpx.AsyncClient,
        headers: list[tuple[str, str]],
        *,
        log_silence_s: float | None = 120.0,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> None:
        self.client = client
        self.streams = streams
        self.headers = headers
        self.timeout = timeout
        self.log_silence_s = log_silence_s

    async def versions(self, group: str) -> Sequence[str]:
        try:
            found = await self._ask("GET", f"/apis/{group}")
        except ApiError as error:
            if error.status == 404:
                return ()
            raise
        return [str(one["version"]) for one in found.get("versions") or ()]

    async def list(self, kind: Kind, selection: Selection, *, limit: int = 0, after: str = "") -> Page:
        query = {
            **_query(selection),
            **({"limit": str(limit)} if limit else {}),
            **({"continue": after} if after else {}),
        }
        accept = METADATA_LIST if selection.metadata_only else "application/json"
        found = await self._ask("GET", _collection(kind, selection.namespace), query=query, accept=accept)
        metadata = found["metadata"]
        items = [{**item, "kind": kind.name, "apiVersion": kind.api_version} for item in found.get("items") or ()]
        return Page(items, str(metadata.get("resourceVersion", "")), str(metadata.get("continue") or ""))

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._ask("GET", _single(kind, namespace, name))

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Create; a field that the server does not know is refused."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return await self._ask("POST", _collection(kind, namespace), query=query, body=body)

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return await self._ask("PATCH", _single(kind, namespace, name), query=query, body=body, content=MERGE_PATCH)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: str | None = None) -> None:
        wanted = {"uid": uid, **({"resourceVersion": version} if version else {})}
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": wanted,
            "propagationPolicy": "Background",
        }
        await self._ask("DELETE", _single(kind, namespace, name), body=options)

    async def watch(self, kind: Kind, selection: Selection, resource_version: str) -> Watch:
        query = {**_query(selection), "watch": "true", "allowWatchBookmarks": "true"}
        query |= {"resourceVersion": resource_version, "timeoutSeconds": str(WATCH_S)}
        answer = await self._open(_collection(kind, selection.namespace), query, self._silent_for(WATCH_SILENCE_S))
        return _OpenWatch(answer, kind)

    async def log(
        self, namespace: str, pod: str, request: LogRequest, *, follow: bool
    ) -> AsyncGenerator[Sequence[str]]:
        query = {"timestamps": "true", **request.query, **({"follow": "true"} if follow else {})}
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/log"
        answer = await self._open(path, query, self._silent_for(self.log_silence_s) if follow else self.timeout)
        yield []
        async for lines in line_batches_of(_chunks(answer)):
            yield lines

    async def relay(
        self, target: Target, method: str, path: str, body: bytes | None = None, api_key: str | None = None
    ) -> Relayed:
        """Relay through the proxy of the API server, which does not pass the gateway's token on."""
        place = f"/api/v1/namespaces/{quote(target.namespace, safe='')}/{target.plural}"
        url = f"{place}/{quote(target.name, safe='')}:{target.port}/proxy{path}"
        headers = [*self.headers, *([("Content-Type", "application/json")] if body is not None else [])]
        headers += [(API_KEY, api_key)] if api_key else []
        limits = self._silent_for(RELAY_S)
        request = self.streams.build_request(method, url, headers=_encoded(headers), content=body, timeout=limits)
        try:
            answer = await self.streams.send(request, stream=True)
        except (httpx.HTTPError, OSError) as error:
            raise _silence(error) from error
        content_type = answer.headers.get("content-type", "")
        return Relayed(answer.status_code, content_type, _chunks(answer), answer.aclose)

    async def review(self, path: str, body: Object) -> Object:
        """POST a review (of a token, of a right) and return the answer."""
        return await self._ask("POST", path, body=body)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accept: str = "application/json",
        content: str = "application/json",
    ) -> Object:
        headers = [*self.headers, ("Accept", accept), *([("Content-Type", content)] if body is not None else [])]
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = await self.client.request(
                method, path, params=query, headers=_encoded(headers), content=data, timeout=self.timeout
            )
        except (httpx.HTTPError, OSError) as error:
            raise _silence(error) from error
        found = _object(answer.content)
        if answer.status_code >= 400:
            raise refusal(answer.status_code, found, answer.headers)
        return found

    def _silent_for(self, seconds: float | None) -> httpx.Timeout:
        """The limits of an answer that may be silent for so long."""
        return httpx.Timeout(**{**self.timeout.as_dict(), "read": seconds})

    async def _open(self, path: str, query: Mapping[str, str], limits: httpx.Timeout) -> httpx.Response:
        """Begin an answer that goes on; its reader closes it. Raises ApiError when it is refused."""
        request = self.streams.build_request("GET", path, params=query, headers=_encoded(self.headers), timeout=limits)
        try:
            answer = await self.streams.send(request, stream=True)
            if answer.status_code < 400:
                return answer
            content = await answer.aread()
        except (httpx.HTTPError, OSError) as error:
            raise _silence(error) from error
        raise refusal(answer.status_code, _object(content), answer.headers)


class _OpenWatch:
    """The changes in an answer, which `aclose` closes: a generator that never began would leave it open."""

    def __init__(self, answer: httpx.Response, kind: Kind) -> None:
        self._answer = answer
        self._found = _changes(answer, kind)

    def __aiter__(self) -> AsyncIterator[Change]:
        return self

    async def __anext__(self) -> Change:
        return await anext(self._found)

    async def aclose(self) -> None:
        await self._answer.aclose()


async def _changes(answer: httpx.Response, kind: Kind) -> AsyncIterator[Change]:
    """Yield the events of a watch."""
    async for line in coming_lines_of(_chunks(answer)):
        event = json.loads(line)
        if event["type"] == "ERROR":
            raise refusal(int(event["object"].get("code") or 500), event["object"], {})
        yield Change(event["type"], {**event["object"], "kind": kind.name})


async def _chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the body of an answer as it comes, and close it."""
    try:
        async for chunk in answer.aiter_bytes():
            yield chunk
    except (httpx.HTTPError, OSError) as error:
        raise _silence(error) from error
    finally:
        await answer.aclose()


def _encoded(headers: list[tuple[str, str]]) -> httpx.Headers:
    """Headers in UTF-8, as an API server reads them: names of users and groups may have any letters."""
    return httpx.Headers(headers, encoding="utf-8")


def refusal(status: int, found: Mapping[str, Any], headers: Mapping[str, str]) -> ApiError:
    """The error of a `Status` answer."""
    details = found.get("details") or {}
    causes = [Cause(str(c.get("field", "")), str(c.get("message", ""))) for c in details.get("causes") or ()]
    retry = headers.get("Retry-After") or details.get("retryAfterSeconds")
    message = str(found.get("message") or found.get("error") or f"the cluster answered {status}")
    return ApiError(status, str(found.get("reason") or ""), message, causes, str(retry) if retry else None)


def _silence(error: Exception) -> ApiError:
    return ApiError(0, "Unreachable", f"the cluster does not answer: {text_of(error)}")


def _object(content: bytes) -> Object:
    try:
        found = json.loads(content)
    except ValueError:
        found = {"message": content[:500].decode(errors="replace")}
    return found if isinstance(found, dict) else {"message": str(found)[:500]}


def _query(selection: Selection) -> dict[str, str]:
    query = {}
    if selection.labels:
        query["labelSelector"] = ",".join(f"{name}={value}" for name, value in sorted(selection.labels.items()))
    if selection.name:
        query["fieldSelector"] = f"metadata.name={selection.name}"
    return query


def _collection(kind: Kind, namespace: str | None) -> str:
    root = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{inside}/{kind.plural}"


def _single(kind: Kind, namespace: str, name: str) -> str:
    return f"{_collection(kind, namespace)}/{quote(name, safe='')}"
