"""Models, tokens, ids and metrics of a front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import RequestFacts
from testing.engine.fake_core import BOS, FACTS
from testing.engine.serving import run, serving
from testing.engine.stats import STATS, TRANSFER


def test_models_say_how_long_and_with_which_defaults(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            first, second = (await s.http.get("/v1/models")).json()["data"]
            assert (first["id"], second["id"], first["max_model_len"]) == ("tiny", "other-name", 200)
            assert first["generation_defaults"]["temperature"] == 1.0
            assert (await s.post("/v1/completions", model="other-name", prompt="say:x")).json()["model"] == "other-name"

    run(scenario)


def test_tokens_and_text_can_be_turned_into_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = (await s.post("/tokenize", prompt="hé", return_token_strs=True)).json()
            assert body == {
                "count": 4,
                "max_model_len": 200,
                "tokens": [BOS, 104, 0xC3, 0xA9],
                "token_strs": ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9"],
            }
            body = (await s.post("/tokenize", messages=[{"role": "user", "content": "x"}])).json()
            assert bytes(body["tokens"]) == b"<user>x<assistant>"
            assert (await s.post("/detokenize", tokens=[BOS, *b"hi"])).json() == {"prompt": "<s>hi"}

    run(scenario)


def test_ids_go_back_to_the_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            answer = await s.http.post("/v1/completions", json={"prompt": "say:x"}, headers={"X-Request-Id": "mine"})
            assert (answer.headers["x-request-id"], answer.headers["x-stoker-pod-uid"]) == ("mine", "pod-1")
            assert (await s.post("/v1/completions", prompt=3)).headers["x-request-id"].startswith("req-")

    run(scenario)


def test_requests_that_are_refused_are_not_counted_as_started(tmp_path: Path) -> None:
    """By the front, where one of several prompts does not fit, and by the core; only the latter have arrived there."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            long = await s.post("/v1/completions", prompt=["say:a", "x" * 5000], max_tokens=5)
            full = await s.post("/v1/completions", prompt="refuse", n=2)
            fine = await s.post("/v1/completions", prompt=["say:a", "say:b"])
            assert [answer.status_code for answer in (long, full, fine)] == [400, 429, 200]
            page = (await s.http.get("/metrics")).text.splitlines()
            counts = [line.rpartition(" ")[2] for line in page if line.startswith("vllm:request_params_n_count")]
            assert (counts, s.front.metrics.load.arrived) == (["2.0"], 3)

    run(scenario)


def test_arrivals_that_a_full_queue_refused_are_counted_once() -> None:
    load = LoadCounters()
    load.arrived = 7
    report = load.report(STATS, FACTS, max_requests=8, max_batch_tokens=64)
    assert STATS.refused == {"queue_full": 2}
    assert report is not None
    assert report["arrived"] == 7


def test_a_load_has_the_prompts_that_the_core_computes_for_other_engines() -> None:
    load, helped = LoadCounters(), LoadCounters()
    load.arrived, helped.arrived = 7, 5
    helped.uncached.add(3000, 4)
    stats = replace(STATS, transfer=replace(TRANSFER, load=helped.to_wire()))
    report = load.report(stats, FACTS, max_requests=8, max_batch_tokens=64)
    assert report is not None
    assert (report["arrived"], report["uncached"]) == (12, helped.uncached.to_wire())
    assert load.arrived == 7


@pytest.mark.parametrize(("helped", "computed"), [(True, 1), (False, 1200)])
def test_a_prompt_that_another_engine_computed_is_not_counted_as_computed_here(helped: bool, computed: int) -> None:
    load = LoadCounters()
    load.finished(RequestFacts(2000, 800, 5, 0, 0.0, 0.1, 0.2, 0.3, 0.3, helped=helped))
    assert load.prompt.moment() == pytest.approx(2000, rel=0.06)
    assert load.uncached.moment() == pytest.approx(computed, rel=0.06)


def test_metrics_have_the_names_that_dashboards_know(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            await s.post("/v1/completions", prompt="say:abc", n=2)
            await s.post("/v1/completions", prompt="say:abc", stop="b")
            await s.post("/v1/completions", prompt=7)
            text = (await s.http.get("/metrics")).text
            labels = '{engine="0",model_name="tiny"}'
            for line in (
                f"vllm:num_requests_waiting{labels} 2.0",
                f"vllm:kv_cache_usage_perc{labels} 0.25",
                f"vllm:prompt_tokens_total{labels} 100.0",
                f"vllm:prefix_cache_hits_total{labels} 30.0",
                f"vllm:time_to_first_token_seconds_count{labels} 3.0",
                f"vllm:request_params_n_count{labels} 2.0",
                'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 4.0',
                'stoker:tokens_per_second_per_gpu{engine="0",kind="prompt",model_name="tiny"} 10.0',
                'stoker:tokens_per_second_per_gpu{engine="0",kind="generation",model_name="tiny"} 5.0',
                'vllm:cache_config_info{block_size="16",engine="0",model_name="tiny",num_gpu_blocks="64"} 1.0',
                'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 2.0',
                'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
            ):
                assert line in text.replace('model_name="tiny",engine="0"', 'engine="0",model_name="tiny"'), line

    run(scenario)
