"""What a part of a run costs the API server: requests by verb and resource, and CPU profiles, from its own counters.

Used by `kube_gangs.py --costs FOLDER`. The profiles are of ten seconds each and lie side by side:

    go tool pprof -top FOLDER/gang-*.pb.gz
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from e2e.api.access import Access

PROFILE_S = 10
PROFILING = ("--profiling=true",)
"""Flags of an API server that serves profiles."""

Requests = Mapping[str, float]


class ApiServerCosts:
    """Reads the counters and profiles of one API server; profiles only into a `folder`."""

    def __init__(self, access: Access, folder: Path | None) -> None:
        self.access = access
        self.folder = folder

    @asynccontextmanager
    async def of(self, name: str, found: dict[str, Any]) -> AsyncIterator[None]:
        """Count the requests inside of the block into `found["requests"]`, and write profiles of it."""
        before = await self._requests()
        profiling = asyncio.create_task(self._profiles(name))
        try:
            yield
        finally:
            profiling.cancel()
            await asyncio.gather(profiling, return_exceptions=True)
        found["requests"] = dict(sorted(rise(before, await self._requests()).items()))

    async def _profiles(self, name: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in range(10_000):
            content = await self._read(f"debug/pprof/profile?seconds={PROFILE_S}")
            (self.folder / f"{name}-{number:03}.pb.gz").write_bytes(content)

    async def _requests(self) -> Counter[str]:
        """Requests that change something or watch, by `VERB resource/subresource`."""
        found: Counter[str] = Counter()
        families = text_string_to_metric_families((await self._read("metrics")).decode())
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "apiserver_request_total":
                found[request_name(sample.labels)] += int(sample.value)
        return found

    async def _read(self, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(PROFILE_S + 60)
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            answer = await stack.enter_async_context(
                session.get(f"{self.access.url}/{path}", ssl=self.access.tls or False, headers=self.access.headers)
            )
            answer.raise_for_status()
            return await answer.read()


def request_name(labels: Mapping[str, str]) -> str:
    """Return `POST pods`, `PUT trainingjobs/status`."""
    resource = "/".join(part for part in (labels["resource"], labels["subresource"]) if part)
    return f"{labels['verb']} {resource}"


def rise(before: Requests, after: Requests) -> dict[str, float]:
    """Return what grew, and by how much."""
    grown = {name: after[name] - before.get(name, 0) for name in after}
    return {name: value for name, value in grown.items() if value > 0}
