"""Streams of server-sent events: an answer's chunks as events, and how they are sent."""

from __future__ import annotations

from contextlib import aclosing

from stoker.engine.http.call import Events, Stream
from stoker.engine.http.openai.answer import Answer
from stoker.engine.http.openai.sse import DONE, event
from stoker.engine.http.reply import Reply
from stoker.pod.stream_comments import COMMENT, StreamComments


async def chunk_events(answer: Answer) -> Events:
    """The events of completions and chats, up to `[DONE]`."""
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            yield event(chunk)
    yield DONE


async def typed_events(answer: Answer) -> Events:
    """The events of `/v1/responses`, which have names and no `[DONE]`."""
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            yield f"event: {chunk['type']}\n".encode() + event(chunk)


async def send_stream(stream: Stream, reply: Reply, comment_interval_s: float) -> None:
    """Send a stream. It begins with its first event or comment, so that a refusal before it keeps its status."""

    async def comment() -> None:
        if reply.status is None:
            await reply.begin_stream(stream.headers)
        await reply.chunk(COMMENT)

    interval_s = comment_interval_s if stream.comments else 0.0
    async with aclosing(stream.events) as events, StreamComments(interval_s, lambda: reply.body_bytes, comment):
        first = await anext(events)
        if reply.status is None:
            await reply.begin_stream(stream.headers)
        await reply.chunk(first)
        async for part in events:
            await reply.chunk(part)
    await reply.end()
