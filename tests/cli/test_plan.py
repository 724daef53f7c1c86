"""`stoker plan`: from a manifest to tables, JSON, layouts and an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from stoker.cli.exit_status import FAILED, WRONG_INPUT
from stoker.cli.plan import plan
from stoker.operator.domain.job_plan import GPU_PRODUCT, gpu_of_spec, job_of_spec, too_large
from stoker.operator.domain.unsupported import not_runnable, unsupported
from stoker.pod.plan.layout_rules import problems_of_sums
from stoker.pod.plan.memory import fullest
from testing.operator.bad_manifests import JOB, changed

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain-64-gpus" / "train.yaml"
LLAMA_8B = {
    "architecture": "llama",
    "vocabSize": 128256,
    "hiddenSize": 4096,
    "intermediateSize": 14336,
    "numLayers": 32,
    "numHeads": 32,
    "numKvHeads": 8,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
BIG = {
    "spec.model": LLAMA_8B,
    "spec.workers": {"replicas": 1, "gpusPerPod": 4},
    "spec.training": {"totalSteps": 10, "globalBatchSize": 4, "sequenceLength": 8192},
}


OWN = {key: value for key, value in JOB["spec"].items() if key != "model"}
FROM_ELSEWHERE = {**JOB, "spec": {**OWN, "modelFrom": {"huggingFace": {"path": "/nowhere/else"}}}}


def run(tmp_path: Path, manifest: dict[str, Any], *options: str) -> Result:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return invoke("-f", str(file), *options)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(plan, words, help_option_names=["-h", "--help"])  # as below `stoker`


def test_the_example_is_planned_by_part_link_and_second() -> None:
    found = invoke("-f", str(EXAMPLE), "--gpu", "H200")
    assert found.exit_code == 0, found.output
    assert "8.03 billion parameters on 64 ranks: pipeline 2 x shard 8 x tensor 4, ZeRO-1" in found.output
    for part in ("weights", "optimizer", "activations", "tensor parallel", "bubble", "tokens/s per GPU", ": fits"):
        assert part in found.output


def test_adapters_are_planned_beside_frozen_weights(tmp_path: Path) -> None:
    example = EXAMPLE.parents[1] / "finetune-lora" / "10-train.yaml"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    options = ["-f", str(example), "--gpu", "H100", "--model", str(tmp_path)]
    found = invoke(*options)
    assert found.exit_code == 0, found.output
    assert "8.19 billion parameters on 1 rank: one rank, ZeRO-1, recompute full, adapters of rank 16" in found.output
    values = json.loads(invoke(*options, "--json").output)
    adapters = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert values["memory_bytes"]["optimizer"] == 12 * adapters


def test_json_has_the_numbers_of_the_tables(tmp_path: Path) -> None:
    found = run(tmp_path, changed(JOB, BIG), "--gpu", "H200", "--json")
    values = json.loads(found.output)
    assert found.exit_code == 0
    assert values["fits"] is True
    assert values["parameters"] == 8_030_261_248
    assert values["memory_bytes"]["weights"] == 2 * 8_030_261_248
    assert values["layout"]["shard"] == 4
    assert {flow["purpose"] for flow in values["traffic"]} == {"gradients reduced", "weights gathered"}
    assert values["tokens_per_s_per_gpu"] == pytest.approx(4 * 8192 / 4 / values["step_s"]["total"])


def test_a_job_that_does_not_fit_says_so_and_fails(tmp_path: Path) -> None:
    found = run(tmp_path, changed(JOB, BIG), "--gpu", "H100")
    assert found.exit_code == FAILED
    assert "of 79.1 of an H100, with 4 for libraries: does not fit" in found.output


def test_without_a_gpu_there_is_memory_and_no_time(tmp_path: Path) -> None:
    found = run(tmp_path, JOB)
    assert found.exit_code == 0
    assert "time: give --gpu NAME" in found.output
    assert json.loads(run(tmp_path, JOB, "--json").output)["step_s"] is None


def test_the_node_selector_names_the_gpu(tmp_path: Path) -> None:
    manifest = changed(JOB, {**BIG, "spec.workers.nodeSelector": {GPU_PRODUCT: "NVIDIA-H200"}})
    assert "step on an H200" in run(tmp_path, manifest).output


def test_layouts_are_listed_best_first(tmp_path: Path) -> None:
    found = run(tmp_path, changed(JOB, BIG), "--gpu", "H200", "--gpus", "4")
    assert found.exit_code == 0
    times = [float(line.split()[0].replace(",", "")) for line in found.output.splitlines()]
    assert len(times) > 1
    assert times == sorted(times)
    values = json.loads(run(tmp_path, changed(JOB, BIG), "--gpu", "H200", "--gpus", "4", "--json").output)
    assert min(len(values), 20) == len(times), "the table has the best twenty, JSON has all"
    none = run(tmp_path, changed(JOB, {**BIG, "spec.training.globalBatchSize": 8}), "--gpu", "H100", "--gpus", "1")
    assert (none.exit_code, none.output) == (FAILED, "no layout of 1 ranks fits an H100 with global batch 8\n")
    many = run(tmp_path, changed(JOB, BIG), "--gpu", "H100", "--gpus", "99999999999")
    assert "99999999999 is not in the range 1<=x<=1048576" in many.output, "a search would take hours"


def test_the_sizes_behind_model_from_are_read(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run(tmp_path, FROM_ELSEWHERE, "--json", "--model", str(tmp_path))
    assert json.loads(found.output)["parameters"] == json.loads(run(tmp_path, JOB, "--json").output)["parameters"]
    missing = run(tmp_path, FROM_ELSEWHERE)
    assert missing.exit_code == WRONG_INPUT
    assert "give --model FOLDER with its config.json" in missing.output


def test_a_job_that_this_version_does_not_run_is_planned_and_refused(tmp_path: Path) -> None:
    offloads = {"cpuOffload": True, "nvmeOffload": {"path": "/scratch"}}
    manifest = changed(JOB, {**BIG, "spec.memory": offloads})
    found = run(tmp_path, manifest, "--gpu", "H200")
    assert found.exit_code == WRONG_INPUT
    assert "volume of nvmeOffload" in found.stdout
    reason = "spec.memory.cpuOffload true is not supported yet with memory.nvmeOffload"
    assert reason in found.stderr
    (line,) = json.loads(run(tmp_path, manifest, "--gpu", "H200", "--json").stdout)["refused"]
    assert line.startswith(reason)
    assert json.loads(run(tmp_path, changed(JOB, BIG), "--json").output)["refused"] == []


def test_plan_admission_and_trainer_refuse_any_data_parallel_beside_experts_in_the_same_words(tmp_path: Path) -> None:
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, **moe}))
    manifest = changed(
        FROM_ELSEWHERE,
        {
            "spec.workers": {"gpusPerPod": 2},
            "spec.parallelism": {"expert": 2},
            "spec.training.deterministic": "AnyDataParallel",
        },
    )
    found = run(tmp_path, manifest, "--model", str(tmp_path), "--json")
    assert found.exit_code == WRONG_INPUT
    (line,) = json.loads(found.stdout)["refused"]
    assert [line] == not_runnable("TrainingJob", manifest["spec"])
    assert line == "spec.training." + problems_of_sums(data_parallel=2, expert=2)[0]
    assert "expert 1, got 2: the rows of an expert come from several ranks" in line


BEHIND = [
    (
        {"spec.parallelism": {"tensor": 2}},
        {"intermediate_size": 12287},
        "intermediateSize 12287 is not a multiple of t",
    ),
    ({"spec.memory": {"precision": "fp8"}}, {"hidden_size": 4100}, "precision fp8 needs hiddenSize 4100 to be a mul"),
    ({"spec.training.sequenceLength": 8192}, {"max_position_embeddings": 4096}, "maxPositionEmbeddings 4096"),
]


@pytest.mark.parametrize(("changes", "sizes", "message"), BEHIND)
def test_what_the_trainer_refuses_of_a_model_behind_model_from_follows_the_plan(
    tmp_path: Path, changes: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, **sizes}))
    whole = run(tmp_path, FROM_ELSEWHERE, "--model", str(tmp_path))
    manifest = changed(FROM_ELSEWHERE, {"spec.workers": {"gpusPerPod": 2}, **changes})
    found = run(tmp_path, manifest, "--model", str(tmp_path))
    assert (whole.exit_code, found.exit_code) == (0, WRONG_INPUT)
    assert "memory of a rank" in found.stdout
    assert message in found.stderr


def test_a_gpu_without_a_precision_has_no_plan_and_no_layouts_of_it(tmp_path: Path) -> None:
    manifest = changed(JOB, {**BIG, "spec.memory": {"precision": "fp8"}})
    for options in ([], ["--gpus", "8"]):
        found = run(tmp_path, manifest, "--gpu", "A100", *options)
        assert found.exit_code == WRONG_INPUT
        assert "memory.precision fp8: an A100 does not compute in it; allowed: bf16, fp16, fp32" in found.output


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({}, ("--gpu", "V100"), "gpu 'V100' is unknown; allowed: A100, H100, H200, B200"),
    ({}, ("--gpus", "4"), "--gpus 4 needs --gpu NAME"),
    ({"spec.training.globalBatchSize": 7}, (), "globalBatchSize 7 is not a multiple"),
    ({"kind": "ConfigMap"}, (), "exactly one TrainingJob is needed, found 0"),
]


CONFIGS = [
    ("{", "not a JSON file (Expecting property name"),
    ("[" * 100_000, "not a JSON file (maximum recursion depth exceeded"),
    ("[]", "an object is needed, got list"),
    ('{"model_type": "gpt2"}', "not supported yet: model_type 'gpt2'; allowed: llama, "),
    (json.dumps({**QWEN3_8B, "hidden_size": None}), "hidden_size is missing"),
    (json.dumps({**QWEN3_8B, "num_hidden_layers": "36"}), "num_hidden_layers must be a whole number, not '36'"),
    (json.dumps({**QWEN3_8B, "num_key_value_heads": 7}), "num_kv_heads"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_a_config_json_that_the_trainer_cannot_use_is_named(tmp_path: Path, content: str, message: str) -> None:
    (file := tmp_path / "config.json").write_text(content)
    found = run(tmp_path, FROM_ELSEWHERE, "--model", str(tmp_path))
    assert found.exit_code == WRONG_INPUT
    assert found.output.startswith(f"error: {file}: ")
    assert message in found.output


def test_a_model_that_is_not_read_is_named(tmp_path: Path) -> None:
    lost = tmp_path / "none"
    assert run(tmp_path, FROM_ELSEWHERE, "--model", str(lost)).output == f"error: {lost}: No such file or directory\n"
    found = run(tmp_path, JOB, "--model", str(tmp_path))
    assert found.exit_code == WRONG_INPUT
    assert f"--model {tmp_path}: the job has its own spec.model" in found.output


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED)
def test_wrong_input_is_named(tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...], message: str) -> None:
    found = run(tmp_path, changed(JOB, changes), *options)
    assert found.exit_code == WRONG_INPUT
    assert message in found.output


def test_a_job_that_its_named_gpu_surely_cannot_hold_is_refused_with_the_arithmetic() -> None:
    h100 = {GPU_PRODUCT: "NVIDIA-H100-80GB-HBM3"}
    spec = changed(JOB, {**BIG, "spec.training.globalBatchSize": 16, "spec.workers.nodeSelector": h100})["spec"]
    (line,) = unsupported("TrainingJob", spec)
    assert line.startswith(f"spec.workers.nodeSelector {GPU_PRODUCT} NVIDIA-H100-80GB-HBM3: a rank needs about ")
    assert "an H100 has 79.1 GiB; `stoker plan` lists layouts that fit" in line
    smaller = {**spec, "memory": {"zeroStage": 2, "activationCheckpointing": "full"}}
    assert fullest(job_of_spec(smaller)).total < 79.1 * 2**30
    assert unsupported("TrainingJob", smaller) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.workers.nodeSelector": {"node.example.com/pool": "h200"}},
        {"spec.workers.nodeSelector": {GPU_PRODUCT: "Tesla-T4"}},
        {"spec.workers.nodeSelector": {}},
    ],
)
def test_nothing_is_refused_where_the_memory_is_not_known(changes: dict[str, Any]) -> None:
    spec = changed(JOB, {**BIG, "spec.training.globalBatchSize": 64, **changes})["spec"]
    assert gpu_of_spec(spec) is None
    assert too_large(spec) == []


def test_names_of_the_wire_become_those_of_programs() -> None:
    memory = {"activationCheckpointing": "selective", "activationBudgetGiB": "1.5", "zeroStage": 3}
    parallelism = {"sequenceParallel": True, "tensor": 2, "contextMethod": "Ring"}
    found = job_of_spec(changed(JOB, {"spec.memory": memory, "spec.parallelism": parallelism})["spec"])
    assert found.activation_budget_bytes == 1.5 * 2**30
    assert (found.layout.zero_stage, found.layout.sequence_parallel, found.layout.context_method) == (3, True, "Ring")


def test_a_budget_of_activations_is_solved_by_layer(tmp_path: Path) -> None:
    selective = {"activationCheckpointing": "selective", "activationBudgetGiB": "20"}
    found = run(tmp_path, changed(JOB, {**BIG, "spec.memory": selective}), "--gpu", "H200")
    assert found.exit_code == 0, found.output
    assert "computed again in backward, for at most 20.0 GiB of activations\nlayers 0 to " in found.output
    values = json.loads(run(tmp_path, changed(JOB, {**BIG, "spec.memory": selective}), "--json").output)
    assert values["memory_bytes"]["activations"] <= 20 * 2**30
    assert len(values["recomputed_by_layer"]) == 32
    assert len(set(values["recomputed_by_layer"])) > 1


def test_a_budget_that_cannot_be_met_is_refused_by_plan_and_admission_with_the_smallest_that_works(
    tmp_path: Path,
) -> None:
    selective = {"activationCheckpointing": "selective", "activationBudgetGiB": "3"}
    manifest = changed(JOB, {**BIG, "spec.memory": selective})
    found = run(tmp_path, manifest, "--gpu", "H200")
    line = "spec.memory.activationBudgetGiB 3: activations of 8,192 tokens need at least 5.105 GiB on a rank: 32 layers"
    assert found.exit_code == WRONG_INPUT
    assert found.output.startswith(f"error: {line}")
    (refusal,) = unsupported("TrainingJob", manifest["spec"])
    assert refusal.startswith(line)
    assert refusal.endswith("the smallest that works is 5.105")
    smallest = changed(manifest, {"spec.memory.activationBudgetGiB": "5.105"})
    assert unsupported("TrainingJob", smallest["spec"]) == []
