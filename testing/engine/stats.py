"""A core's counters, for tests that change a few of them."""

from __future__ import annotations

from stoker.engine.core.messages import Stats

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
