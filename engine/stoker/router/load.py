"""The load that an engine reports of itself, and the stream on which it comes.

`GET /load` of an engine is a stream of events, each a whole report with a growing `seq`: on change, at most ten in a
second, at least two. `epoch` changes when the engine restarts. Backends keep the newest one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker.pod.beginnings import MOST_ANNOUNCED
from stoker.pod.step_tokens import prompt_tokens
from stoker.router.connection import Broken, Connection, Outgoing, Unreachable
from stoker.router.snapshot import Role

LOAD_PATH = b"/load"
YOUNG_S = 1.0
"""An older report is not used: the router counts its own requests alone."""
SILENT_S = 5.0
"""An engine that has not reported for so long gets requests last."""
MAX_REPORT_BYTES = 1 << 18
MOST_WAITING = 4096
"""Waiting requests of an engine that are looked at."""
ROUGHLY = 256
"""Prompt tokens by which a router's estimate may be too low, beside half of the prompt: a template's, for example."""
STORE_BYTES_PER_S = 0.2e9
"""Rate of a store while none has been measured."""


ENDPOINT = r"^\S{1,250}:\d{1,5}$"
MOST = 2**53
"""No engine counts so far. A number beyond the range of floats would fail in every choice."""
Count = Annotated[int, Field(ge=0, le=MOST)]
Measure = Annotated[float, Field(ge=1e-9, le=1e18)]
"""A rate per second, or a gap in seconds. With one near zero a predicted time would be infinite."""
Seconds = Annotated[float, Field(ge=0, le=1e18)]
"""A time, which may be zero."""
Bucket = Annotated[int, Field(ge=-1000, le=1000)]
"""Of a `Histogram`: from 1e-41 to 1e41."""


class PeerCopy(BaseModel):
    """One data rank of an engine that has several: prompts are sent to each by itself."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    endpoint: str = Field(pattern=ENDPOINT)


class Peer(BaseModel):
    """What an engine can do in a pair: where other engines reach it, what its blocks are, how they travel."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    endpoint: str = Field(pattern=ENDPOINT)
    """HOST:PORT at which other engines reach it. A host of 0.0.0.0 or [::] stands for the engine's own address."""
    epoch: str = Field(min_length=1)
    fingerprint: str = Field(min_length=1)
    """Of model, weights, revision, cache type and layout. Engines of unlike fingerprints cannot exchange blocks."""
    block_size: int = Field(ge=1, le=MOST)
    """Tokens of a block."""
    transports: tuple[str, ...] = ()
    """Names of the ways on which its blocks can travel."""
    host_id: str = ""
    """Equal for engines that share a host's memory."""
    block_bytes: int | None = Field(default=None, ge=1, le=MOST)
    """Bytes of a block over all ranks."""
    link_bytes_per_s: Measure | None = None
    """Measured rate at which blocks came in or went out; None before the first."""
    handover_s: Seconds | None = None
    """Measured time from the end of a prefill elsewhere to the takeover; None before the first."""
    copies: tuple[PeerCopy, ...] = ()
    """Its data ranks, where it has several; `endpoint` is that of the first."""

    def of_rank(self, rank: int) -> Peer:
        """A data rank as a peer of its own."""
        return self.model_copy(update={"endpoint": self.copies[rank].endpoint, "copies": ()})


class SharedStore(BaseModel):
    """The store that an engine shares with others, and what it announces of it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=64)
    """Equal for engines that can read each other's blocks in it."""
    block_size: int = Field(ge=1, le=MOST)
    """Tokens of a block."""
    block_bytes: int = Field(ge=1, le=MOST)
    block_s: Seconds | None = None
    """Measured seconds to bring a block into the cache; None before the first."""
    readable: bool
    announced: dict[str, bool] = Field(default={}, max_length=4 * MOST_ANNOUNCED)
    """Newest changes: names of beginnings, and whether they are stored."""

    def load_s(self, tokens: int) -> float:
        """Predict the time to bring so many tokens into the cache."""
        block_s = self.block_bytes / STORE_BYTES_PER_S if self.block_s is None else self.block_s
        return -(-tokens // self.block_size) * block_s


class RankLoad(BaseModel):
    """The counts and rates of one data rank, or of an engine."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    requests: Count
    """Requests that have not ended."""
    waiting: Count
    """Those without a first token."""
    waiting_tokens: Count
    """Their prompt tokens."""
    prompts: tuple[Count, ...] = ()
    """Those of the first of them, in the order of arrival."""
    prefill_tokens_per_s: Measure | None = None
    """Prompt tokens per second of recent prompts, each by itself; None before the first."""
    busy_tokens_per_s: Measure | None = None
    """Prompt tokens per second of all prompts that are in work together; None before the first."""
    gap_s: Measure | None = None
    """Recent gap between two tokens of a sequence."""


class Load(RankLoad):
    """One report. Fields of newer engines are ignored."""

    epoch: str = Field(min_length=1)
    """The engine's run."""
    seq: Count
    step_tokens: Count = 0
    """Tokens of a full step; 0: not known."""
    mixed_tokens: int | None = Field(default=None, ge=1, le=MOST)
    """Prompt tokens of a step beside sequences that decode while few wait; None: as many as fit."""
    role: Role | None = None
    """The role that the engine prefers now; None: the one of its pool."""
    peer: Peer | None = None
    """None: it exchanges no blocks with other engines."""
    store: SharedStore | None = None
    """None: it shares none."""
    queue_s: dict[Bucket, Count] = {}
    """Time in seconds from arrival to the first step of all its requests so far: buckets of a `Histogram`."""
    splits: Count = 0
    """Requests so far whose prompt another engine was to compute."""
    failed_splits: Count = 0
    """Those of them that it computed itself, because the other engine or the link failed."""
    ranks: tuple[RankLoad, ...] = ()
    """Its data ranks, where it has several; the other fields are of all together."""

    @property
    def of_ranks(self) -> tuple[Load, ...]:
        """A report of each data rank by itself; empty where there is one."""
        return tuple(map(self._of_rank, range(len(self.ranks)))) if len(self.ranks) > 1 else ()

    def _of_rank(self, number: int) -> Load:
        """A rank that has measured no rate counts with the engine's mean."""
        rank, peer = self.ranks[number], self.peer
        if peer is not None and len(peer.copies) == len(self.ranks):
            peer = peer.of_rank(number)
        own = {name: value for name in RankLoad.model_fields if (value := getattr(rank, name)) is not None}
        return Load.model_construct(
            **{name: getattr(self, name) for name in Load.model_fields} | {"busy_tokens_per_s": None} | own
            | {"peer": peer, "queue_s": {}, "splits": 0, "failed_splits": 0, "ranks": ()}
        )  # fmt: skip

    @property
    def measured_rate(self) -> float | None:
        """Prompt tokens per second of all prompts together, or of each by itself where the engine tells only that."""
        return self.busy_tokens_per_s or self.prefill_tokens_per_s

    @cached_property
    def waiting_prompts(self) -> Sequence[int]:
        """Prompt tokens of the requests without a first token, in the order of arrival; those that are not listed
        count as equal."""
        more = min(self.waiting, MOST_WAITING) - len(self.prompts)
        if more <= 0:
            return self.prompts
        each = max(self.waiting_tokens - sum(self.prompts), 0) // (self.waiting - len(self.prompts))
        return (*self.prompts, *(each,) * more)

    def less_one(self, tokens: int) -> Load:
        """The report without the first request of at most about so many tokens, some of which may be computed: it has
        its first token, and the next report comes later. A report that lists longer ones alone was made before it."""
        first = next((listed for listed in self.prompts if listed <= 2 * tokens + ROUGHLY), None)
        if not self.waiting or (self.prompts and first is None):
            return self
        prompts = list(self.prompts)
        if first is not None:
            prompts.remove(first)
        gone = self.waiting_tokens // self.waiting if first is None else first
        left = {
            "waiting": self.waiting - 1, "waiting_tokens": max(self.waiting_tokens - gone, 0),
            "prompts": tuple(prompts),
        }  # fmt: skip
        return Load.model_construct(**{name: getattr(self, name) for name in Load.model_fields} | left)

    def step_of(self, backlog: int) -> int:
        """Prompt tokens of its next steps, by the scheduler's rule, while so many wait."""
        if self.mixed_tokens is None or not self.decoding:
            return self.step_tokens
        return int(prompt_tokens(self.mixed_tokens, backlog, self.step_tokens))

    @property
    def decoding(self) -> int:
        """Requests that have their first token."""
        return self.requests - self.waiting if self.requests > self.waiting else 0


class NotReported(Exception):
    """The engine has no load stream."""


async def reports(connection: Connection, silence_s: float) -> AsyncIterator[Load]:
    """Yield the reports of an engine as they come.

    Raises:
        NotReported: the engine has no such stream.
        BackendError: the stream ended or broke.
    """
    head = await connection.exchange(Outgoing("GET", LOAD_PATH, ()), silence_s)
    if head.status != 200 or not head.header(b"content-type").startswith(b"text/event-stream"):
        raise NotReported(f"GET /load answers {head.status}")
    tail = b""
    async for chunk in connection.chunks(silence_s):
        *events, tail = (tail + chunk).split(b"\n\n")
        if len(tail) > MAX_REPORT_BYTES:
            raise Broken(f"a report of load has more than {MAX_REPORT_BYTES} bytes")
        for event in events:
            yield parse_report(event)
    raise Unreachable("the stream of load reports ended")


def parse_report(event: bytes) -> Load:
    """Parse one event.

    Raises:
        Broken: it is no report; the message names the field.
    """
    try:
        content: Any = json.loads(event.removeprefix(b"data: "))
        return Load.model_validate(content)
    except (ValueError, ValidationError, RecursionError) as error:
        raise Broken(f"not a report of load: {' '.join(str(error).split())[:200]}") from error
