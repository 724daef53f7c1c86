"""`stoker train`: from a manifest to the trainer's configuration, with folders for claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.pod.config_file import parse
from stoker.trainer.protocol.config import TrainerConfig
from testing.cli.in_process import run_in_process
from testing.cli.small_disk import room_for
from testing.operator.unbuilt import UNBUILT, UNBUILT_FIELD


def job(**spec: Any) -> dict[str, Any]:
    model = {
        "architecture": "llama",
        "vocabSize": 512,
        "hiddenSize": 32,
        "intermediateSize": 64,
        "numLayers": 2,
        "numHeads": 4,
    }
    found = {
        "model": model,
        "workers": {
            "replicas": 2,
            "ranksPerPod": 1,
            "volumes": [
                {"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus"}},
                {"name": "more", "configMap": {"name": "more"}},
            ],
            "volumeMounts": [{"name": "corpus", "mountPath": "/data"}, {"name": "more", "mountPath": "/more"}],
            "env": [{"name": "DATA", "value": "/data"}],
        },
        "training": {"totalSteps": 4, "globalBatchSize": 4, "sequenceLength": 32},
        "data": {
            "sources": [{"name": "a", "path": "/data/*.txt"}, {"name": "b", "path": "/more/b.txt"}],
            "tokenizer": {"kind": "train", "vocabSize": 512},
        },
        "checkpoint": {"storage": {"claimName": "checkpoints"}, "intervalSteps": 2, "maxToKeep": 3},
        **spec,
    }  # fmt: skip
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "tiny"}, "spec": found}


MORE = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}, "data": {"b.txt": "text about /data"}}


def train(tmp_path: Path, *manifests: dict[str, Any], options: tuple[str, ...] = ("--render",), code: int = 0) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    (tmp_path / "corpus").mkdir(exist_ok=True)
    claims = () if "--claim" in options else ("--claim", f"corpus={tmp_path / 'corpus'}")
    storage = () if "--storage" in options else ("--storage", str(tmp_path / "storage"))
    ended, output = run_in_process("train", "-f", str(file), *claims, *storage, *options)
    assert ended == code, output
    return output


def test_a_job_becomes_a_configuration_of_this_machine(tmp_path: Path) -> None:
    found = parse(TrainerConfig, json.loads(train(tmp_path, job(), MORE)))
    run = tmp_path / "storage" / ".runs" / "tiny-0"
    assert [source.path for source in found.data.sources] == [f"{tmp_path}/corpus/*.txt", f"{run}/v/more/b.txt"]
    assert found.checkpoint.root == f"{tmp_path}/storage/checkpoints/tiny"
    assert found.checkpoint.max_to_keep == 3
    assert (found.retention, found.resume) == ("own", None)
    assert (found.gang.nodes, found.gang.ranks_per_node, found.gang.agents) == (1, 2, ())
    assert (found.listen.host, found.listen.port, found.listen.control_keys) == ("127.0.0.1", 0, None)
    assert found.model is not None
    assert found.model["rope_theta"] == 10000.0
    assert not run.exists()


@pytest.mark.parametrize(
    ("manifests", "message"),
    [
        ([MORE], "exactly one TrainingJob is needed, found 0 (ConfigMap more)"),
        ([job(), job()], r"exactly one TrainingJob is needed, found 2 (TrainingJob tiny, TrainingJob tiny)"),
        ([job(training={"totalSteps": 0}), MORE], "spec.training"),
        (
            [job(**UNBUILT), MORE],
            f"{UNBUILT_FIELD} is not supported yet",
        ),
        ([job(run={"suspend": True}), MORE], "spec.run.suspend is true: there is nothing to run"),
        ([job()], 'configmap "more" not found'),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, manifests: list[dict[str, Any]], message: str) -> None:
    assert message in train(tmp_path, *manifests, code=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--claim", "corpse=."), "--claim corpse: the job has no such claim; it has checkpoints, corpus"),
        (("--claim", "corpus=.", "--claim", "corpus=/tmp"), "--claim corpus=/tmp: corpus is given twice"),
        (("--storage", "/dev/null"), "--storage /dev/null: /dev/null/.runs: Not a directory"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in train(tmp_path, job(), MORE, options=(*options, "--render"), code=64)


def reading_job() -> dict[str, Any]:
    found = job()
    found["spec"]["workers"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = True
    return found


def test_a_claim_that_is_only_read_needs_a_folder(tmp_path: Path) -> None:
    options = ("--claim", f"checkpoints={tmp_path}", "--render")
    refused = train(tmp_path, reading_job(), MORE, options=options, code=64)
    assert "the job reads the claim corpus, which has no folder: give --claim corpus=DIR" in refused
    (tmp_path / "storage" / "corpus").mkdir(parents=True)
    train(tmp_path, reading_job(), MORE, options=options)


def test_gpus_that_this_machine_lacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    wanting = job()
    wanting["spec"]["workers"] |= {"gpusPerPod": 1, "ranksPerPod": 1}
    refused = train(tmp_path, wanting, MORE, code=64)
    assert "spec.workers.gpusPerPod 1 x replicas 2: this machine has 1 GPUs" in refused
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert parse(TrainerConfig, json.loads(train(tmp_path, wanting, MORE))).device == "cuda"


def test_a_model_of_the_hub_and_a_bucket_need_no_claim(tmp_path: Path) -> None:
    found = job()
    found["spec"] |= {"modelFrom": {"hub": {"id": "org/model", "revision": "v1"}}}
    found["spec"].pop("model")
    found["spec"]["checkpoint"]["storage"] = {"s3": {"bucket": "models", "prefix": "runs"}}
    config = parse(TrainerConfig, json.loads(train(tmp_path, found, MORE)))
    assert config.checkpoint.root == "s3://models/runs"
    assert config.model_from is not None
    assert (config.model_from.path, config.model_from.cache) == (
        "hf://org/model@v1",
        str(tmp_path / "storage" / ".models"),
    )


def test_a_full_disk_behind_the_storage_is_no_fault_of_the_manifest(tmp_path: Path) -> None:
    train(tmp_path, job(), MORE)
    storage = tmp_path / "full"
    words = ["-f", str(tmp_path / "job.yaml"), "--claim", f"corpus={tmp_path / 'corpus'}", "--storage", str(storage)]
    with room_for(10):
        ended, output = run_in_process("train", *words, "--render")
    assert (ended, output) == (68, f"error: --storage {storage}: File too large\n")
