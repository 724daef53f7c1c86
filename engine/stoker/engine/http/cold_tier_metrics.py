"""The metrics of tiers below the host tier, read from the core's report. Called by `core_metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.engine.core.stats import ColdTierStats, Stats

LABELS = ("model_name", "engine", "tier")
EVENTS = ("found", "saved", "loaded", "evicted", "damaged", "foreign", "failed", "late")


def cold_tier_metrics(labels: tuple[str, str], stats: Stats) -> Iterator[Metric]:
    """Room, events and speed by tier; nothing where there is none."""
    tiers = {name: tier for name, tier in (("disk", stats.disk), ("store", stats.store)) if tier is not None}
    if not tiers:
        return
    for name, text, field in (
        ("stoker:cold_tier_capacity_bytes", "Most bytes of its files.", "total_bytes"),
        ("stoker:cold_tier_used_bytes", "Bytes of its files.", "used_bytes"),
        ("stoker:cold_tier_blocks_held", "Blocks that can be found.", "blocks"),
        ("stoker:cold_tier_write_bytes_per_second", "Of one block, as last measured.", "write_bytes_per_s"),
        ("stoker:cold_tier_read_bytes_per_second", "Of one block, as last measured.", "read_bytes_per_s"),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        for tier, seen in tiers.items():
            gauge.add_metric((*labels, tier), getattr(seen, field))
        yield gauge
    yield _working(labels, tiers)
    events = CounterMetricFamily("stoker:cold_tier_blocks", "Blocks by what became of them.", labels=(*LABELS, "event"))
    for tier, seen in tiers.items():
        for event in EVENTS:
            events.add_metric((*labels, tier, event), getattr(seen, event))
    yield events


def _working(labels: tuple[str, str], tiers: dict[str, ColdTierStats]) -> Metric:
    gauge = GaugeMetricFamily("stoker:cold_tier_up", "1 while the tier works, 0 while it is left out.", labels=LABELS)
    for tier, seen in tiers.items():
        gauge.add_metric((*labels, tier), float(seen.state == "ok"))
    return gauge
