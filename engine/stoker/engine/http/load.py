"""The load of an engine as its front sees it, and the reports that routers follow at `GET /load`.

Counts change with each job of the front; rates are means of the last ones. Owned by `Front`, changed by `Generation`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stoker.engine.config import Role
from stoker.engine.core.messages import RequestFacts
from stoker.engine.core.stats import TransferStats
from stoker.engine.http.openai.sse import event

REPORT_S = 0.1
"""Shortest time between two reports."""
QUIET_S = 0.5
"""Longest time between two reports."""
WEIGHT = 0.2
"""Of a new measurement in a mean."""
FEWEST_TOKENS = 16
"""Prompt tokens from which the time of a prefill says something."""


class LoadLedger:
    """Open jobs of one front."""

    def __init__(
        self,
        role: Role = "colocated",
        transfer: Callable[[], TransferStats | None] = lambda: None,
        queue_s: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """`transfer`: the newest report of the core on other engines; `queue_s`: that on times in its queue."""
        self.role, self._transfer, self._queue_s = role, transfer, queue_s
        self.epoch = uuid.uuid4().hex
        """This run of the engine."""
        self.waiting: dict[str, int] = {}
        """Prompt tokens of jobs without a first token."""
        self.running: set[str] = set()
        self.prefill_tokens_per_s: float | None = None
        self.gap_s: float | None = None

    @contextmanager
    def job(self, name: str, prompt_tokens: int) -> Iterator[None]:
        """Count a job until it ends."""
        self.waiting[name] = prompt_tokens
        try:
            yield
        finally:
            self.waiting.pop(name, None)
            self.running.discard(name)

    def first_token(self, name: str, facts: RequestFacts | None) -> None:
        """Note that a job's prompt is computed; harmless when repeated."""
        if self.waiting.pop(name, None) is None:
            return
        self.running.add(name)
        if facts is None or facts.helped or facts.scheduled_s is None or facts.first_token_s is None:
            return
        tokens, seconds = facts.prompt_tokens - facts.cached_tokens, facts.first_token_s - facts.scheduled_s
        if tokens >= FEWEST_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / seconds)

    def gap(self, seconds: float) -> None:
        """Note the time between two tokens of a sequence."""
        if seconds > 0:
            self.gap_s = _mean(self.gap_s, seconds)

    def report(self) -> dict[str, Any]:
        """The present load, with what is computed for other engines; `GET /load` adds a number."""
        helps = self._transfer()
        helping, waiting, tokens, rate = (
            (helps.helping, helps.helping_waiting, helps.helping_tokens, helps.prefill_tokens_per_s)
            if helps is not None
            else (0, 0, 0, None)
        )
        return {
            "epoch": self.epoch,
            "requests": len(self.waiting) + len(self.running) + helping,
            "waiting": len(self.waiting) + waiting,
            "waiting_tokens": sum(self.waiting.values()) + tokens,
            "prefill_tokens_per_s": self.prefill_tokens_per_s if rate is None else rate,
            "gap_s": self.gap_s,
            "role": self.role,
            "peer": peer_of(helps),
            "queue_s": dict(self._queue_s()),
        }

    async def reports(self, going_on: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yield reports as events until the engine takes no requests: on change, at most ten in a second."""
        seq, last, quiet_s = 0, None, 0.0
        while True:
            counts = self.report()
            if counts != last or quiet_s >= QUIET_S:
                yield event({"seq": seq, **counts})
                seq, last, quiet_s = seq + 1, counts, 0.0
            if not going_on():
                return
            await asyncio.sleep(REPORT_S)
            quiet_s += REPORT_S


def peer_of(transfer: TransferStats | None) -> dict[str, Any] | None:
    """What routers, and the operator, know of an engine as a peer of others; None without hand-over."""
    if transfer is None:
        return None
    fastest = max(transfer.rates.values(), default=None)
    return {
        "endpoint": transfer.endpoint,
        "epoch": transfer.epoch,
        "fingerprint": transfer.fingerprint,
        "block_size": transfer.block_size,
        "block_bytes": transfer.block_bytes,
        "transports": list(transfer.transports),
        "host_id": transfer.host_id,
        "zone_slots": transfer.zone_slots,
        "free_slots": transfer.free_slots,
        "handover_s": transfer.handover_s,
        "link_bytes_per_s": fastest,
        "receiving": transfer.receiving,
        "helping": transfer.helping,
    }


def transfer_status(transfer: TransferStats | None) -> dict[str, Any] | None:
    """The `transfer` field of `/status`: the peer, with the transport in use, what was lost and what was refused."""
    peer = peer_of(transfer)
    if transfer is None or peer is None:
        return None
    used = max(transfer.bytes, key=lambda name: transfer.bytes[name], default=None)
    return peer | {
        "transport": used if used is not None and transfer.bytes[used] else None,
        "bytes_per_s": dict(transfer.rates),
        "unmet": transfer.unmet,
        "outcomes": dict(transfer.outcomes),
        "fallbacks": {reason: count for reason, count in transfer.fallbacks.items() if count},
        "helps": dict(transfer.helps),
        "refused_blocks": dict(transfer.refused),
    }


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
