"""Examples of served models as stories tell them: a tiny model, engines of this machine's size, short times.

What an example is about stays: its pools and their roles, its transfers and its policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from testing.stories.manifests import EXACT, Manifest, deployment

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, Any] = {
    "threads": 1,
    "cache": {"memoryBytes": 16 << 20},
    "scheduler": {"maxBatchTokens": 256, "maxRequests": 16, "maxModelLen": 256},
}
"""Engines for the tiny model."""
NOT_HERE = ("gpusPerPod", "parallelism", "resources", "tolerations", "volumes", "volumeMounts")
"""What pools ask for that a story's machine has not."""


def served_example(name: str) -> Manifest:
    """Return the deployment of an example with small engines; the model is the story's to name."""
    manifest: Manifest = yaml.safe_load((EXAMPLES / name / "serve.yaml").read_text(encoding="utf-8"))
    spec = manifest["spec"]
    spec["model"]["dtype"] = EXACT
    spec["engine"] = {**spec.get("engine", {}), **SMALL, "scheduler": dict(SMALL["scheduler"])}
    spec["router"] = {**spec.get("router", {}), **deployment("", {})["spec"]["router"]}
    for pool in spec["pools"]:
        for field in NOT_HERE:
            pool.pop(field, None)
        pool["gracePeriodSeconds"] = 20
    return manifest


def in_pairs(model: Manifest) -> Manifest:
    """`serve-prefill-decode` with this model."""
    manifest = served_example("serve-prefill-decode")
    spec = manifest["spec"]
    spec["model"] = {"names": spec["model"]["names"], "dtype": EXACT, **model}
    return manifest
