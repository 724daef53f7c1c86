"""Requests to one API server: authentication, rate limit, deadlines, JSON in and out. Independent of kinds.

Objects are plain dicts; nothing is ever decoded into models. After a 401 the credentials are loaded again
and the request is repeated once.

Made by `service/program`; called by `kube_cluster` and the Lease.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp

from stoker.operator.cluster.interface import ClusterError, ServerError
from stoker.operator.cluster.kube.credentials import Access, load_configuration
from stoker.operator.cluster.kube.errors import error_of, status_of
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.kube.session import ApiSession
from stoker.operator.domain.plan import Object
from stoker.pod.error_text import text_of

log = logging.getLogger(__name__)

JSON = "application/json"
USER_AGENT = "stoker-operator"
MAX_LINE = 8 << 20
"""Bytes of one watch event; an object in etcd has at most 1.5 MiB, its JSON somewhat more."""
MAX_ERROR_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 5.0

Listener = Callable[[str, str, int, float], None]
"""(method, resource, status code or 0, seconds): for metrics."""


class ApiConnection:
    """A client of one API server. Open and close it inside the event loop that uses it."""

    def __init__(
        self, access: Access, limit: RateLimit, *, timeout_s: float = 15.0, listener: Listener | None = None
    ) -> None:
        self.access = access
        self.limit = limit
        self.timeout_s = timeout_s
        self.listener = listener
        self._configuration: Any = None
        self._session: ApiSession | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Load the credentials; sessions are kept unless the server or a certificate changed. Raises NoCredentials."""
        configuration = await load_configuration(self.access)
        old, before = self._session, self._configuration
        if old is None or _transport(configuration) != _transport(before):
            self._session = ApiSession(configuration)
        self._configuration = configuration
        if old is not None and old is not self._session:
            await old.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def configuration(self) -> Any:
        """The client library's configuration, for others that use the same server."""
        return self._configuration

    async def request(
        self,
        method: str,
        path: str,
        *,
        resource: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_s: float | None = None,
    ) -> Object:
        """Send a request and return the JSON answer. `resource` names its object in metrics and messages.

        Raises:
            ClusterError: one of the interface's tree.
        """
        await self.limit.take()
        asked = _Asked(method, path, resource, query, body, content_type, accept, timeout_s or self.timeout_s)
        code, headers, content = await self._send(asked)
        if code == 401 and await self._renew():
            code, headers, content = await self._send(asked)
        if code >= 400:
            raise error_of(code, status_of(content), headers, asked.where)
        return _decoded(content, asked.where)

    async def stream(
        self, path: str, *, resource: str, query: Mapping[str, str], silence_s: float, accept: str = JSON
    ) -> AsyncIterator[Object]:
        """Yield the JSON documents of a watch, one per line, until the server ends it.

        Raises:
            ClusterError: refused, broken off, or silent for `silence_s`.
        """
        where = f"GET {path}"
        parts = self.parts(path, resource=resource, query=query, silence_s=silence_s, accept=accept)
        async for line in _lines(parts, where):
            yield _decoded(line, where)

    async def parts(
        self, path: str, *, resource: str, query: Mapping[str, str], silence_s: float | None, accept: str = JSON
    ) -> AsyncIterator[bytes]:
        """Yield the parts of an answer as they come, until the server ends it; an empty one first, when it begins.

        Raises:
            ClusterError: refused, broken off, or silent for `silence_s`.
        """
        asked = _Asked("GET", path, resource, query, None, JSON, accept, self.timeout_s)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        try:
            response = await self._open_response(asked, timeout)
            try:
                if response.status >= 400:
                    content = await response.content.read(MAX_ERROR_BYTES)
                    if response.status == 401:
                        await self._renew()
                    raise error_of(response.status, status_of(content), response.headers, asked.where)
                yield b""
                async for part in response.content.iter_any():
                    yield part
            finally:
                response.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ClusterError(f"{asked.where}: {_silence(error)}") from error

    async def _send(self, asked: _Asked) -> tuple[int, Mapping[str, str], bytes]:
        started = time.monotonic()
        code = 0
        timeout = aiohttp.ClientTimeout(total=asked.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._open_response(asked, timeout)
            try:
                code = response.status
                content = await response.read()
            finally:
                response.release()
            return code, response.headers, content
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            late = type(error) is TimeoutError  # of the whole request; those of its parts have words of their own
            why = f"no whole answer in {asked.timeout_s:g} s" if late else _silence(error)
            raise ClusterError(f"{asked.where}: {why}") from error
        finally:
            if self.listener is not None:
                self.listener(asked.method, asked.resource, code, time.monotonic() - started)

    async def _open_response(self, asked: _Asked, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        if self._session is None:
            async with self._opening:
                if self._session is None:
                    await self.open()
        session = self._session
        assert session is not None
        headers = {"Accept": asked.accept, "User-Agent": USER_AGENT, "Content-Type": asked.content_type}
        auth = await self._configuration.auth_settings()
        for setting in auth.values():
            headers[setting["key"]] = setting["value"]
        url = f"{self._configuration.host}{asked.path}"
        if asked.query:
            url += "?" + urlencode(asked.query)
        return await session.request(asked.method, url, headers=headers, body=asked.body, limits=limits)

    async def _renew(self) -> bool:
        """Load the credentials again; False when that fails."""
        async with self._opening:
            try:
                await self.open()
            except ValueError as error:
                log.warning("the API server does not know us, and there are no other credentials: %s", error)
                return False
        return True


@dataclass(frozen=True)
class _Asked:
    """One request."""

    method: str
    path: str
    resource: str
    query: Mapping[str, str] | None
    body: Any
    content_type: str
    accept: str
    timeout_s: float

    @property
    def where(self) -> str:
        return f"{self.method} {self.path}"


def _transport(configuration: Any) -> tuple[Any, ...]:
    """The configuration that a session depends on."""
    names = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name", "proxy")
    return tuple(getattr(configuration, name) for name in names)


def _silence(error: Exception) -> str:
    """Why no answer came, for people."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        plain = os.strerror(cause.errno) if isinstance(cause, ConnectionError) and cause.errno else text_of(cause)
        return f"cannot connect to {error.host}:{error.port}: {plain}"
    return text_of(error)


async def _lines(parts: AsyncIterator[bytes], where: str) -> AsyncIterator[bytes]:
    """Yield whole lines: the stream reader's own limit on a line is far below the size of an object."""
    rest = bytearray()
    async for chunk in parts:
        rest += chunk
        *whole, tail = rest.split(b"\n")
        rest = bytearray(tail)
        for line in whole:
            if line.strip():
                yield bytes(line)
        if len(rest) > MAX_LINE:
            raise ClusterError(f"{where}: an event of more than {MAX_LINE} bytes")
    if rest.strip():
        raise ClusterError(f"{where}: the watch broke off inside an event")


def _decoded(content: bytes, where: str) -> Object:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise ServerError(f"{where}: the answer is not JSON: is this an API server?") from error
    if not isinstance(body, dict):
        raise ServerError(f"{where}: the answer is not a JSON object: is this an API server?")
    return body
