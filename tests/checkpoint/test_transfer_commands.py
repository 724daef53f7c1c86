"""`stoker checkpoint push` and `pull`: what arrives is the export, checked; what cannot be is refused with its code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stoker.checkpoint.command import program
from stoker.checkpoint.store import CheckpointRoot
from testing.checkpoint.registry_server import RegistryServer
from testing.checkpoint.s3_server import S3Server
from testing.checkpoint.synthetic import LAYOUTS, make_state, save

CONFIG = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
SHAPES = {
    "model.model.embed_tokens.weight": ((9, 4), "float32"),
    "model.lm_head.weight": ((9, 4), "float32"),
    "optimizer.exp_avg.lm_head.weight": ((9, 4), "float32"),
}


def run(arguments: Sequence[object]) -> Result:
    return CliRunner().invoke(program, [str(one) for one in arguments])


def facts(arguments: Sequence[object]) -> dict[str, Any]:
    done = run([*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = CheckpointRoot(tmp_path / "root")
    found = save(root, make_state(SHAPES), step=3, cut=LAYOUTS["both"], ranks=2, files=CONFIG)
    return root.root / found.folder_name


def test_a_checkpoint_goes_to_a_bucket_and_a_registry_as_its_export_and_comes_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts(["export", "--format", "hf", checkpoint, tmp_path / "export"])
    expected = content(tmp_path / "export")
    with S3Server() as server, RegistryServer() as registry:
        for name, value in {**server.environment, **registry.login}.items():
            monkeypatch.setenv(name, value)
        for number, uri in enumerate(("s3://models/tiny", f"oci://{registry.place}/team/tiny:v1")):
            pushed = facts(["push", checkpoint, uri])
            assert pushed["files"] == len(expected)
            pulled = facts(["pull", pushed["uri"], tmp_path / f"out{number}"])
            assert content(tmp_path / f"out{number}") == expected
            assert pulled["bytes"] == pushed["bytes"] == sum(map(len, expected.values()))
            assert pulled["digest"] == pushed["digest"], "by which engines name what they serve"
        again = run(["push", checkpoint, "s3://models/tiny"])
        assert (again.exit_code, "--replace takes its place" in again.output) == (64, True)
        facts(["push", tmp_path / "export", "s3://models/tiny", "--replace"])
        there = run(["pull", "s3://models/tiny", tmp_path / "out0"])
        assert (there.exit_code, "a pull makes a new folder" in there.output) == (64, True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "out0", "out1", "root"]


USAGE = 2
"""Of a wrong command line, as click has it; the program makes the table's code of it."""


def test_what_cannot_be_pushed_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for arguments, code, text in (
        (["push", checkpoint, "ftp://a/b"], USAGE, "'ftp://a/b' names no model; allowed: hf://"),
        (["pull", "ftp://a/b", tmp_path / "out"], USAGE, "'ftp://a/b' names no model; allowed: hf://"),
        (
            ["push", tmp_path / "root", "s3://models/tiny"],
            67,
            "neither a checkpoint (manifest.json) nor a Hugging Face",
        ),
        (["push", tmp_path / "gone", "s3://models/tiny"], 67, "gone does not exist"),
    ):
        done = run(arguments)
        assert (done.exit_code, text in done.output) == (code, True), done.output
