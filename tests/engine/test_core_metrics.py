"""Metrics of the core and of the processes: steps by size, the cache's counts, the longest choice, memory."""

from __future__ import annotations

from pathlib import Path

from testing.engine.serving import run, serving, until
from tests.engine.test_server_program import program

LABELS = 'engine="0",model_name="tiny"'


DASHBOARD = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
)
"""Series that the panels of vLLM's dashboards ask for, of its newest version and of older ones."""


def test_every_panel_of_the_dashboard_finds_its_series(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            await s.post("/v1/completions", prompt="say:abc")
            text = (await s.http.get("/metrics")).text
            series = {line.partition("{")[0] for line in text.splitlines() if 'model_name="tiny"' in line}
            assert set(DASHBOARD) - series == set()

    run(scenario)


def sorted_labels(text: str) -> str:
    return text.replace('model_name="tiny",engine="0"', LABELS)


def test_steps_by_size_the_longest_choice_and_the_cache_s_audit_are_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            await s.post("/v1/completions", prompt="say:abc", n=2)
            await s.post("/v1/completions", prompt="say:abcdefgh")
            text = sorted_labels((await s.http.get("/metrics")).text)
            for line in (
                'vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 2.0',
                'vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 4.0',
                'vllm:iteration_tokens_total_bucket{engine="0",le="64.0",model_name="tiny"} 4.0',
                'vllm:iteration_tokens_total_bucket{engine="0",le="128.0",model_name="tiny"} 5.0',
                'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="tiny"} 5.0',
                f"vllm:iteration_tokens_total_count{{{LABELS}}} 5.0",
                f"vllm:iteration_tokens_total_sum{{{LABELS}}} 150.0",
                f"vllm:request_max_num_generation_tokens_count{{{LABELS}}} 2.0",
                f"vllm:request_max_num_generation_tokens_sum{{{LABELS}}} 14.0",  # 1abc, abcdefgh and their ends
                f"stoker:kv_blocks_free{{{LABELS}}} 40.0",
                f"stoker:kv_blocks_cached{{{LABELS}}} 8.0",
                f"stoker:kv_blocks_owned{{{LABELS}}} 16.0",
                f"stoker:kv_blocks_total{{{LABELS}}} 64.0",
                f"stoker:kv_blocks_unaccounted{{{LABELS}}} 0.0",
                f"stoker:kv_block_audits_total{{{LABELS}}} 3.0",
                f"stoker:kv_blocks_leaked_total{{{LABELS}}} 0.0",
            ):
                assert line in text, line

    run(scenario)


def test_memory_and_time_of_front_and_core_are_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path) as p:
            await until(lambda: p.engine.front.ready)
            text = (await p.http.get("/metrics")).text
            figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            for prefix in ("process", "stoker_core_process"):
                assert float(figures[f"{prefix}_resident_memory_bytes"]) > 2**20
                assert float(figures[f"{prefix}_open_fds"]) > 3
                assert float(figures[f"{prefix}_cpu_seconds_total"]) > 0

    run(scenario)
