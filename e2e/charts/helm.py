"""Helm for tests and scripts: the binary of `make kube-binaries`, with folders of its own for its state."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries, tools

REPOSITORY = Path(__file__).resolve().parents[2]
CHARTS = REPOSITORY / "charts"
STOKER = CHARTS / "stoker"
CRDS = CHARTS / "stoker-crds"
NAMESPACE = "stoker-system"


class HelmFailed(RuntimeError):
    """Raised when Helm fails; the text is its output."""


def helm(
    *arguments: str, kubeconfig: Path | None = None, values: Mapping[str, Any] | None = None, timeout_s: float = 400
) -> str:
    """Run `helm ARGUMENTS` and return its output; `values` is passed as a values file.

    Raises:
        HelmFailed: exit status other than 0.
    """
    with tempfile.TemporaryDirectory() as home:
        command = [str(binaries.find([tools.HELM]) / "helm"), *arguments]
        if values is not None:
            file = Path(home) / "values.json"
            file.write_text(json.dumps(values))
            command += ["--values", str(file)]
        places = {f"HELM_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA")}
        environment = {**os.environ, **places, "KUBECONFIG": str(kubeconfig or os.devnull)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
    if done.returncode:
        raise HelmFailed(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def rendered(chart: Path, values: Mapping[str, Any] | None = None, *options: str) -> list[dict[str, Any]]:
    """Return the objects of a chart from `helm template`, tests included, without a cluster."""
    text = helm("template", "stoker", str(chart), "--namespace", NAMESPACE, *options, values=values)
    return objects(text)


def objects(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML stream, ordered by kind and name."""
    found = [document for document in yaml.safe_load_all(text) if document]
    return sorted(
        found, key=lambda item: (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
    )


def one(found: Sequence[Mapping[str, Any]], kind: str, name: str = "stoker") -> Mapping[str, Any]:
    """Return the only object with that kind and name."""
    (item,) = [item for item in found if item["kind"] == kind and item["metadata"]["name"] == name]
    return item
