"""The console with 500 jobs and with 20,000 points: how long the browser's frames take while it is used.

    .venv/bin/python bench/console_frames.py [--jobs 500] [--points 20000]

A real Chromium in front of the real gateway and an in-memory cluster. While a page is used (sorted, filtered, pointed
at, changed by events), every frame's time is taken by `requestAnimationFrame`. Frames above 50 ms are felt. Loading a
page is not counted. `layout_ms` and `task_ms` are processor time of the page's thread, in layout and in all, which a
busy machine changes little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stoker.operator.domain.plan import Key
from testing.gateway.browser import Stage, missing_browser, stage
from testing.gateway.console_world import many_jobs, step_lines
from testing.gateway.world import World

if TYPE_CHECKING:
    from playwright.async_api import Page

LIMIT_MS = 50.0
WATCH = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const frame = (now) => {
    window.frames_ms.push(now - last);
    last = now;
    window.watching = requestAnimationFrame(frame);
  };
  window.watching = requestAnimationFrame(frame);
}"""
READ = "() => { cancelAnimationFrame(window.watching); return window.frames_ms.slice(1); }"


@asynccontextmanager
async def nothing(_: World) -> AsyncIterator[None]:
    """Prepare no data: each page makes its own."""
    yield


@asynccontextmanager
async def watched(page: Page, found: dict[str, Any]) -> AsyncIterator[None]:
    """Write the frames and the processor time of what is done inside to `found`."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def spent() -> dict[str, float]:
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        return {one["name"]: 1000 * one["value"] for one in metrics}

    before = await spent()
    await page.evaluate(WATCH)
    yield
    found.update(summary(await page.evaluate(READ)))
    after = await spent()
    for name, metric in (("layout_ms", "LayoutDuration"), ("task_ms", "TaskDuration")):
        found[name] = round(after[metric] - before[metric], 1)


def jobs_page(found: Stage, jobs: int) -> dict[str, Any]:
    """Frames of the list of jobs while it is sorted, filtered and changed."""
    many_jobs(found.world, jobs)
    figures: dict[str, Any] = {}

    async def use(page: Page) -> dict[str, Any]:
        await page.get_by_label("Namespace").fill("many")
        await page.keyboard.press("Enter")
        await page.locator("tbody tr").nth(jobs - 1).wait_for(state="attached")
        async with watched(page, figures):
            await use_jobs(found.world, page, jobs)
        return figures

    return found.run(use)


async def use_jobs(world: World, page: Page, jobs: int) -> None:
    """Sort, filter, and change fifty jobs."""
    for name in ("Loss", "Step", "Loss"):
        await page.get_by_role("button", name=name).click()
    for text in ("run-01", "run", ""):
        await page.get_by_label("Filter").fill(text)
    for number in range(min(jobs, 50)):
        job = world.objects.get(Key("TrainingJob", "many", f"run-{number:04}"))
        world.put_status(job, progress={"step": 7, "totalSteps": 9, "loss": "1.5"})
    changed = page.locator("tbody tr").filter(has_text="7 / 9").nth(min(jobs, 50) - 1)
    await changed.wait_for(state="attached")


def points_page(found: Stage, points: int) -> dict[str, Any]:
    """Frames of a job's curves while the pointer moves over them and new steps arrive."""
    world = found.world
    job = world.put_status(world.job("long"), phase="Running", progress={"step": points, "totalSteps": 2 * points})
    world.pod(job, 0, step_lines(points))

    figures: dict[str, Any] = {}

    async def use(page: Page) -> dict[str, Any]:
        await page.evaluate("() => { location.hash = '#/jobs/default/long' }")
        await page.locator(".figure").filter(has_text=f"{points:,} values").first.wait_for()
        async with watched(page, figures):
            for number in range(1, 11):
                if box := await page.locator(".u-over").first.bounding_box():
                    await page.mouse.move(box["x"] + number * box["width"] / 11, box["y"] + box["height"] / 2)
                world.put_status(job, progress={"step": points + number, "totalSteps": 2 * points, "loss": "2.5"})
            await page.locator(".facts").filter(has_text=f"{points + 10:,}").first.wait_for()
        return figures

    return found.run(use)


def summary(frames: list[float]) -> dict[str, Any]:
    """Count, median, longest, and how many are above the limit."""
    ordered = sorted(frames)
    return {
        "frames": len(ordered),
        "median_ms": round(ordered[len(ordered) // 2], 1),
        "longest_ms": round(ordered[-1], 1),
        "above_50_ms": sum(one > LIMIT_MS for one in ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--points", type=int, default=20_000)
    given = parser.parse_args()
    if missing := missing_browser():
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder), nothing, history=50_000) as found:
        figures = {"jobs": jobs_page(found, given.jobs), "points": points_page(found, given.points)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
