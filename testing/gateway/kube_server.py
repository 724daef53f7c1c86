"""The in-memory cluster behind a Kubernetes API on a real port, in a thread: for programs that call it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from testing.gateway.world import World, serve_api, world

T = TypeVar("T")
LONGEST_S = 300.0
"""Longest time of a change, or of the server's start; a busy machine is slow."""


class KubeServer:
    """A world whose objects a test may touch from its own thread by `do`."""

    def __init__(self, found: World, url: str, loop: asyncio.AbstractEventLoop, kubeconfig: Path) -> None:
        self.world, self.url, self.loop, self.kubeconfig = found, url, loop, kubeconfig

    def do(self, change: Callable[[World], T]) -> T:
        """Run a change in the server's thread."""

        async def run() -> T:
            return change(self.world)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONGEST_S)


@contextlib.contextmanager
def kube_server(folder: Path) -> Iterator[KubeServer]:
    """Serve until the `with` ends; the kubeconfig's context has the namespace `default`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kube server")
    thread.start()

    def run(call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, loop).result(LONGEST_S)

    serving = _serving(folder)
    found, url = run(_enter(serving))
    try:
        yield KubeServer(found, url, loop, write_kubeconfig(folder / "kubeconfig", url))
    finally:
        run(_leave(serving))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[tuple[World, str]]:
    async with world("embedded", folder, sockets=True) as found, serve_api(found) as url:
        yield found, url


async def _enter(context: Any) -> tuple[World, str]:
    entered: tuple[World, str] = await context.__aenter__()
    return entered


async def _leave(context: Any) -> None:
    await context.__aexit__(None, None, None)


def write_kubeconfig(file: Path, url: str) -> Path:
    """Write a kubeconfig with one context."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    return file
