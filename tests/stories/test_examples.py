"""The large training examples run to their end on CPU ranks, scaled down by an overlay.

Those of served models run in stories of their own; the pools of one in pairs are compared with its example here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.checkpoint.export import export_hugging_face
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.operator.admission.admission import Admission
from testing.stories.alone import train_alone
from testing.stories.example_overlays import OVERLAYS, ROOT, Overlay, layout_of
from testing.stories.manifests import Manifest, corpus
from testing.stories.served_examples import EXAMPLES, in_pairs


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


def test_pools_of_the_story_in_pairs_are_those_of_its_example() -> None:
    original = yaml.safe_load((EXAMPLES / "serve-prefill-decode" / "serve.yaml").read_text(encoding="utf-8"))
    told = in_pairs({"checkpointRef": {"name": "newer"}})
    assert shape_of(told) == shape_of(original)
    Admission.from_folder(EXAMPLES.parent / "crds").admit(told)


def shape_of(manifest: Manifest) -> Manifest:
    """What a story of a served model is about."""
    spec = manifest["spec"]
    return {
        "name": manifest["metadata"]["name"],
        "pools": [(pool["name"], pool.get("role")) for pool in spec["pools"]],
        "policy": spec["router"].get("policy"),
        "transfer": spec["engine"].get("transfer"),
    }
