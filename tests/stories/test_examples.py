"""The large training examples run to their end on CPU ranks, scaled down by an overlay.

Those of served models run in the stories of what they are about; here their overlays are compared with them.
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
from testing.stories.served_examples import EXAMPLES, autoscaled, canary, in_pairs


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


SERVED = {
    "serve-autoscaled": autoscaled("newer", least=1),
    "serve-canary": canary("newer", "60000"),
    "serve-prefill-decode": in_pairs({"checkpointRef": {"name": "newer"}}),
}


@pytest.mark.parametrize("name", sorted(SERVED))
def test_the_overlay_of_a_served_model_keeps_what_the_example_is_about(name: str) -> None:
    original = yaml.safe_load((EXAMPLES / name / "serve.yaml").read_text(encoding="utf-8"))
    assert shape_of(SERVED[name]) == shape_of(original)
    Admission.from_folder(EXAMPLES.parent / "crds").admit(SERVED[name])


def shape_of(manifest: Manifest) -> Manifest:
    """What a story of a served model is about: pools, goals, classes, gates, and who serves when others are gone."""
    spec = manifest["spec"]
    pools = [(pool["name"], pool.get("role"), goals_of(pool)) for pool in spec["pools"]]
    router, rollout = spec.get("router", {}), spec.get("rollout", {})
    canary_of = rollout.get("canary", {})
    return {
        "name": manifest["metadata"]["name"],
        "pools": pools,
        "policy": router.get("policy"),
        "replicas": router.get("replicas"),
        "classes": [(each["name"], each.get("serviceTiers"), "ttftMs" in each) for each in router.get("classes", ())],
        "transfer": spec.get("engine", {}).get("transfer"),
        "gates": [gate["metric"] for gate in canary_of.get("metricGates", ())],
        "evals": canary_of.get("evalGates"),
        "percents": [step["percent"] for step in canary_of.get("steps", ())][-3:],
        "on failure": canary_of.get("onFailure"),
    }


def goals_of(pool: Manifest) -> Manifest:
    return {key: value for key, value in pool.get("autoscaling", {}).items() if key in ("mode", "ttftMs", "itlMs")}
