"""Leader election by a Lease: one replica works, the others wait.

`decide` is pure. Time is this machine's monotonic clock only: how long a holder has been silent is measured from when
its last renewal was *seen*, never from the times that it wrote. A holder stops its work before another may take over,
and `valid` returns at any moment whether it may still write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol

from stoker.operator.cluster.interface import AlreadyExists, ClusterError, Conflict, NotFound
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import Object

log = logging.getLogger(__name__)

API_VERSION = "coordination.k8s.io/v1"


class LeaseStep(StrEnum):
    """The next step of a replica with the Lease."""

    RENEW = "Renew"
    ACQUIRE = "Acquire"
    WAIT = "Wait"


@dataclass(frozen=True)
class Terms:
    """Times in seconds; `retry_s < renew_deadline_s < duration_s`."""

    duration_s: int = 15
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    @property
    def timeout_s(self) -> float:
        """Longest wait for one answer: a slow API server is waited for, and a lost request leaves time for another."""
        return max(self.retry_s, self.renew_deadline_s / 2)


@dataclass(frozen=True)
class Sighting:
    """A Lease as it was when it last changed."""

    holder: str
    renewed: str
    """The raw `renewTime`; only tested for change."""
    duration_s: float
    seen_at: float
    """Monotonic time of the change."""


def sighted(lease: Object, before: Sighting | None, now_s: float) -> Sighting:
    """Update the sighting after a read: its time moves only when holder or renewal changed."""
    spec = lease.get("spec") or {}
    seen = Sighting(
        holder=str(spec.get("holderIdentity") or ""),
        renewed=str(spec.get("renewTime") or ""),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        seen_at=now_s,
    )
    if before is not None and (before.holder, before.renewed) == (seen.holder, seen.renewed):
        return replace(seen, seen_at=before.seen_at)
    return seen


def decide(seen: Sighting, me: str, now_s: float) -> LeaseStep:
    """Renew our own Lease, take a free or expired one, else wait."""
    if seen.holder == me:
        return LeaseStep.RENEW
    if not seen.holder or now_s >= seen.seen_at + seen.duration_s:
        return LeaseStep.ACQUIRE
    return LeaseStep.WAIT


def renewed_spec(old: Object, me: str, terms: Terms, now: datetime) -> Object:
    """Build the Lease's spec with `me` as its holder."""
    moment = _micro_time(now)
    spec = dict(old.get("spec") or {})
    if spec.get("holderIdentity") != me:
        spec["acquireTime"] = moment
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
    return {**spec, "holderIdentity": me, "leaseDurationSeconds": terms.duration_s, "renewTime": moment}


class LeaseApi(Protocol):
    """Access to the Lease. Every call may raise a `ClusterError`; `replace` raises Conflict when the Lease changed."""

    async def read(self, timeout_s: float) -> Object: ...

    async def create(self, spec: Object, timeout_s: float) -> Object: ...

    async def replace(self, lease: Object, timeout_s: float) -> Object: ...


class Elector:
    """Runs `work` while this replica holds the Lease. One per process."""

    def __init__(self, api: LeaseApi, me: str, terms: Terms, clock: Clock) -> None:
        self.api = api
        self.me = me
        self.terms = terms
        self.clock = clock
        self.leading = False
        self.transitions = 0
        self._held_until = float("-inf")
        self._moved_at = clock.monotonic()
        self._lease: Object | None = None
        self._seen: Sighting | None = None

    def valid(self) -> bool:
        """Whether this replica holds the Lease at this moment and may write."""
        return self.leading and self.clock.monotonic() < self._held_until

    def stuck_s(self) -> float:
        """Seconds since the last attempt, successful or not."""
        return self.clock.monotonic() - self._moved_at

    @property
    def holder(self) -> str:
        """Identity of the holder when the Lease was last read; empty when it was free."""
        return self._seen.holder if self._seen else ""

    async def run(self, work: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        """Run until `stop`; then end the work and give the Lease back, so that another replica takes over at once.

        Raises:
            Exception: raised by `work`; the Lease is given back before.
        """
        while await self._acquire(stop):
            log.info("%s leads", self.me)
            self.leading = True
            try:
                await self._lead(work, stop)
            finally:
                self.leading = False
                await self._release()

    async def _acquire(self, stop: asyncio.Event) -> bool:
        """Wait for the Lease; False when the replica is to stop."""
        while not stop.is_set():
            if await self._renew_or_take():
                return True
            await self._pause(self.terms.retry_s, stop)
        return False

    async def _lead(self, work: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        """Work and renew concurrently; the end of one ends the other. Renewals continue until the work has ended."""
        working = asyncio.ensure_future(work())
        keeping = asyncio.create_task(self._keep(), name="lease")
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((working, keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                log.error("%s lost the Lease and stops its work", self.me)
        finally:
            self.leading = not keeping.done()
            stopping.cancel()
            working.cancel()
            await asyncio.wait((working,))
            keeping.cancel()
            await asyncio.gather(keeping, stopping, return_exceptions=True)
        if not working.cancelled():
            working.result()

    async def _keep(self) -> None:
        """Renew until the deadline passes without success, or another replica took the Lease."""
        while True:
            rest_s = max(0.0, self.terms.retry_s - self.stuck_s())  # a slow answer was rest enough
            await self.clock.sleep(min(rest_s, self._left_s()))
            if self._left_s() <= 0:
                return
            await self._renew_or_take()
            if self._seen is not None and self._seen.holder != self.me:
                return

    def _left_s(self) -> float:
        """Seconds for which the Lease is certainly ours."""
        return self._held_until - self.clock.monotonic()

    def _timeout_s(self) -> float:
        """Timeout of one request: a renewal after the deadline is useless."""
        return max(0.05, min(self.terms.timeout_s, self._left_s())) if self.leading else self.terms.timeout_s

    async def _renew_or_take(self) -> bool:
        """Read the Lease and write it if it is our turn; True when this replica holds it afterwards."""
        self._moved_at = self.clock.monotonic()
        try:
            lease = await self._read()
            asked_at = self.clock.monotonic()  # others see the write later, and count from then
            if decide(lease[1], self.me, asked_at) is LeaseStep.WAIT:
                return False
            await self._write_holder(lease[0])
        except (AlreadyExists, Conflict):
            self._lease = None
            return False
        except ClusterError as error:
            log.warning("the Lease cannot be renewed: %s", error)
            self._lease = None
            return False
        self._held_until = asked_at + self.terms.renew_deadline_s
        return True

    async def _read(self) -> tuple[Object, Sighting]:
        """Get the Lease: while leading the one written last (another's write shows as a conflict), else read it."""
        lease = self._lease if self.leading else None
        if lease is None:
            try:
                lease = await self.api.read(self._timeout_s())
            except NotFound:
                lease = {"spec": {}}
        self._seen = sighted(lease, self._seen, self.clock.monotonic())
        return lease, self._seen

    async def _write_holder(self, lease: Object) -> None:
        spec = renewed_spec(lease, self.me, self.terms, self.clock.now())
        if "metadata" in lease:
            self._lease = await self.api.replace({**lease, "spec": spec}, self._timeout_s())
        else:
            self._lease = await self.api.create(spec, self._timeout_s())
        self.transitions = int(spec.get("leaseTransitions") or 0)
        self._seen = sighted(self._lease, self._seen, self.clock.monotonic())

    async def _release(self) -> None:
        """Give the Lease back, so that other replicas need not wait for its end."""
        lease = self._lease
        self._lease = None
        if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self.me:
            return
        spec = {
            **lease["spec"],
            "holderIdentity": "",
            "leaseDurationSeconds": 1,
            "renewTime": _micro_time(self.clock.now()),
        }
        try:
            await self.api.replace({**lease, "spec": spec}, self.terms.retry_s)
        except ClusterError as error:
            log.warning("the Lease was not given back: %s", error)
        self._seen = None

    async def _pause(self, seconds: float, stop: asyncio.Event) -> None:
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(self.clock.sleep(seconds)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
