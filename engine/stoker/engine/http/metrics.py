"""The front's metrics under vLLM's names, so that dashboards and autoscalers work unchanged.

Histograms are observed from the times that the core reports. Every choice of `n` is one sequence, every request counts
once in `request_params_n`.

Made by `program`; changed by front and generation.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import RequestFacts
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

    def arrived(self) -> None:
        """Count a request that goes to the core, which may refuse it."""
        self.load.arrived += 1

    def started(self, params: SamplingParams) -> None:
        """Observe a request that the core has taken."""
        self._n.observe(params.n)
        self._max_tokens.observe(params.max_tokens or 0)

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
