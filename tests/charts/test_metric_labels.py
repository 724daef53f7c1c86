"""Dashboards and alerts ask for samples and labels that the programs serve, in units that fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.exposed_metrics import exposed

FILES = Path(__file__).parents[2] / "charts" / "stoker" / "files"
METRIC = re.compile(r"\b(?:stoker_[a-z_]+|stoker:[a-z_]+|vllm:[a-z_0-9]+)")
SELECTOR = re.compile(rf"({METRIC.pattern})\{{([^}}]*)\}}")
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
SCRAPED = frozenset({"namespace", "pod", "exported_namespace"})
"""Labels that Prometheus adds: of the scraped pod, and the program's own `namespace` where both have one."""


@pytest.fixture(scope="module")
def served() -> dict[str, frozenset[str]]:
    return exposed()


def queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, legend) of every panel and alert; an alert's legend is its summary."""
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"]
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def wrong(expression: str, legend: str, served: dict[str, frozenset[str]]) -> list[str]:
    """What of a query no program serves."""
    named = set(METRIC.findall(expression))
    if unknown := sorted(named - set(served)):
        return [f"no sample {name}" for name in unknown]
    asked = {
        (metric, part.split("=")[0].strip(" !~"))
        for metric, matchers in SELECTOR.findall(expression)
        for part in filter(None, matchers.split(","))
    }
    own = frozenset(SCRAPED.union(*(served[name] for name in named)))
    kept = {label.strip() for labels in BY.findall(expression) for label in labels.split(",")}
    summed = re.match(r"\(?(sum|max|histogram_quantile)\b", expression)
    shown = set(re.findall(r"\{\{ ?\$?([a-z_]+) ?\}\}", legend))
    return [
        *(f"{metric} has no {label}" for metric, label in sorted(asked) if label not in served[metric] | SCRAPED),
        *(f"by {label}, which none has" for label in sorted(kept - own)),
        *(f"shows {label}, which is not there" for label in sorted(shown - (kept if summed else own))),
    ]


def test_every_query_asks_for_what_is_served(served: dict[str, frozenset[str]]) -> None:
    found = {where: faults for where, expression, legend in queries() if (faults := wrong(expression, legend, served))}
    assert found == {}


def test_a_wrong_query_is_found(served: dict[str, frozenset[str]]) -> None:
    for expression, legend, fault in (
        ("stoker_trainer_loss_total", "", "no sample stoker_trainer_loss_total"),
        ("sum(rate(stoker_router_requests[5m]))", "", "no sample stoker_router_requests"),
        ('stoker_router_requests_total{status="500"}', "", "stoker_router_requests_total has no status"),
        ("sum by (reason) (stoker_router_requests_total)", "", "by reason, which none has"),
        ("sum(stoker_router_requests_total)", "{{code}}", "shows code, which is not there"),
        ("stoker_trainer_loss", "{{rank}}", "shows rank, which is not there"),
    ):
        assert wrong(expression, legend, served) == [fault]


def units(expression: str) -> set[str]:
    """The units that fit a query."""
    if re.search(r"\) / |\} / |_ratio|_usage_perc|rate\(\w+_seconds\{", expression):
        return {"percentunit"}
    if re.search(r"_seconds_bucket|_seconds(\{|\)|$)", expression):
        return {"s"}
    if "rate(" in expression and "_request" in expression:
        return {"reqps", "short"}
    return {"short", "sci", "reqps"}


def test_panels_have_the_unit_of_what_they_show() -> None:
    seen: list[Any] = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            unit = panel["fieldConfig"]["defaults"]["unit"]
            seen += [
                (panel["title"], unit, target["expr"])
                for target in panel["targets"]
                if unit not in units(target["expr"])
            ]
    assert seen == []
