"""The large training examples run to their end on CPU ranks, scaled down by an overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.checkpoint.export import export_hugging_face
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from testing.stories.alone import train_alone
from testing.stories.example_overlays import OVERLAYS, ROOT, Overlay, layout_of
from testing.stories.manifests import corpus


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda one: one.path.partition("/")[0])
def test_an_example_runs_to_its_end_when_it_is_scaled_down(tmp_path: Path, taught: Path, overlay: Overlay) -> None:
    job = overlay.apply()
    newest = CheckpointRoot(taught).committed()[0]
    (tmp_path / "storage" / "offload").mkdir(parents=True)
    export_hugging_face(CheckpointReader(newest.path, newest.digest), tmp_path / "storage" / "models")

    with train_alone(tmp_path, corpus(), job) as run:
        output, _ = run.communicate(timeout=500)

    assert run.returncode == 0, output
    assert "Completed at step" in output
    storage: dict[str, Any] = job["spec"]["checkpoint"]["storage"]
    saves = CheckpointRoot(tmp_path / "storage" / storage["claimName"] / storage["path"]).committed()
    assert saves


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda one: one.path.partition("/")[0])
def test_an_overlay_keeps_what_the_example_is_about(overlay: Overlay) -> None:
    (original,) = (one for one in yaml.safe_load_all((ROOT / overlay.path).read_text()) if one["kind"] == "TrainingJob")
    assert layout_of(overlay.apply()["spec"]) == layout_of(original["spec"])
