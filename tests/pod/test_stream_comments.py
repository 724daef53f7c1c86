"""Comments on silent streams: when they are sent, and how readers skip them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from stoker.pod.stream_comments import COMMENT, StreamComments, without_comments
from testing.scenario import run, until


def commenting(sent: list[bytes]) -> tuple[Callable[[], int], Callable[[], Awaitable[None]]]:
    async def comment() -> None:
        sent.append(COMMENT)

    return lambda: sum(map(len, sent)), comment


def test_a_silent_stream_gets_one_comment_after_the_other_until_it_ends() -> None:
    async def scenario() -> None:
        sent: list[bytes] = []
        async with StreamComments(0.02, *commenting(sent)):
            await until(lambda: len(sent) == 3)
        count = len(sent)
        await asyncio.sleep(0.1)
        assert len(sent) == count

    run(scenario)


def test_a_stream_that_is_not_silent_gets_none() -> None:
    async def scenario() -> None:
        looks = 0

        def growing() -> int:
            nonlocal looks
            looks += 1
            return looks

        async def comment() -> None:
            raise AssertionError("a comment between events that came in time")

        async with StreamComments(0.02, growing, comment):
            await until(lambda: looks > 20)

    run(scenario)


def test_an_interval_of_zero_means_never() -> None:
    async def scenario() -> None:
        sent: list[bytes] = []
        async with StreamComments(0, *commenting(sent)):
            await asyncio.sleep(0.05)
        assert sent == []

    run(scenario)


def test_a_comment_that_waits_for_its_client_ends_with_the_stream() -> None:
    async def scenario() -> None:
        waiting = asyncio.Event()

        async def stuck() -> None:
            waiting.set()
            await asyncio.Event().wait()

        async with StreamComments(0.02, lambda: 0, stuck):
            await waiting.wait()

    run(scenario)


def test_a_comment_whose_client_has_gone_is_no_failure_and_any_other_error_is() -> None:
    logged: list[str] = []

    async def scenario(error: Exception) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context["message"]))
        failed = asyncio.Event()

        async def comment() -> None:
            failed.set()
            raise error

        async with StreamComments(0.02, lambda: 0, comment):
            await failed.wait()
            await asyncio.sleep(0)
        gc.collect()

    run(lambda: scenario(ConnectionResetError()))
    assert logged == []
    with pytest.raises(ValueError, match="a defect"):
        run(lambda: scenario(ValueError("a defect")))


@pytest.mark.parametrize(
    ("data", "rest"),
    [
        (b"", b""),
        (b"data: 1\n\n: a\n\n", b"data: 1\n\n: a\n\n"),
        (COMMENT, b""),
        (b": a\n\n:b\r\n\r\ndata: 1\n\n", b"data: 1\n\n"),
        (b": a\n\n: not ended", b": not ended"),
    ],
)
def test_comments_at_the_begin_are_skipped(data: bytes, rest: bytes) -> None:
    assert without_comments(data) == rest
