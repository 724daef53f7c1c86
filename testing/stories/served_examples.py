"""The examples of served models as stories tell them: a tiny model, engines of this machine's size, short times.

What an example is about stays: its pools and their roles, the mode and goals of its scaling, its classes, its gates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from testing.stories.manifests import EXACT, Manifest, deployment

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_S = 170
"""A router holds a request for so long: an engine starts meanwhile, also on a busy machine."""
PATIENT_MS = 600_000
"""A goal that no request misses: stories compare answers, and want none refused."""
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


def autoscaled(checkpoint: str, least: int) -> Manifest:
    """`serve-autoscaled` from `least` to two replicas of two requests each."""
    manifest = served_example("serve-autoscaled")
    spec = manifest["spec"]
    spec["model"] = {"checkpointRef": {"name": checkpoint}}
    spec["engine"]["scheduler"]["maxRequests"] = 2
    (pool,) = spec["pools"]
    pool["replicas"] = 1
    pool["autoscaling"] |= {"min": least, "max": 2, "scaleDownAfterSeconds": 10}
    spec["router"] |= {"holdSeconds": HELD_S, "requestTimeoutSeconds": HELD_S}
    for each in spec["router"]["classes"]:
        if "ttftMs" in each:
            each["ttftMs"] = PATIENT_MS
    return manifest


def in_pairs(model: Manifest) -> Manifest:
    """`serve-prefill-decode` with this model."""
    manifest = served_example("serve-prefill-decode")
    spec = manifest["spec"]
    spec["model"] = {"names": spec["model"]["names"], "dtype": EXACT, **model}
    return manifest


def canary(checkpoint: str, limit_ms: str) -> Manifest:
    """`serve-canary` without its first step, each held for a second, with a limit for first tokens of our own."""
    manifest = served_example("serve-canary")
    spec = manifest["spec"]
    spec["model"] = {"checkpointRef": {"name": checkpoint}}
    (pool,) = spec["pools"]
    pool["replicas"] = 1
    settings = spec["rollout"]["canary"]
    settings["steps"] = [{**step, "holdSeconds": 1, "minRequests": 20} for step in settings["steps"][1:]]
    (first_token,) = [gate for gate in settings["metricGates"] if gate["metric"] == "ttftP95Ms"]
    first_token |= {"max": limit_ms, "maxRatio": "1000"}
    return manifest
