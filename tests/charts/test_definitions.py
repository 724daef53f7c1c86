"""The chart's copy of the definitions equals the generator's output."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
COPIES = ROOT / "charts" / "stoker-crds" / "files"


def test_the_chart_and_the_generator_have_the_same_definitions() -> None:
    generated = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}
    copied = {path.name: path.read_text() for path in COPIES.glob("stoker.dev_*.yaml")}
    assert copied == generated, "copy them: cp crds/*.yaml charts/stoker-crds/files/"


def test_kustomize_lists_every_definition() -> None:
    listed = yaml.safe_load((COPIES / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in COPIES.glob("stoker.dev_*.yaml"))
