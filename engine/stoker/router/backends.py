"""The set of backends: follows the operator's snapshots, probes each backend and chooses one for a request.

The only owner of `Backend` objects. `Router` applies snapshots; `Proxy` calls `choose`, or `wait_for_one` while none is
ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stoker.router.backend import Backend, Candidate, Timeouts
from stoker.router.connection import BackendError
from stoker.router.endpoint import Endpoint
from stoker.router.engine_counts import EngineCounts
from stoker.router.load import Load, NotReported
from stoker.router.other_models import OtherModels
from stoker.router.pairs import Pair, PairPolicy, cheapest, of_role, split_or_whole
from stoker.router.policy import Policy
from stoker.router.shares import Shares
from stoker.router.snapshot import BackendEntry, BackendSnapshot
from stoker.router.work import NO_WORK, Work

log = logging.getLogger("stoker.router")
RECONNECT_S = 0.5
"""Pause before the load of a backend is asked for again."""
UNREPORTED_S = 30.0
"""The same for an engine that reports none."""
STREAM_SILENCE_S = 1.0
"""A stream of a stalled backend on which nothing came for so long goes on elsewhere."""


def any_backend(_: Backend) -> bool:
    return True


def by_rank(backends: Sequence[Backend]) -> Sequence[Candidate]:
    """The data ranks of those that have several, which are choices of their own, and the others as they are."""
    return [candidate for one in backends for candidate in one.candidates]


def _ignore(_: BackendEntry, __: EngineCounts) -> None:
    pass


def _is_of(revision: str, backend: Backend) -> bool:
    return backend.entry.revision == revision


class Backends:
    """All backends of the newest snapshot. Used in one event loop; `apply` starts probes and `stop` ends them."""

    def __init__(
        self,
        *,
        policy: Policy[Backend],
        times: Timeouts,
        probe_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        predicts: bool = False,
    ) -> None:
        """`predicts`: follow the engines' loads, whatever the policy looks at."""
        self.policy = policy
        self.predicts = predicts
        self.times = times
        self.probe_interval_s = probe_interval_s
        self.clock = clock
        self.version = -1
        self._backends: dict[tuple[str, str], Backend] = {}
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._followers: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._snapshot: BackendSnapshot | None = None
        self.pairs_engines = False
        """Whether the deployment has pools of roles, so that a request may be split between two engines."""
        self.names_ranks = False
        """Whether an engine has reported several data ranks."""
        self.shares = Shares()
        self.fallback: Endpoint | None = None
        """Another deployment, for requests that no backend can take."""
        self.others: OtherModels | None = None
        """Models of other deployments; None: there are none."""
        self.counted: Callable[[BackendEntry, EngineCounts], None] = _ignore
        """Called with what an engine has reported of its requests."""
        self._turn = 0
        self._changed = asyncio.Event()

    @property
    def weighs_work(self) -> bool:
        """Whether the choice looks at what a request is."""
        return self.predicts or isinstance(self.policy, PairPolicy) or self.pairs_engines

    @property
    def policy_predicts(self) -> bool:
        """Whether the policy itself chooses by predicted seconds."""
        return isinstance(self.policy, PairPolicy)

    @property
    def follows_loads(self) -> bool:
        """Whether engines' reports are used: by the choice, or to compare revisions."""
        return self.weighs_work or (self._snapshot is not None and bool(self._snapshot.window))

    @property
    def all(self) -> list[Backend]:
        return list(self._backends.values())

    @property
    def ready(self) -> list[Backend]:
        """Those that may get a new request."""
        return [one for one in self._backends.values() if one.ready]

    def apply(self, snapshot: BackendSnapshot) -> bool:
        """Replace the snapshot in use by a newer one; return whether `snapshot` is now the one in use."""
        if snapshot.version <= self.version:
            return snapshot == self._snapshot
        wanted = {entry.key: entry for entry in snapshot.backends}
        for key in self._backends.keys() - wanted.keys():
            self._backends.pop(key).retire()
            self._probes.pop(key).cancel()
            if key in self._followers:
                self._followers.pop(key).cancel()
        for key, entry in wanted.items():
            if key in self._backends:
                self._backends[key].listed(entry)
            else:
                self._add(Backend(entry, self.times, self.clock))
        target = snapshot.fallback
        self.fallback = Endpoint(target, self.times, self.clock) if target is not None else None
        self.others = OtherModels(snapshot, self.times, self.clock) if snapshot.models else None
        self.shares = Shares(tuple((share.revision, share.percent) for share in snapshot.shares))
        self.pairs_engines = any(entry.role != "colocated" for entry in snapshot.backends)
        self.version, self._snapshot = snapshot.version, snapshot
        self._follow_loads()
        log.info("snapshot %d: %d backends", snapshot.version, len(wanted))
        self._announce()
        return True

    def _add(self, backend: Backend) -> None:
        key = backend.entry.key
        self._backends[key] = backend
        self._probes[key] = asyncio.create_task(self._keep_probing(backend), name=f"probe {backend.entry.url}")

    def _follow_loads(self) -> None:
        """Follow the load of every backend, if it is used."""
        for key, backend in self._backends.items():
            if self.follows_loads and key not in self._followers:
                following = self._keep_following(backend)
                self._followers[key] = asyncio.create_task(following, name=f"load of {backend.entry.url}")

    async def _keep_following(self, backend: Backend) -> None:
        """Follow the load of a backend; after a break begin again."""
        while not backend.retired:
            pause_s = RECONNECT_S
            try:
                await backend.follow_load(self.counted, self._took)
            except NotReported:
                pause_s = UNREPORTED_S
            except BackendError as error:
                log.debug("load of %s: %s", backend.entry.url, error)
            await asyncio.sleep(pause_s)

    def _took(self, backend: Backend, load: Load) -> None:
        """Note that an engine has several ranks; pass a report on to a policy that learns from it."""
        self.names_ranks = self.names_ranks or bool(backend.ranks)
        if isinstance(self.policy, PairPolicy):
            self.policy.reported(backend, load)

    def name_of(self, work: Work) -> str:
        """The name of a request's beginning for engines with a store; empty: it needs none."""
        return self.policy.name_of(work) if isinstance(self.policy, PairPolicy) else ""

    async def _keep_probing(self, backend: Backend) -> None:
        while not backend.retired:
            backend.probe_now.clear()
            was_ready, was_problem = backend.ready, backend.problem
            await backend.probe()
            if backend.problem != was_problem:
                log.info("backend %s: %s", backend.entry.url, backend.problem or "ready")
            if backend.ready and not was_ready:
                self._announce()
            if backend.stalled and self.ready:
                moved = backend.abandon_unanswered() + backend.abandon_silent(STREAM_SILENCE_S)
            else:
                moved = 0
            if moved:
                log.warning("backend %s: %s; %d requests move", backend.entry.url, backend.problem, moved)
            try:
                async with asyncio.timeout(self.probe_interval_s):
                    await backend.probe_now.wait()
                await asyncio.sleep(self.probe_interval_s / 10)  # a suspect is asked soon, but not in a tight loop
            except TimeoutError:
                pass

    def _announce(self) -> None:
        """Wake the requests that wait for a backend."""
        self._changed.set()
        self._changed = asyncio.Event()

    def choose(
        self, exclude: set[tuple[str, str]], work: Work = NO_WORK, fits: Callable[[Backend], bool] = any_backend
    ) -> Pair[Candidate] | None:
        """Choose a ready backend outside `exclude` that fits, and perhaps one that computes the prompt; or None."""
        pair = self.find(exclude, work, fits)
        if pair is not None:
            self.take(pair, work)
        return pair

    def take(self, pair: Pair[Candidate], work: Work) -> None:
        """Note that the engines of a pair get a request."""
        self._turn += 1
        if isinstance(self.policy, PairPolicy):
            self.policy.note(work, pair)

    def find(
        self, exclude: set[tuple[str, str]], work: Work = NO_WORK, fits: Callable[[Backend], bool] = any_backend,
        *, soonest: bool = False,
    ) -> Pair[Candidate] | None:  # fmt: skip
        """Choose as `choose` does, without an effect. `soonest`: by predicted seconds, whatever the policy looks at."""
        candidates = self.ready
        if exclude or fits is not any_backend:
            candidates = [backend for backend in candidates if backend.entry.key not in exclude and fits(backend)]
        if not candidates:
            return None
        turn = self._turn + 1
        places = by_rank(candidates) if self.names_ranks and self.weighs_work else candidates
        helpers = places if self.pairs_engines and work.may_split else ()
        if isinstance(self.policy, PairPolicy):
            return self.policy.pair(places, helpers, turn, work)
        able = of_role(candidates)
        chosen = self.policy(able, turn, work)
        ranks = by_rank(able) if soonest else chosen.candidates
        own = cheapest(ranks, work.tokens, turn) if self.weighs_work else chosen
        begin = turn % len(places)
        return split_or_whole(own, [*helpers[begin:], *helpers[:begin]], work.tokens, {})

    def choose_shared(self, exclude: set[tuple[str, str]], work: Work, key: bytes) -> Pair[Candidate] | None:
        """Choose among backends of the revision to which `key` belongs, else of another one with a share."""
        pair = self.find_shared(exclude, work, key)
        if pair is not None:
            self.take(pair, work)
        return pair

    def find_shared(
        self, exclude: set[tuple[str, str]], work: Work, key: bytes, *, soonest: bool = False
    ) -> Pair[Candidate] | None:
        """Choose as `choose_shared` does, without an effect; `soonest`: as `find`."""
        if not self.shares.percents:
            return self.find(exclude, work, soonest=soonest)
        for revision in self.shares.order(key):
            if (found := self.find(exclude, work, partial(_is_of, revision), soonest=soonest)) is not None:
                return found
        return None

    def has_share(self, backend: Backend) -> bool:
        """Whether the backend's revision gets new requests."""
        return self.shares.takes(backend.entry.revision)

    async def wait_for_one(
        self, exclude: set[tuple[str, str]], timeout_s: float, work: Work = NO_WORK,
        fits: Callable[[Backend], bool] = any_backend,
    ) -> Pair[Candidate] | None:  # fmt: skip
        """Choose as `choose` does, after waiting at most `timeout_s` for one to become ready."""
        deadline = self.clock() + timeout_s
        while (pair := self.choose(exclude, work, fits)) is None:
            left_s = deadline - self.clock()
            if left_s <= 0:
                return None
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return self.choose(exclude, work, fits)
        return pair

    def status(self) -> list[Mapping[str, Any]]:
        """Return the `backends` field of `/status`."""
        return [
            {
                "url": backend.entry.url,
                "pod_uid": backend.entry.pod_uid,
                "healthy": backend.healthy,
                "pending": backend.pending,
                "ranks": [{"pending": rank.pending} for rank in backend.ranks],
                "draining": backend.entry.draining,
                "revision": backend.entry.revision,
                "role": backend.role,
                "epoch": backend.identity[1],
                "peer": backend.peer_endpoint,
                "problem": backend.problem,
            }
            for backend in self._backends.values()
        ]

    async def stop(self) -> None:
        """End the probes and close idle connections."""
        probes = [*self._probes.values(), *self._followers.values()]
        for backend in self._backends.values():
            backend.retire()
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
