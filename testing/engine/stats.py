"""A core's counters, for tests that change a few of them."""

from __future__ import annotations

from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.stats import Stats, TransferStats

STATS = Stats(
    time_s=1.0,
    steps=2,
    progressed_s=0.5,
    running=1,
    waiting=0,
    total_blocks=8,
    free_blocks=5,
    cached_blocks=2,
    owned_blocks=1,
    prompt_tokens=3,
    generation_tokens=1,
    preemptions=0,
    prefix_queries=3,
    prefix_hits=2,
    finished={"stop": 1},
    refused={"queue_full": 2},
    step_tokens=(1, 0, 1),
    step_tokens_sum=9,
    block_audits=4,
    leaked_blocks=0,
    prompt_tokens_per_s=0.0,
    generation_tokens_per_s=0.0,
    num_devices=1,
    busy_s=0.25,
)

TRANSFER = TransferStats(
    endpoint="0.0.0.0:8101", epoch="pod-1/7", fingerprint="ab" * 32,
    facts={"kv_dtype": "bfloat16"}, avoided={"10.0.0.7:8101": "damaged: 3 damaged blocks within 60 s"},
    block_size=16, block_bytes=4096, host_id="host",
    transports=("shared-memory", "tcp"), unmet="", zone_slots=8, free_slots=6, receiving=1, helping=2,
    helping_waiting=1, helping_tokens=300, prefill_tokens_per_s=5000.0, handover_s=0.01,
    outcomes={"split": 3, "local": 1}, fallbacks={"lost": 1, "late": 0}, helps={"handed": 4}, blocks={"sent": 9},
    refused={"stale": 2}, bytes={"tcp": 4096, "shared-memory": 0}, seconds={"tcp": 0.5}, rates={"tcp": 8192.0},
    load=LoadCounters().to_wire(),
)  # fmt: skip
