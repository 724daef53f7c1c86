"""The metrics of experts in main memory, read from the core's report. Called by `core_metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.engine.core.stats import ExpertStats

LABELS = ("model_name", "engine")


def expert_metrics(labels: tuple[str, str], experts: ExpertStats) -> Iterator[Metric]:
    """Slots, and what loads have cost."""
    for name, text, value in (
        ("stoker:expert_slots", "Slots of experts on the device, over all layers.", experts.slots),
        ("stoker:experts_in_host_memory", "Experts in main memory, over all layers.", experts.experts),
        ("stoker:expert_bytes", "Bytes of one expert of one layer.", experts.expert_bytes),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, total in (
        ("stoker:expert_load_bytes", "Bytes of experts loaded.", float(experts.loaded_bytes)),
        ("stoker:expert_load_wait_seconds", "Time in which the device waited for experts.", experts.waited_s),
    ):
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(labels, total)
        yield counter
    needed = CounterMetricFamily(
        "stoker:experts_needed", "Experts that a layer needed, by where they were.", labels=(*LABELS, "where")
    )
    needed.add_metric((*labels, "slot"), experts.hits)
    needed.add_metric((*labels, "host"), experts.misses)
    yield needed
