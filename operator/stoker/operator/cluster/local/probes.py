"""Startup, readiness and liveness probes of one container, by HTTP. Until its first success a probe runs more often.

Made by `pod_life` for each container; a result wakes the pod's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.clock import Clock

EAGER_S = 0.2
"""Shortest period of a probe that has not succeeded yet."""

Ask = Callable[[str, int, str, float], Awaitable[bool]]
"""(address, port, path, timeout in seconds) -> whether the answer was 2xx or 3xx."""


@dataclass(frozen=True)
class Probe:
    """One probe of a container's spec, with Kubernetes' defaults."""

    path: str
    port: int | str
    initial_delay_s: float
    period_s: float
    timeout_s: float
    failures: int
    successes: int


def parse_probe(spec: Mapping[str, Any] | None) -> Probe | None:
    if not spec or "httpGet" not in spec:
        return None
    return Probe(
        path=str(spec["httpGet"].get("path", "/")),
        port=spec["httpGet"]["port"],
        initial_delay_s=float(spec.get("initialDelaySeconds", 0)),
        period_s=float(spec.get("periodSeconds", 10)),
        timeout_s=float(spec.get("timeoutSeconds", 1)),
        failures=int(spec.get("failureThreshold", 3)),
        successes=int(spec.get("successThreshold", 1)),
    )


class ContainerProbes:
    """All probes of one container."""

    def __init__(
        self,
        container: Mapping[str, Any],
        find_port: Callable[[int | str], tuple[str, int]],
        ask: Ask,
        clock: Clock,
        tell: Callable[[bool, bool], None],
    ) -> None:
        """Args:
        find_port: address and port of a probe's port.
        tell: called with (started, ready) at each change.
        """
        self.startup = parse_probe(container.get("startupProbe"))
        self.liveness = parse_probe(container.get("livenessProbe"))
        self.readiness = parse_probe(container.get("readinessProbe"))
        self.find_port = find_port
        self.ask = ask
        self.clock = clock
        self.tell = tell

    async def run(self) -> str:
        """Run the probes until the container must be killed, and return the reason."""
        if self.startup is not None and not await self._starts(self.startup):
            return "the startup probe failed"
        self.tell(True, self.readiness is None)
        follow = asyncio.ensure_future(self._follow_readiness())
        try:
            if self.liveness is None:
                await follow
            else:
                await self._fails(self.liveness)
            return "the liveness probe failed"
        finally:
            follow.cancel()

    async def _starts(self, probe: Probe) -> bool:
        await self.clock.sleep(probe.initial_delay_s)
        end = self.clock.monotonic() + probe.failures * probe.period_s
        while not await self._good(probe):
            if self.clock.monotonic() >= end:
                return False
            await self.clock.sleep(min(EAGER_S, probe.period_s))
        return True

    async def _fails(self, probe: Probe) -> None:
        """Probe until `failures` answers in a row were bad."""
        await self.clock.sleep(probe.initial_delay_s)
        bad = 0
        while bad < probe.failures:
            bad = 0 if await self._good(probe) else bad + 1
            await self.clock.sleep(probe.period_s)

    async def _follow_readiness(self) -> None:
        """Report each change of readiness, for ever."""
        probe = self.readiness
        if probe is None:
            await asyncio.get_running_loop().create_future()
            return
        await self.clock.sleep(probe.initial_delay_s)
        ready, same = False, 0
        while True:
            good = await self._good(probe)
            same = same + 1 if good != ready else 0
            if same >= (probe.successes if good else probe.failures):
                ready, same = good, 0
                self.tell(True, ready)
            await self.clock.sleep(probe.period_s if ready else min(EAGER_S, probe.period_s))

    async def _good(self, probe: Probe) -> bool:
        address, port = self.find_port(probe.port)
        return await self.ask(address, port, probe.path, probe.timeout_s)


async def ask_http(address: str, port: int, path: str, timeout_s: float) -> bool:
    """Send one GET; whether a 2xx or 3xx came in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    words = line.split()
    return len(words) >= 2 and words[1].isdigit() and 200 <= int(words[1]) < 400
