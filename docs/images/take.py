"""Take the screenshots of docs/console.md anew, from generated sample data.

.venv/bin/python docs/images/take.py [FOLDER]
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from PIL import Image

from testing.gateway.browser import stage
from testing.gateway.console_world import (
    AGENT_PORT,
    deployment,
    gpu_agent,
    other_jobs,
    programs,
    running_job,
    use_checkpoint,
)
from testing.gateway.world import World
from testing.pod.nvml import FakeGpu, FakeNvml

if TYPE_CHECKING:
    from playwright.async_api import Page

START = datetime.now(UTC) - timedelta(minutes=60)
GPUS = [
    FakeGpu("GPU-7f1c2a90-55de-4b1e-9b0e-1c7b2f4f8a11", "0000:1B", busy=92, used=61 << 30),
    FakeGpu("GPU-9c0d11aa-01aa-4c1e-8f0e-2d7b2f4f8a12", "0000:43", busy=87, used=58 << 30),
]
PICTURES = (
    ("console-jobs", "#/jobs", "light", "tbody tr", 1280, 520),
    ("console-job", "#/jobs/default/teach", "light", ".timeline .cause", 1280, 1340),
    ("console-checkpoints", "#/checkpoints", "dark", ".save .users", 1280, 860),
    ("console-deployment", "#/deployments/default/chat", "dark", "meter", 1280, 1420),
    ("console-cluster", "#/cluster", "light", "meter", 1280, 700),
    ("console-phone", "#/jobs", "dark", "tbody tr", 390, 844),
)
"""(file, page, colours, element to wait for, width, height)."""


@asynccontextmanager
async def prepared(found: World) -> AsyncIterator[None]:
    """Write the sample data."""
    running_job(found, START)
    other_jobs(found)
    deployment(found, START)
    use_checkpoint(found, "teach-1200", "chat")
    pod = found.pod(found.job("measured"), 0, "", gpus=2, port=AGENT_PORT)
    async with programs(found), gpu_agent(found, pod, FakeNvml(GPUS)):
        yield


def write_small(picture: bytes, target: Path) -> None:
    """Write a PNG with a palette, a third of the size: screens have few colours."""
    with Image.open(io.BytesIO(picture)) as found:
        found.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def main(target: Path) -> None:
    """Write every picture."""
    with (
        tempfile.TemporaryDirectory() as folder,
        stage(Path(folder), prepared, now=lambda: datetime.now(UTC)) as found,
    ):
        for name, hash_, scheme, sign, *size in PICTURES:

            async def take(page: Page, name=name, hash_=hash_, sign=sign, size=size) -> None:  # type: ignore[no-untyped-def]
                await page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
                await page.evaluate("hash => { location.hash = hash }", hash_)
                await page.locator(sign).first.wait_for()
                if "deployment" in name:
                    await page.get_by_label("Message").fill("How are ranks counted?")
                    await page.keyboard.press("Enter")
                    await page.locator(".said[data-who=assistant]").filter(has_text="ranks").wait_for()
                    await page.evaluate("scrollTo(0, 0)")
                await page.wait_for_timeout(6000 if "deployment" in name else 800)
                write_small(await page.screenshot(), target / f"{name}.png")

            found.run(take, color_scheme=scheme)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
