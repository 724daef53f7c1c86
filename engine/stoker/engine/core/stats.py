"""Gauges and counters of an engine as the core sends them to its fronts, about once a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.engine.execution.executor import RankState

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of a step's tokens."""


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """The host tier now, and its counters since the start, in blocks."""

    total_blocks: int
    used_blocks: int
    saved: int
    loaded: int
    """Loaded into the cache and found sound."""
    evicted: int
    """Given up for newer ones."""
    damaged: int
    """Whose checksum was wrong when they came back. They were computed again."""
    failed: int
    """Whose copy failed."""
    swapped: int
    """Preempted sequences that were saved and not left to be computed again."""
    late: int
    """Loads that were not waited for, because computing was faster."""
    block_bytes: int
    write_bytes_per_s: float
    """Measured; 0 before the first."""
    read_bytes_per_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class ColdTierStats:
    """A tier below the host tier now, and its counters since the start, in blocks."""

    state: str
    """`ok`, `opening`, or what is the matter: the tier is not used until it works again."""
    total_bytes: int
    used_bytes: int
    blocks: int
    """That can be found."""
    found: int
    """That were there at the start."""
    saved: int
    loaded: int
    """Read and found sound."""
    evicted: int
    """Given up for newer ones."""
    damaged: int
    """Cut off, changed, or with a wrong checksum. They were removed."""
    foreign: int
    """Of another model, tenant, layout or content than their name tells. They were removed."""
    failed: int
    """Reads, writes and removals that failed."""
    cleaned: int
    """Folders of engines that are gone that were removed."""
    late: int
    """Fetches that were not waited for."""
    write_bytes_per_s: float
    """Of one block, as last measured; 0 before the first."""
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Experts of one rank whose weights wait in main memory, over all layers: slots now, counters since the start."""

    slots: int
    """On the device."""
    experts: int
    """In main memory, those in slots too."""
    expert_bytes: int
    """Of one expert of one layer."""
    hits: int
    """Experts that were needed and were in a slot."""
    misses: int
    """Experts that were loaded."""
    loaded_bytes: int
    waited_s: float
    """Time in which the device computed nothing because of loads; on a GPU known some loads later."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Sequences of one class now, and its counters since the start."""

    place: int
    """The number of the class."""
    waiting: int
    running: int
    preemptions: int
    aged: int
    """Requests that went before all classes because they had waited too long."""
    queue_sum_s: float
    queue_s: Mapping[int, int]
    """As `Stats.queue_s`."""


@dataclass(frozen=True, slots=True)
class SharedStoreStats:
    """The store that engines share, as a router counts with it (`stored_beginnings`)."""

    name: str
    """Equal for engines that can read each other's blocks in it."""
    block_size: int
    """Tokens of a block."""
    block_bytes: int
    block_s: float | None
    """Measured seconds to bring a block into the cache; None before the first."""
    readable: bool
    announced: Mapping[str, bool]
    """Beginnings by the name that a router gave, the newest changes: whether they are stored."""


class PeerCopy(NamedTuple):
    """One of several copies of the model behind a front, as other engines reach it."""

    endpoint: str
    epoch: str
    requests: int
    """All that it has, of fronts and of other engines."""
    waiting_tokens: int
    """Of the prompts that it computes for others and that have no first token."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What this engine exchanges with others, now and since the start."""

    endpoint: str
    """Where other engines call, as listened on."""
    epoch: str
    """New with each start."""
    fingerprint: str
    facts: Mapping[str, str]
    """What `fingerprint` is the digest of."""
    avoided: Mapping[str, str]
    """Prefill engines that are not called for a while although they can be reached, and why."""
    block_size: int
    block_bytes: int
    host_id: str
    transports: tuple[str, ...]
    unmet: str
    """Why `transfer.require` is not met; empty while it is."""
    zone_slots: int
    free_slots: int
    receiving: int
    """Open requests whose prompt another engine computes."""
    helping: int
    """Open requests whose prompt is computed here for another engine."""
    helping_waiting: int
    """Those of them without a first token, and their prompts' tokens."""
    helping_tokens: int
    prefill_tokens_per_s: float | None
    """Of prompts computed for other engines."""
    handover_s: float | None
    outcomes: Mapping[str, int]
    """Requests that named a prefill engine, by what became of them."""
    fallbacks: Mapping[str, int]
    """Those that were computed here, by the reason."""
    helps: Mapping[str, int]
    """Prompts computed for others, by how they ended."""
    blocks: Mapping[str, int]
    """Blocks received and sent."""
    refused: Mapping[str, int]
    """Refused blocks by cause."""
    bytes: Mapping[str, int]
    """Sent, by transport."""
    seconds: Mapping[str, float]
    """Time of these transfers."""
    rates: Mapping[str, float]
    """Measured bytes per second by transport."""
    load: Mapping[str, Any]
    """Prompts computed for others, as `LoadCounters.to_wire`."""
    copies: tuple[PeerCopy, ...] = ()
    """Where a front has several cores: each of them. `endpoint` and `epoch` are then those of the first."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges of this moment and counters since the start, with vLLM's metric names.

    Counters are exact: every token of a prompt is counted once, when its prompt is first computed or found in the
    cache.
    """

    time_s: float
    steps: int
    progressed_s: float
    """End of the last step, or arrival of the first request after a rest."""
    running: int
    """num_requests_running: sequences that hold blocks."""
    waiting: int
    """num_requests_waiting."""
    total_blocks: int
    free_blocks: int
    """Without content that can be found again."""
    cached_blocks: int
    """Without an owner, but kept for the prefix cache until they are needed."""
    owned_blocks: int
    """In tables of running sequences; kv_cache_usage_perc = owned_blocks / total_blocks.

    Counted by itself: free + cached + owned = total holds unless a block was lost.
    """
    prompt_tokens: int
    """prompt_tokens_total."""
    generation_tokens: int
    """generation_tokens_total."""
    preemptions: int
    """num_preemptions_total."""
    prefix_queries: int
    """prefix_cache_queries_total, in tokens."""
    prefix_hits: int
    """prefix_cache_hits_total, in tokens."""
    finished: Mapping[str, int]
    """request_success_total by finished_reason: stop, length, abort, error."""
    refused: Mapping[str, int]
    """Refused requests by kind."""
    step_tokens: tuple[int, ...]
    """Steps by number of tokens: one count per bound of `STEP_TOKENS`, and one for larger steps."""
    step_tokens_sum: int
    """iteration_tokens_total, with `step_tokens`."""
    block_audits: int
    """Number of audits of the cache."""
    leaked_blocks: int
    """Blocks that an audit found lost and gave back."""
    prompt_tokens_per_s: float
    """Over the last ten seconds, as is the next; of the whole replica."""
    generation_tokens_per_s: float
    num_devices: int
    """GPUs of the replica; 1 on a CPU."""
    busy_s: float
    """Time in which a step was being computed."""
    ranks: tuple[RankState, ...] = ()
    """Of a replica with several ranks."""
    host: HostTierStats | None = None
    """None without a host tier."""
    disk: ColdTierStats | None = None
    """None without a disk tier."""
    store: ColdTierStats | None = None
    """None without a store."""
    experts: ExpertStats | None = None
    """None where the device holds all experts. Of several ranks the leader's."""
    transfer: TransferStats | None = None
    """None where `transfer.listen` is not set."""
    queue_s: Mapping[int, int] = field(default_factory=dict)
    """Time from arrival to the first step in seconds: the buckets of `stoker.pod.histogram`. Of all requests that
    began, also those whose prompt is computed here for another engine."""
    classes: tuple[ClassStats, ...] = ()
    """Of the classes of its requests so far."""
    shared_store: SharedStoreStats | None = None
    """None without a store."""

    @property
    def unmet(self) -> str:
        """Why `transfer.require` is not met; empty while it is."""
        return self.transfer.unmet if self.transfer is not None else ""
