"""Requests from a test that is no coroutine to an application in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import httpx

Sender = Callable[..., httpx.Response]


@contextmanager
def opened(client: AbstractAsyncContextManager[httpx.AsyncClient]) -> Iterator[Sender]:
    """A function with the arguments of `httpx.Client.request`; paths are relative to the client's base."""
    with asyncio.Runner() as loop:
        found = loop.run(client.__aenter__())

        def send(**arguments: Any) -> httpx.Response:
            return loop.run(found.request(**arguments))

        try:
            yield send
        finally:
            loop.run(client.__aexit__(None, None, None))


@contextmanager
def sender(app: Any) -> Iterator[Sender]:
    """Requests to an ASGI application, without a socket."""
    with opened(_client(app)) as send:
        yield send


@asynccontextmanager
async def _client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://program") as client:
        yield client
