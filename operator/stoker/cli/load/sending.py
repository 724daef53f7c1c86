"""All requests of a bench: an open loop, in which each is sent when it is due, whatever the server does.

With a limit of requests at once a request is due when one before it has ended, and not before its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from stoker.cli.load.exchange import Answer, Target, address_of, ask

HEAD_START_S = 0.2
"""Between the last preparation and the first request."""

Told = Callable[[int, int, int], None]
"""Told how many requests were sent, answered and failed so far."""


async def send_all(
    target: Target,
    requests: Sequence[tuple[float, int, bytes]],
    *,
    most_at_once: int | None = None,
    timeout_s: float = 600.0,
    told: Told = lambda *_: None,
) -> list[Answer]:
    """Send every request, `(due seconds, tokens asked for, body)`, and return the answers in their order."""
    address = await address_of(target)
    begin = asyncio.get_running_loop().time() + HEAD_START_S
    limit: AbstractAsyncContextManager[object] = (
        nullcontext() if most_at_once is None else asyncio.Semaphore(most_at_once)
    )
    counts = [0, 0, 0]

    async def one(due_s: float, max_tokens: int, content: bytes) -> Answer:
        await asyncio.sleep(max(0.0, begin + due_s - asyncio.get_running_loop().time()))
        async with limit:
            now_s = asyncio.get_running_loop().time()
            answer = Answer(begin + due_s if most_at_once is None else now_s, max_tokens)
            counts[0] += 1
            await ask(target, address, content, answer, timeout_s)
            counts[2 if answer.error else 1] += 1
            told(*counts)
            return answer

    return list(await asyncio.gather(*(one(*request) for request in requests)))
