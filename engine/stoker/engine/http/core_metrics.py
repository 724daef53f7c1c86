"""The core's gauges and counters (`Stats`) under vLLM's names, read when they are scraped.

Registered by `program`, for the whole engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.engine.core.messages import ModelFacts
from stoker.engine.core.stats import STEP_TOKENS, HostTierStats, Stats
from stoker.engine.http.class_metrics import class_metrics
from stoker.engine.http.cold_tier_metrics import cold_tier_metrics
from stoker.engine.http.expert_metrics import expert_metrics
from stoker.engine.http.transfer_metrics import transfer_metrics

LABELS = ("model_name", "engine")


def register_core(
    registry: CollectorRegistry,
    model_name: str,
    stats: Callable[[], Stats | None],
    facts: Callable[[], ModelFacts | None],
) -> None:
    """Add the core's metrics, which are those of the whole engine, however many fronts it has."""
    registry.register(_CoreCollector((model_name, "0"), stats, facts))


class _CoreCollector(Collector):
    """Reads the core's newest numbers at each scrape."""

    def __init__(
        self, labels: tuple[str, str], stats: Callable[[], Stats | None], facts: Callable[[], ModelFacts | None]
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        stats, facts = self._stats(), self._facts()
        if facts is not None:
            yield _info(self._labels, facts)
        if stats is None:
            return
        for name, text, value in _gauges(stats):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in _counters(stats):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield _step_tokens(self._labels, stats)
        if stats.host is not None:
            yield from _host_tier(self._labels, stats.host)
        yield from cold_tier_metrics(self._labels, stats)
        if stats.experts is not None:
            yield from expert_metrics(self._labels, stats.experts)
        if stats.transfer is not None:
            yield from transfer_metrics(self._labels, stats.transfer)
        yield _token_rates(self._labels, stats)
        yield from _ranks(self._labels, stats)
        yield from class_metrics(self._labels, stats)
        yield _by("vllm:request_success", "Ended requests.", "finished_reason", self._labels, stats.finished)
        yield _by("stoker:request_refused", "Requests not taken.", "kind", self._labels, stats.refused)


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    usage = stats.owned_blocks / stats.total_blocks if stats.total_blocks else 0.0
    return [
        ("vllm:num_requests_running", "Sequences that hold blocks.", stats.running),
        ("vllm:num_requests_waiting", "Requests in the queue.", stats.waiting),
        ("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", usage),
        ("vllm:gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", usage),
        ("stoker:kv_blocks_free", "Blocks without content worth keeping.", stats.free_blocks),
        ("stoker:kv_blocks_cached", "Free blocks kept for the prefix cache.", stats.cached_blocks),
        ("stoker:kv_blocks_owned", "Blocks of running sequences.", stats.owned_blocks),
        ("stoker:kv_blocks_total", "All blocks.", stats.total_blocks),
        (
            "stoker:kv_blocks_unaccounted",
            "All blocks less free, cached and owned ones; 0 unless blocks were lost.",
            stats.total_blocks - stats.free_blocks - stats.cached_blocks - stats.owned_blocks,
        ),
    ]


def _counters(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("vllm:prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
        ("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", stats.prefix_hits),
        ("vllm:generation_tokens", "Output tokens.", stats.generation_tokens),
        ("vllm:num_preemptions", "Preempted sequences.", stats.preemptions),
        ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries),
        ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
        ("stoker:steps", "Steps.", stats.steps),
        ("stoker:kv_block_audits", "Times that all blocks were counted.", stats.block_audits),
        ("stoker:kv_blocks_leaked", "Blocks that an audit found lost and gave back.", stats.leaked_blocks),
    ]


def _host_tier(labels: tuple[str, str], host: HostTierStats) -> Iterator[Metric]:
    """Blocks of the host tier, what became of them, and the measured speed of its link."""
    for name, text, value in (
        ("stoker:host_blocks_capacity", "Blocks that the host tier holds at most.", host.total_blocks),
        ("stoker:host_blocks_used", "Blocks in the host tier.", host.used_blocks),
        ("stoker:host_block_bytes", "Bytes of one block.", host.block_bytes),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    events = {
        "saved": host.saved, "loaded": host.loaded, "evicted": host.evicted, "damaged": host.damaged,
        "failed": host.failed,
    }  # fmt: skip
    yield _by("stoker:host_blocks", "Blocks saved, loaded and lost.", "event", labels, events)
    sequences = {"swapped": host.swapped, "late": host.late}
    yield _by(
        "stoker:host_sequences", "Sequences saved at preemption; loads not waited for.", "event", labels, sequences
    )
    speed = GaugeMetricFamily(
        "stoker:host_link_bytes_per_second", "Measured speed; 0 before the first transfer.",
        labels=(*LABELS, "transport", "direction"),
    )  # fmt: skip
    speed.add_metric((*labels, host.transport, "write"), host.write_bytes_per_s)
    speed.add_metric((*labels, host.transport, "read"), host.read_bytes_per_s)
    yield speed


def _step_tokens(labels: tuple[str, str], stats: Stats) -> HistogramMetricFamily:
    """Steps by their number of tokens, with cumulative buckets."""
    bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.step_tokens), strict=True))
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
    family.add_metric(labels, buckets, stats.step_tokens_sum)
    return family


def _token_rates(labels: tuple[str, str], stats: Stats) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(
        "stoker:tokens_per_second_per_gpu", "Tokens of the last 10 s by GPU (by engine on a CPU).",
        labels=(*LABELS, "kind"),
    )  # fmt: skip
    gauge.add_metric((*labels, "prompt"), stats.prompt_tokens_per_s / stats.num_devices)
    gauge.add_metric((*labels, "generation"), stats.generation_tokens_per_s / stats.num_devices)
    return gauge


def _ranks(labels: tuple[str, str], stats: Stats) -> Iterator[Metric]:
    """Steps and silence of each rank; nothing for a replica of one."""
    if not stats.ranks:
        return
    steps = CounterMetricFamily("stoker:rank_steps", "Steps that a rank has computed.", labels=(*LABELS, "rank"))
    silence = GaugeMetricFamily(
        "stoker:rank_silence_seconds", "Since a rank's last sign of life.", labels=(*LABELS, "rank")
    )
    for one in stats.ranks:
        steps.add_metric((*labels, str(one.rank)), one.steps)
        silence.add_metric((*labels, str(one.rank)), one.silence_s)
    yield from (steps, silence)


def _by(name: str, text: str, label: str, labels: tuple[str, str], values: Mapping[str, int]) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
    for key, value in values.items():
        counter.add_metric((*labels, key), value)
    return counter


def _info(labels: tuple[str, str], facts: ModelFacts) -> GaugeMetricFamily:
    info = GaugeMetricFamily("vllm:cache_config_info", "Always 1.", labels=(*LABELS, "block_size", "num_gpu_blocks"))
    info.add_metric((*labels, str(facts.block_size), str(facts.num_blocks)), 1)
    return info
