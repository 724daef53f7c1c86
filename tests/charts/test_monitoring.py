"""Dashboards and alerts of the chart: every metric that they name is one that a program exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeCounts

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "stoker" / "files"
EMITTERS = (
    "operator/stoker/operator/loop/metrics.py",
    "operator/stoker/gateway/http/requests.py",
    "trainer/stoker/trainer/agent/metrics.py",
    "engine/stoker/engine/http/metrics.py",
    "engine/stoker/engine/http/core_metrics.py",
    "engine/stoker/engine/http/class_metrics.py",
    "engine/stoker/engine/http/cold_tier_metrics.py",
    "engine/stoker/engine/http/expert_metrics.py",
    "engine/stoker/engine/http/transfer_metrics.py",
    "engine/stoker/engine/fronts/front_metrics.py",
    "engine/stoker/router/metrics.py",
    "engine/stoker/router/class_metrics.py",
    "model/stoker/pod/gpu_metrics.py",
    "engine/stoker/router/revision_counts.py",
)
MAKES_METRICS = re.compile(r"(?:MetricFamily|Counter|Gauge|Histogram|Summary)\(\s*f?\"")
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ON_PAGE = set(re.findall(r"^\| `([a-z_:0-9]+)` \|", PAGE, re.MULTILINE))
PREFIXES = ("", "vllm:", "stoker_operator_", "stoker_operator_pool_", "stoker_router_revision")
"""Prefixes that a program puts before the names in its tables."""
METRIC = re.compile(r"\b(?:stoker_[a-z_]+|stoker:[a-z_]+|vllm:[a-z_0-9]+)")
FULL = re.compile(
    r"(?:stoker_(?:trainer|router|gateway|operator|gpu|transfer|split|prefill|landing|handover)_[a-z_]+|stoker:[a-z_]+|vllm:[a-z_0-9]+)"
)
LITERALS = {
    name.removeprefix("{name}")
    for path in EMITTERS
    for name in re.findall(r'"([a-z_:0-9{}]+)"', (ROOT / path).read_text(encoding="utf-8"))
}


def dashboards() -> list[Path]:
    return sorted((FILES / "dashboards").glob("*.json"))


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query")


def is_exposed(metric: str) -> bool:
    """Whether a program has this name in its source, without the parts that are added to it."""
    bases = [metric.removesuffix(suffix) for suffix in SUFFIXES if metric.endswith(suffix)]
    return any(
        base.removeprefix(prefix) in LITERALS for base in bases for prefix in PREFIXES if base.startswith(prefix)
    )


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert not is_exposed("stoker_trainer_happiness")
    assert not is_exposed("vllm:happiness_bucket")
    assert is_exposed("vllm:time_to_first_token_seconds_bucket")


@pytest.mark.parametrize("path", dashboards(), ids=lambda path: path.stem)
def test_a_dashboard_shows_metrics_that_exist(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    named = {metric for expression in expressions(dashboard) for metric in METRIC.findall(expression)}
    assert len(named) > 5
    assert [metric for metric in sorted(named) if not is_exposed(metric)] == []
    assert all(expression.count("(") == expression.count(")") for expression in expressions(dashboard))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert dashboard["uid"] == f"stoker-{path.stem}"


def test_alerts_watch_metrics_that_exist_and_say_what_is_wrong() -> None:
    rules = [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        named = METRIC.findall(rule["expr"])
        assert named
        assert [metric for metric in named if not is_exposed(metric)] == []
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_metric_is_on_the_page_and_nothing_else() -> None:
    written = {literal for literal in LITERALS if FULL.fullmatch(literal)} - {*PREFIXES}
    histograms = re.findall(r'histogram\(\s*"([a-z_0-9]+)"', (ROOT / EMITTERS[3]).read_text(encoding="utf-8"))
    assert len(histograms) > 10
    revisions = re.findall(r'"\{name\}(_[a-z_0-9]+)"', (ROOT / EMITTERS[-1]).read_text(encoding="utf-8"))
    at_work = {metric.name for metric in _operator_metrics()} | {f"stoker_router_revision{name}" for name in revisions}
    assert sorted((written | {f"vllm:{name}" for name in histograms} | at_work) - ON_PAGE) == []
    assert [name for name in sorted(ON_PAGE) if not is_exposed(name)] == []


def test_every_alert_is_on_the_page() -> None:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    assert set(re.findall(r"^\| (Stoker\w+) \|", PAGE, re.MULTILINE)) == {
        rule["alert"] for group in groups for rule in group["rules"]
    }


def test_no_file_exports_metrics_that_this_test_does_not_read() -> None:
    roots = ("model/stoker", "operator/stoker", "trainer/stoker", "engine/stoker")
    found = {
        str(path.relative_to(ROOT))
        for root in roots
        for path in (ROOT / root).rglob("*.py")
        if "prometheus_client" in (text := path.read_text(encoding="utf-8")) and MAKES_METRICS.search(text)
    }
    assert found - set(EMITTERS) == set()


def _operator_metrics() -> Iterator[Metric]:
    """The metrics of a leader without objects."""
    metrics = OperatorMetrics()
    state = OperatorState(
        queue=0, delayed=0, polls=0, objects={}, silence_s={}, nodes=NodeCounts(silent=0, in_outage=0, outages=0)
    )
    metrics.watch(lambda: state)
    yield from metrics.registry.collect()
