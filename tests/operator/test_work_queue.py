"""The queue: no key is lost or runs twice at once; delays and backoff are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.backoff import delay_s
from stoker.operator.domain.plan import Key
from stoker.operator.loop.work_queue import WorkQueue
from testing.operator.fakes import FakeClock, settle

A, B, C = (Key("TrainingJob", "default", name) for name in "abc")


def new_queue() -> tuple[WorkQueue, FakeClock]:
    clock = FakeClock()
    return WorkQueue(clock, lambda: 1.0), clock


@asynccontextmanager
async def kept(queue: WorkQueue) -> AsyncIterator[None]:
    """A queue whose timekeeper runs."""
    keeper = asyncio.ensure_future(queue.keep_time())
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def drain(queue: WorkQueue) -> list[Key]:
    """Take everything that is ready and hand each key back at once."""
    found = []
    while len(queue):
        key = await queue.get()
        found.append(key)
        queue.done(key)
    return found


def test_a_key_waits_once() -> None:
    async def story() -> list[Key]:
        queue, _ = new_queue()
        for key in (A, B, A, A):
            queue.add(key)
        return await drain(queue)

    assert asyncio.run(story()) == [A, B]


def test_a_key_that_is_worked_on_comes_back_after_that() -> None:
    async def story() -> None:
        queue, _ = new_queue()
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        assert len(queue) == 0
        queue.done(A)
        assert await queue.get() == A

    asyncio.run(story())


def test_a_key_that_rests_comes_back_after_its_rest_and_stops_no_other() -> None:
    async def story() -> None:
        queue, clock = new_queue()
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.done(A, rest_s=2)
        queue.add(A)
        queue.add(B)
        assert await queue.get() == B
        waiting = asyncio.ensure_future(queue.get())
        async with kept(queue):
            await clock.advance(1.9)
            assert not waiting.done()
            await clock.advance(0.2)
        assert waiting.result() == A

    asyncio.run(story())


def test_an_unrequested_key_is_free_after_its_rest() -> None:
    async def story() -> None:
        queue, clock = new_queue()
        queue.add(A)
        queue.done(await queue.get(), rest_s=1)
        assert not queue.idle
        await clock.advance(1)
        assert queue.idle
        queue.add(A)
        assert await queue.get() == A

    asyncio.run(story())


def test_a_delayed_key_comes_when_it_is_due_and_the_earlier_time_holds() -> None:
    async def story() -> None:
        queue, clock = new_queue()
        queue.add_after(A, 10)
        queue.add_after(A, 5)
        queue.add_after(A, 7)
        waiting = asyncio.ensure_future(queue.get())
        async with kept(queue):
            await clock.advance(4.9)
            assert not waiting.done()
            await clock.advance(0.2)
            assert waiting.result() == A
            queue.done(A)
            await clock.advance(20)
        assert queue.idle

    asyncio.run(story())


def test_an_earlier_delay_comes_before_a_later_one_that_is_waited_for() -> None:
    async def story() -> None:
        queue, clock = new_queue()
        queue.add_after(A, 100)
        waiting = asyncio.ensure_future(queue.get())
        async with kept(queue):
            await settle()
            queue.add_after(B, 1)
            await clock.advance(1)
        assert waiting.result() == B

    asyncio.run(story())


class CountedClock(FakeClock):
    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds)


def test_a_key_wakes_one_worker_and_no_other_looks_at_the_clock() -> None:
    async def story() -> None:
        clock, worked = CountedClock(), list[Key]()
        queue = WorkQueue(clock, lambda: 1.0)
        queue.add_after(C, 1000)

        async def work() -> None:
            while True:
                worked.append(key := await queue.get())
                queue.done(key)

        workers = [asyncio.ensure_future(work()) for _ in range(8)]
        async with kept(queue):
            await settle()
            for _ in range(10):
                queue.add(A)
                await settle()
        assert (worked, clock.sleeps) == ([A] * 10, 1)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    asyncio.run(story())


def test_a_worker_that_is_cancelled_while_it_is_woken_loses_no_key() -> None:
    async def story() -> None:
        queue, _ = new_queue()
        first, second = (asyncio.ensure_future(queue.get()) for _ in range(2))
        await settle()
        queue.add(A)
        first.cancel()
        await settle()
        assert second.result() == A

    asyncio.run(story())


def test_backoff_doubles_up_to_five_minutes_and_starts_anew_after_success() -> None:
    async def story() -> None:
        queue, _ = new_queue()
        assert [queue.retry(A) for _ in range(4)] == [0.05, 0.1, 0.2, 0.4]
        for _ in range(20):
            last = queue.retry(A)
        assert last == 300.0
        queue.forget(A)
        assert queue.retry(A) == 0.05

    asyncio.run(story())


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True))
def test_a_delay_lies_between_half_and_all_of_the_doubled_time(failures: int, jitter: float) -> None:
    whole = min(300.0, 0.05 * 2 ** min(failures - 1, 40))
    assert whole / 2 <= delay_s(failures, lambda: jitter) <= whole


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "after", "retry", "done", "wait"]), st.sampled_from([A, B, C]), st.floats(0, 3)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(1, 3))
def test_every_wish_is_followed_by_work_and_no_key_is_in_two_hands(
    actions: list[tuple[str, Key, float]], workers: int
) -> None:
    async def story() -> None:
        queue, clock = new_queue()
        held: list[Key] = []
        wished: dict[Key, int] = {}
        worked: dict[Key, int] = {}
        order = 0

        async def work() -> None:
            nonlocal order
            while True:
                key = await queue.get()
                assert key not in held
                held.append(key)
                order += 1
                worked[key] = order
                await hands[key].wait()
                hands[key].clear()
                held.remove(key)
                queue.done(key)

        hands = {key: asyncio.Event() for key in (A, B, C)}
        tasks = [asyncio.ensure_future(queue.keep_time()), *(asyncio.ensure_future(work()) for _ in range(workers))]
        for action, key, seconds in actions:
            if action == "done" and key in held:
                hands[key].set()
            elif action == "wait":
                await clock.advance(seconds)
            elif action in ("add", "after", "retry"):
                order += 1
                wished[key] = order
                if action == "after":
                    queue.add_after(key, seconds)
                elif action == "add":
                    queue.add(key)
                else:
                    queue.retry(key)
            await settle()
        for _ in range(20):
            for key in list(held):
                hands[key].set()
            await clock.advance(30)
        assert not held
        assert queue.idle
        for key, when in wished.items():
            assert worked[key] > when, key
        for task in tasks:
            task.cancel()
        results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(story())
