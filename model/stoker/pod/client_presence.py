"""Whether a request's client is still there: an extension of our HTTP server to ASGI.

ASGI tells it as a message that a task of its own has to wait for, beside the one that answers. `while_present` needs no
second task where the server offers a `ClientPresence`. It also notices for each of several requests that a client sent
ahead, where uvicorn tells the last one only.

One object per request, made by `BoundedHttpProtocol`, which calls `leave`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from stoker.pod.asgi import Receive, Scope

EXTENSION = "stoker.client_presence"


class ClientPresence:
    """Calls back when the client has closed its connection."""

    def __init__(self) -> None:
        self.gone = False
        self._call: Callable[[], object] | None = None

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Call `call` when the client leaves, at once if it has left; None: call nothing."""
        self._call = call
        if self.gone and call is not None:
            call()

    def leave(self) -> None:
        """Note that the connection is closed."""
        self.gone = True
        if self._call is not None:
            self._call()


async def while_present(work: Coroutine[Any, Any, None], scope: Scope, receive: Receive) -> bool:
    """Run `work` to its end, or cancel it when the client leaves; return whether it came to its end.

    The request's body must have been read.
    """
    presence = scope.get("extensions", {}).get(EXTENSION)
    if not isinstance(presence, ClientPresence):
        return await _beside_messages(work, receive)
    task = asyncio.current_task()
    assert task is not None, "an application runs in a task"
    presence.when_gone(task.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not presence.gone or task.uncancel():
            raise  # the server stops
        return False
    finally:
        presence.when_gone(None)
    return True


async def _beside_messages(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """As `while_present`, under another server: by a task that waits for its message."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        ended = working.done()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})
    if not working.cancelled():
        working.result()
    return ended


async def _client_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
