"""The metrics of hand-over between engines, read from the core's report. Called by `core_metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.engine.core.stats import TransferStats

LABELS = ("model_name", "engine")


def transfer_metrics(labels: tuple[str, str], transfer: TransferStats) -> Iterator[Metric]:
    """Requests by outcome, bytes and seconds by transport, refused blocks by cause."""
    yield _counter(
        "stoker_split_requests", "Requests that named a prefill engine.", "outcome", labels, transfer.outcomes
    )
    yield _counter(
        "stoker_split_fallbacks", "Requests that named one and were computed here.", "reason", labels,
        transfer.fallbacks,
    )  # fmt: skip
    yield _counter("stoker_prefill_helps", "Prompts computed for others.", "outcome", labels, transfer.helps)
    yield _counter("stoker_transfer_blocks", "Blocks of others and for others.", "direction", labels, transfer.blocks)
    yield _counter("stoker_transfer_bytes", "Bytes sent to others.", "transport", labels, transfer.bytes)
    yield _counter("stoker_transfer_seconds", "Time of these transfers.", "transport", labels, transfer.seconds)
    yield _counter("stoker_transfer_refused_blocks", "Blocks that were not used.", "cause", labels, transfer.refused)
    rates = GaugeMetricFamily(
        "stoker_transfer_gigabytes_per_second", "Measured, by transport.", labels=(*LABELS, "transport")
    )
    for name, rate in transfer.rates.items():
        rates.add_metric((*labels, name), rate / 1e9)
    yield rates
    for name, text, value in (
        ("stoker_transfer_receiving", "Open requests whose prompt another engine computes.", transfer.receiving),
        ("stoker_transfer_helping", "Open requests that are computed for another engine.", transfer.helping),
        ("stoker_landing_zone_slots", "Slots that other engines write to.", transfer.zone_slots),
        ("stoker_landing_zone_free_slots", "Those that can be granted.", transfer.free_slots),
        ("stoker_handover_seconds", "Mean gap of the last takeovers; 0 before the first.", transfer.handover_s or 0.0),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge


def _counter(
    name: str, text: str, label: str, labels: tuple[str, str], values: Mapping[str, float]
) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
    for key, value in values.items():
        counter.add_metric((*labels, key), value)
    return counter
