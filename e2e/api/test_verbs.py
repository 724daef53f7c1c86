"""The verbs of `stoker` against a real API server: trial, formats, selectors, deletion, expired and missing rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.api.plane import Plane
from testing.operator.bad_manifests import GOOD, changed

STOKER = Path(sys.executable).parent / "stoker"


def stoker(config: Path, *words: str, code: int = 0) -> str:
    """Output of a verb, standard error with it."""
    environment = {**os.environ, "KUBECONFIG": str(config)}
    run = subprocess.run([str(STOKER), *words], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def written(folder: Path, namespace: str, name: str, **labels: str) -> str:
    body: Any = changed(GOOD["TrainingJob"], {"metadata.namespace": namespace, "metadata.name": name})
    body = json.loads(body) if isinstance(body, str) else body
    body["metadata"]["labels"] = labels
    file = folder / f"{name}.json"
    file.write_text(json.dumps(body))
    return str(file)


def test_verbs_are_those_of_kubectl(plane: Plane, namespace: str, tmp_path: Path) -> None:
    config, place = Path(plane.kubeconfig), ("-n", namespace)
    one, two = (written(tmp_path, namespace, name, team=team) for name, team in (("one", "a"), ("two", "b")))
    assert stoker(config, "submit", *place, "-f", one, "--dry-run") == "trainingjob/one created (dry run)\n"
    assert "does not exist" in stoker(config, "get", *place, "tj/one", code=1)
    assert stoker(config, "submit", *place, "-f", one, "-f", two).count(" created\n") == 2
    assert stoker(config, "submit", *place, "-f", one, "--dry-run") == "trainingjob/one unchanged (dry run)\n"
    changed_by = ("--set", "spec.run.suspend=true", "--dry-run")
    assert stoker(config, "submit", *place, "-f", one, *changed_by) == "trainingjob/one configured (dry run)\n"
    wrong = stoker(config, "submit", *place, "-f", one, "--set", "spec.nonsense=1", "--dry-run", code=64)
    assert "nonsense" in wrong
    assert stoker(config, "get", *place, "tj", "-l", "team in (a,c),!spot", "-o", "name") == "trainingjob/one\n"
    assert yaml.safe_load(stoker(config, "get", *place, "tj/two", "-o", "yaml"))["kind"] == "TrainingJob"
    assert "did you mean two?" in stoker(config, "describe", *place, "tj/tow", code=1)
    assert "trainingjob/two deleted" in stoker(config, "delete", *place, "tj", "-l", "team=b", "--yes")


@pytest.mark.parametrize(
    ("token", "said"), [("expired", "are not accepted; log in again"), ("", "forbidden")], ids=["expired", "anonymous"]
)
def test_credentials_that_do_not_serve_are_named(
    plane: Plane, namespace: str, tmp_path: Path, token: str, said: str
) -> None:
    config = yaml.safe_load(Path(plane.kubeconfig).read_text())
    config["users"] = [{"name": one["name"], "user": {"token": token} if token else {}} for one in config["users"]]
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(config))
    assert said in stoker(file, "get", "-n", namespace, "tj", code=1)
