"""Alerts and dashboards in Prometheus' own query engine: `promtool` of the PATH, or the one in STOKER_PROMTOOL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "stoker" / "files"
CASES = Path(__file__).parent / "alerts_test.yaml"
PROMTOOL = os.environ.get("STOKER_PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool (e2e/prepare.sh installs it)")


def promtool(folder: Path, *words: str) -> None:
    run = subprocess.run([str(PROMTOOL), *words], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    rules = [
        rule["alert"]
        for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(rules)


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    shutil.copy(FILES / "alerts.yaml", tmp_path / "rules.yaml")
    shutil.copy(CASES, tmp_path / "alerts_test.yaml")
    promtool(tmp_path, "check", "rules", "rules.yaml")
    promtool(tmp_path, "test", "rules", "alerts_test.yaml")


@needs_promtool
@pytest.mark.parametrize("path", sorted((FILES / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_a_dashboard_asks_what_prometheus_can_parse(path: Path, tmp_path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    rules = [
        {"record": f"panel:{panel['id']}:{index}", "expr": target["expr"]}
        for panel in panels
        for index, target in enumerate(panel["targets"])
    ]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool(tmp_path, "check", "rules", "panels.yaml")
