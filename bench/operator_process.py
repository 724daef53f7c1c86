"""The operator alone in a process, for `reconcilers.py`: the real loop, and a cluster that is a Unix socket away.

Nothing but the operator is imported. Objects arrive as JSON texts, one per change, as from an API server. Commands come
on standard input, one JSON line each; answers go to standard output.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from stoker.operator.cluster import interface as seam
from stoker.operator.cluster.kinds import OURS
from stoker.operator.domain.plan import ControlCall, Key, Object, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.object_pruning import pruned
from stoker.operator.loop.operator import Operator
from stoker.operator.loop.store import key_of
from stoker.operator.service.reconcilers import RECONCILERS

MAX_LINE = 1 << 28
PAGE = 100
ERRORS: dict[str, type[seam.ClusterError]] = {
    error.__name__: error
    for error in (seam.NotFound, seam.AlreadyExists, seam.Conflict, seam.Gone, seam.Invalid, seam.PodUnreachable)
}


class RemoteCluster:
    """A `Cluster` over one connection for calls and one more per watch."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self.socket, limit=MAX_LINE)
        self._reading = asyncio.create_task(self._read(reader))

    async def list(self, kind: str, **_: Any) -> seam.Listing:
        """List in pages, as clients of an API server do.

        Each page is reduced to what the store keeps before the next one arrives.
        """
        items: list[Object] = []
        version = None
        while version is None or len(items) % PAGE == 0:
            page, now = await self._ask("list", kind, len(items), PAGE)
            version = version or now
            items += map(pruned, page)
            if not page:
                break
        return seam.Listing(tuple(items), version)

    async def watch(self, kind: str, resource_version: str, **_: Any) -> AsyncIterator[seam.WatchEvent]:
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=MAX_LINE)
        writer.write(json.dumps([0, "watch", [kind, resource_version]]).encode() + b"\n")
        while line := await reader.readline():
            change, found = json.loads(line)
            yield seam.WatchEvent(change, found)

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self._ask("get", kind, namespace, name)

    async def create(self, body: Object) -> Object:
        return await self._ask("create", body)

    async def apply(self, body: Object, *, manager: str) -> Object:
        return await self._ask("apply", body, manager)

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        return await self._ask("patch", ref, body)

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        return await self._ask("update_status", ref, status, resource_version)

    async def scale(self, ref: Ref, replicas: int) -> None:
        await self._ask("scale", ref, replicas)

    async def delete(self, ref: Ref) -> Object | None:
        return await self._ask("delete", ref)

    async def call(self, call: ControlCall) -> Mapping[str, Any]:
        return await self._ask("call", call.pod, call.method, call.path, call.body)

    async def poll(self, pod: Ref) -> Mapping[str, Any]:
        return await self._ask("poll", pod)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps([self._number, method, arguments]).encode() + b"\n")
        return await answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            number, error, result = json.loads(line)
            waiting = self._waiting.pop(number)
            if error is None:
                waiting.set_result(result)
            else:
                waiting.set_exception(ERRORS.get(error, seam.ServerError)(result))


class CountedOperator(Operator):
    """An operator that counts its passes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.passes: Counter[str] = Counter()

    async def work(self, key: Key) -> None:
        self.passes[key.kind] += 1
        await super().work(key)

    async def look_at_everything(self) -> dict[str, list[float]]:
        """Run one pass over every resource, one after the other; return seconds by kind."""
        seconds: dict[str, list[float]] = {}
        for kind in OURS:
            for resource in self.store.of_kind(kind):
                begin = time.perf_counter()
                await self.work(key_of(resource))
                seconds.setdefault(kind, []).append(time.perf_counter() - begin)
                await asyncio.sleep(0)
        return seconds


class Commands:
    """The commands of the bench."""

    def __init__(self, operator: CountedOperator) -> None:
        self.operator = operator

    async def figures(self) -> dict[str, Any]:
        """Return memory in MiB, CPU seconds, passes so far, and whether there is work left."""
        gc.collect()
        objects = Counter(key.kind for key in self.operator.store._objects)
        return {
            "resident_mib": memory_mib("VmRSS"),
            "peak_mib": memory_mib("VmHWM"),
            "cpu_s": time.process_time(),
            "passes": dict(self.operator.passes),
            "idle": self.operator.queue.idle,
            "objects": dict(objects),
        }

    async def look(self) -> dict[str, Any]:
        """Return the milliseconds of a pass at rest, by kind and over all."""
        found = await self.operator.look_at_everything()
        return {
            kind: spread(values)
            for kind, values in {**found, "all": [one for values in found.values() for one in values]}.items()
        }


def spread(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"count": len(seconds), "p50_ms": round(1e3 * cuts[9], 3), "p95_ms": round(1e3 * cuts[18], 3)}


def memory_mib(field: str) -> float:
    with open("/proc/self/status") as lines:  # noqa: PTH123
        return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith(field))


async def main(socket: str, settings: Mapping[str, Any]) -> None:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    answer({"resident_mib": memory_mib("VmRSS"), "pid": os.getpid()})
    cluster = RemoteCluster(socket)
    await cluster.connect()
    operator = CountedOperator(cluster, Settings(**settings), RECONCILERS)
    running = asyncio.create_task(operator.run())
    known: dict[str, Callable[[], Any]] = {"figures": Commands(operator).figures, "look": Commands(operator).look}
    while line := await commands.readline():
        answer(await known[json.loads(line)]())
    running.cancel()


def answer(found: Any) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
