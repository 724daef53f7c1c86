"""One Chromium for all tests of a module, with pages of the console in front of a world with sample data."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from testing.gateway.cut_line import CutLine, cut_line
from testing.gateway.world import KEY, World, world

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

T = TypeVar("T")
REQUIRED = "STOKER_BROWSER_TESTS"
"""Set to `required` by .ci/run where it installed Chromium: then its absence is a failure."""
LONGEST_MS = 180_000
"""Longest wait for a condition; a busy machine is slow."""


@asynccontextmanager
async def settled(longest_s: float = 60.0) -> AsyncIterator[None]:
    """At the end, wait until the requests that began inside have ended: a server that closes first would cut them."""
    before = len(asyncio.all_tasks())
    yield
    until = time.monotonic() + longest_s
    while len(asyncio.all_tasks()) > before and time.monotonic() < until:
        await asyncio.sleep(0.02)


def missing_browser() -> str:
    """What the tests lack, in one line; empty when nothing is missing, or when they must not be left out."""
    if os.environ.get(REQUIRED) == "required":
        return ""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make setup)"
    return "" if executable() else "Chromium is not installed (make kube-packages, as root)"


def executable() -> str | None:
    """Debian's Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Stage:
    """A world, a browser in front of it, and the loop that runs both."""

    runner: asyncio.Runner
    world: World
    browser: Browser
    line: CutLine
    """The way of every page to the gateway."""
    problems: list[str] = field(default_factory=list)
    """Errors that pages wrote to their console, and refusals by the content security policy."""

    def run(self, story: Callable[[Page], Awaitable[T]], *, token: str = KEY, **options: Any) -> T:
        """Run a story on a page of its own. Errors in the page's console fail it, unless `problems` was cleared."""
        self.problems.clear()

        async def told() -> T:
            async with self.page(token, **options) as page:
                return await story(page)

        found = self.runner.run(told())
        assert self.problems == []
        return found

    @asynccontextmanager
    async def page(self, token: str, **options: Any) -> AsyncIterator[Page]:
        """Open a page that is signed in with a token; with an empty one it is not."""
        context = await self.browser.new_context(viewport={"width": 1360, "height": 900}, **options)
        context.set_default_timeout(LONGEST_MS)
        try:
            page = await context.new_page()
            page.on("console", lambda message: self.problems.extend([message.text] if message.type == "error" else []))
            page.on("pageerror", lambda error: self.problems.extend([str(error)]))
            await page.goto(f"http://127.0.0.1:{self.line.port}/console/{f'#key={token}' if token else ''}")
            yield page
        finally:
            await context.close()


@contextmanager
def stage(folder: Path, prepare: Callable[[World], Any], **options: Any) -> Iterator[Stage]:
    """Open one browser in front of one world with `prepare`d data; `prepare` may be an async context manager."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner.run(_open(runner, stack, folder, prepare, options))
        finally:
            runner.run(stack.aclose())


async def _open(
    runner: asyncio.Runner, stack: AsyncExitStack, folder: Path, prepare: Callable[[World], Any], options: Any
) -> Stage:
    from playwright.async_api import async_playwright

    found = await stack.enter_async_context(world("kubernetes", folder, sockets=True, **options))
    await stack.enter_async_context(prepare(found))
    await stack.enter_async_context(settled())
    playwright = await stack.enter_async_context(async_playwright())
    path = executable()
    assert path is not None, "Chromium is not installed (make kube-packages, as root)"
    arguments = ["--disable-dev-shm-usage", "--disable-gpu"]
    browser = await playwright.chromium.launch(executable_path=path, args=arguments, timeout=LONGEST_MS * 2)
    stack.push_async_callback(browser.close)
    port = found.client.base_url.port
    assert port is not None
    line = await stack.enter_async_context(cut_line("127.0.0.1", port))
    return Stage(runner, found, browser, line)


async def visit(page: Page, hash_: str) -> None:
    """Go to a page of the console (`#/jobs`), and return when nothing of the page before is shown any more."""
    await page.evaluate(
        """hash => new Promise((done) => {
          if (location.hash === hash) return done();
          addEventListener('hashchange', () => done(), { once: true });  // called after the console's own
          location.hash = hash;
        })""",
        hash_,
    )


def shows(page: Page, selector: str, text: str | re.Pattern[str]) -> Any:
    """Wait until an element shows a text."""
    return page.locator(selector).filter(has_text=text).first.wait_for()
