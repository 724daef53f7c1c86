"""The engine's metrics under vLLM's names, so that dashboards and autoscalers work unchanged.

Gauges and counters are the core's (`Stats`), read when they are scraped; histograms are observed by the front, from the
times that the core reports. Every choice of `n` is one sequence, every request counts once in `request_params_n`.

Made by `program`; changed by front and generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.engine.core.messages import ModelFacts, RequestFacts
from stoker.engine.core.stats import STEP_TOKENS, HostTierStats, Stats
from stoker.engine.http.class_metrics import class_metrics
from stoker.engine.http.cold_tier_metrics import cold_tier_metrics
from stoker.engine.http.expert_metrics import expert_metrics
from stoker.engine.http.load_counters import LoadCounters
from stoker.engine.http.transfer_metrics import transfer_metrics
from stoker.engine.sampling import SamplingParams

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
NUMBERS = (1, 2, 5, 10, 20)

LABELS = ("model_name", "engine")


class HttpMetrics:
    """Counters of HTTP answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._http = Counter("http_requests", "Answers.", ["handler", "method", "status"], registry=registry)
        self._http_time = Histogram(
            "http_request_duration_seconds", "Until the answer's end.", ["handler", "method"],
            buckets=REQUEST_S, registry=registry,
        )  # fmt: skip
        self._request_bytes = Summary("http_request_size_bytes", "Bodies of requests.", ["handler"], registry=registry)
        self._response_bytes = Summary("http_response_size_bytes", "Bodies of answers.", ["handler"], registry=registry)

    def answered(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count one HTTP answer, with its status class as vLLM's instrumentation writes it."""
        self._http.labels(handler, method, f"{status // 100}xx").inc()
        self._http_time.labels(handler, method).observe(seconds)
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)


class FrontMetrics(HttpMetrics):
    """Histograms and counters of one front's requests."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        super().__init__(registry)
        self._labels = (model_name, "0")
        self.load = LoadCounters()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)
            return made.labels(*self._labels)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S)
        self._inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a choice.", TOKEN_S)
        self._inter_token_older = histogram(
            "time_per_output_token_seconds", "The older name of inter_token_latency_seconds.", TOKEN_S
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Decode time per token after the first, by request.", TOKEN_S
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", REQUEST_S)
        self._inference = histogram(
            "request_inference_time_seconds", "From the first step to the last token.", REQUEST_S
        )
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST_S)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens by request.", TOKENS)
        self._generation_tokens = histogram("request_generation_tokens", "Output tokens by request.", TOKENS)
        self._max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", TOKENS
        )
        self._n = histogram("request_params_n", "Choices asked for.", NUMBERS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens asked for.", TOKENS)

    def started(self, params: SamplingParams, max_tokens: int) -> None:
        """Observe a request that goes to the core."""
        self.load.arrived += 1
        self._n.observe(params.n)
        self._max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        self.load.first_token(seconds)
        self._first_token.observe(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        """Observe `count` tokens that arrived together, `seconds` after those before them."""
        self.load.more_tokens(seconds, count)
        for _ in range(count):
            self._inter_token.observe(seconds / count)
            self._inter_token_older.observe(seconds / count)

    def finished(self, facts: RequestFacts | None) -> None:
        """Observe a choice that ended; `facts` are None if the core sent none."""
        if facts is None:
            return
        self.load.finished(facts)
        end = facts.finished_s
        self._e2e.observe(end - facts.arrival_s)
        self._prompt_tokens.observe(facts.prompt_tokens)
        self._generation_tokens.observe(facts.output_tokens)
        if facts.scheduled_s is None:
            return
        self._queue.observe(facts.scheduled_s - facts.arrival_s)
        self._inference.observe((facts.last_token_s or end) - facts.scheduled_s)
        if facts.first_token_s is None or facts.last_token_s is None:
            return
        self._prefill.observe(facts.first_token_s - facts.scheduled_s)
        self._decode.observe(facts.last_token_s - facts.first_token_s)
        if facts.output_tokens > 1:
            self._per_token.observe((facts.last_token_s - facts.first_token_s) / (facts.output_tokens - 1))

    def finished_request(self, output_tokens: int) -> None:
        """Every choice of a request has ended; the longest has `output_tokens`."""
        self._max_generation_tokens.observe(output_tokens)


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
