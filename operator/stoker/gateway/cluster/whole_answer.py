"""The beginning of a relayed answer, in one piece."""

from __future__ import annotations

from stoker.gateway.cluster.interface import Relayed


async def start_of(answer: Relayed, limit: int) -> bytes:
    """The first bytes of an answer; the rest is dropped."""
    found = b""
    try:
        async for chunk in answer.chunks:
            found += chunk
            if len(found) > limit:
                break
    finally:
        await answer.close()
    return found[:limit]
