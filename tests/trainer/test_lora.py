"""LoRA: against adapters written in plain torch around transformers' model, and what becomes of a checkpoint of it.

That every layout of ranks equals one rank is in `test_layouts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stoker.checkpoint.adapter import adapter_of
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointMissing
from stoker.checkpoint.export import export_adapter, export_hugging_face
from stoker.checkpoint.manifest import Manifest
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot, Found
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.lora import TARGETS, LoraSettings, adapt, adapter_parts
from stoker.model.parameter import Part
from stoker.model.weights.source import open_weights
from stoker.pod.config_file import ConfigError
from stoker.pod.plan.job import Job
from stoker.pod.plan.memory import memory_by_rank
from stoker.pod.plan.model_size import ModelSize
from stoker.pod.plan.stage import pipeline_ranks, rank_parameters
from stoker.trainer.errors import OtherModel
from stoker.trainer.protocol.config import LoraConfig
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.schedule import learning_rate
from stoker.trainer.rank.train_step import ForwardPass
from stoker.trainer.rank.zero_maker import make_zero
from testing.model.transformers_twin import twin
from testing.trainer.layouts import (
    DEEP,
    LORA,
    MIXED,
    MODEL,
    SPARSE,
    STEPS,
    TIED,
    Layout,
    MotifBatches,
    State,
    losses_of,
    read_state,
    relative_difference,
    run_alone,
    train_layout,
)
from testing.trainer.live_bytes import LiveBytes
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import alone, context_of, data_parallel, empty_slices, tiny_config

RANK, ALPHA = LORA["lora"]["rank"], LORA["lora"]["alpha"]
ROW = Layout(lora=True, micro_batch=2)


class LoraLinear(nn.Module):
    """A frozen layer of transformers with an adapter beside it, as the PEFT library defines it."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        added: Tensor = ALPHA / RANK * (x @ self.a.T) @ self.b.T
        return base + added


def with_adapters(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, LoraLinear]:
    """Freeze transformers' model and put adapters beside its layers; return them by the name of the layer."""
    model.requires_grad_(False)
    names = sorted({name.split(".lora_")[0] for name in tensors})
    made = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        made[name] = LoraLinear(base, tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        setattr(model.get_submodule(parent), child, made[name])
    return made


def starting_decoder(model: ModelConfig, seed: int = 0) -> Decoder:
    """The decoder that the runs of these tests start from, with adapters."""
    decoder = Decoder(model, Ops())
    decoder.init_weights(seed)
    return decoder


def starting_adapters(model: ModelConfig, targets: tuple[str, ...], seed: int = 0) -> dict[str, Tensor]:
    decoder = starting_decoder(model)
    adapt(decoder, LoraSettings(rank=RANK, alpha=ALPHA, targets=targets))
    for part in adapter_parts(decoder):
        decoder.init_part(part, seed)
    return {part.hf_name: part.local().clone() for part in adapter_parts(decoder)}


def slow_twin(model: ModelConfig, targets: tuple[str, ...]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train with transformers and torch's AdamW in float64; return the losses and the adapters at the end."""
    config = ROW.config("unused")
    reference = twin(starting_decoder(model)).double()
    start = {name: value.double() for name, value in starting_adapters(model, targets).items()}
    adapters = with_adapters(reference, start)
    trained = [held for adapter in adapters.values() for held in (adapter.a, adapter.b)]
    optimization = config.optimization
    optimizer = torch.optim.AdamW(
        trained,
        lr=optimization.learning_rate,
        betas=(optimization.beta1, optimization.beta2),
        eps=optimization.epsilon,
        weight_decay=optimization.weight_decay,
    )
    batches, losses = MotifBatches(config, model.vocab_size), []
    for step in range(STEPS):
        loss = torch.stack([loss_sum(reference, batch) for batch in batches.micro_batches(step, 0, 1)]).sum()
        loss = loss / batches.target_tokens(step)
        optimizer.param_groups[0]["lr"] = learning_rate(optimization, step + 1, STEPS)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, optimization.gradient_clipping)
        optimizer.step()
        losses.append(loss.item())
    found = {}
    for name, adapter in adapters.items():
        found[f"adapter.{name}.lora_A.weight"] = adapter.a.detach().numpy()
        found[f"adapter.{name}.lora_B.weight"] = adapter.b.detach().numpy()
    return losses, found


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    """The loss over a packed micro-batch, document by document."""
    cuts, total = batch.cu_seqlens, torch.zeros((), dtype=torch.float64)
    for begin, end in pairwise(cuts):
        logits = model(input_ids=torch.as_tensor(batch.tokens_T[begin:end])[None]).logits[0]
        targets = torch.as_tensor(batch.targets_T[begin:end])
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        total = total + (losses * torch.as_tensor(batch.weights_T[begin:end])).sum()
    return total


def merged(state: State, adapters: State) -> State:
    """The adapted weights."""
    names = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")]
    return {
        name: state[f"model.{name.removeprefix('adapter.')}.weight"]
        + ALPHA / RANK * adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        for name in names
    }


@pytest.mark.parametrize(
    ("model", "targets"),
    [(MODEL, TARGETS), (replace(TIED, architecture="llama"), ("q_proj", "v_proj"))],
    ids=["qwen3-all", "llama-tied-q-v"],
)
def test_training_equals_adapters_in_plain_torch(model: ModelConfig, targets: tuple[str, ...], tmp_path: Path) -> None:
    run = run_alone(replace(ROW, model=model), tmp_path, lora={**LORA["lora"], "targets": targets})
    losses, adapters = slow_twin(model, targets)
    np.testing.assert_allclose([loss for _, loss, _ in run.losses], losses, rtol=1e-6)
    got = {name: value for name, value in run.state.items() if name.startswith("adapter.")}
    gaps = relative_difference(got, adapters)
    # The twin is float64; the gradients of q and k are sums that nearly cancel (`MOMENT_TOLERANCE`).
    assert max(gaps.values()) < 1e-5, gaps
    gaps = relative_difference(merged(run.state, got), merged(run.state, adapters))
    assert max(gaps.values()) < 1e-6, gaps


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A checkpoint of a bf16 run, after ten steps."""
    folder = tmp_path_factory.mktemp("lora")
    run_alone(ROW, folder, memory__precision="bf16", optimization__learning_rate=0.02)
    return CheckpointRoot(folder / "root").committed()[0]


def test_a_checkpoint_holds_moments_of_the_adapters_alone(trained: Found) -> None:
    tensors = trained.manifest.tensors
    frozen = {name for name in tensors if name.startswith("model.")}
    moments = {name for name in tensors if name.startswith("optimizer.")}
    adapters = {name for name in tensors if name.startswith("adapter.")}
    assert len(tensors) == len(frozen) + len(moments) + len(adapters)
    assert all(".lora_" in name for name in moments | adapters)
    assert len(moments) == 2 * len(adapters) == 2 * 2 * len(TARGETS) * MODEL.num_layers
    assert {tensors[name].dtype for name in frozen} == {"bfloat16"}
    assert {tensors[name].dtype for name in moments | adapters} == {"float32"}


def test_the_frozen_weights_are_those_of_the_start(trained: Found) -> None:
    store = CheckpointReader(trained.path)
    for part in starting_decoder(MODEL).named_parts():
        bits = part.local().bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(store.read(f"model.{part.hf_name}").view(np.int16), bits, err_msg=part.hf_name)


def merged_by_hand(found: Found, hf_name: str) -> Tensor:
    reader = CheckpointReader(found.path)

    def read(name: str) -> Tensor:
        values = torch.from_numpy(reader.read(name))
        return values if values.dtype is torch.float32 else values.view(torch.bfloat16).float()

    weight, name = read(f"model.{hf_name}"), f"adapter.{hf_name.removesuffix('.weight')}"
    if f"{name}.lora_A.weight" not in reader.manifest.tensors:
        return weight.bfloat16()
    added: Tensor = ALPHA / RANK * read(f"{name}.lora_B.weight") @ read(f"{name}.lora_A.weight")
    return (weight + added).bfloat16()


def test_it_is_loaded_merged_whole_and_by_boxes(trained: Found) -> None:
    source = open_weights(trained.path)
    decoder = Decoder(source.config, Ops(), dtype=torch.bfloat16)
    source.load_into(decoder)
    for part in decoder.named_parts():
        by_hand = merged_by_hand(trained, part.hf_name)
        torch.testing.assert_close(part.local(), by_hand, rtol=0.01, atol=1e-3)
        size = tuple(max(1, extent // 2) for extent in by_hand.shape)
        start = tuple(extent - held for extent, held in zip(by_hand.shape, size, strict=True))
        box = by_hand[tuple(slice(begin, begin + held) for begin, held in zip(start, size, strict=True))]
        torch.testing.assert_close(source.store.read(part.hf_name, start, size), box, rtol=0.01, atol=1e-3)


def test_the_merged_export_is_what_is_served(trained: Found, tmp_path: Path) -> None:
    export_hugging_face(CheckpointReader(trained.path), tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    served = open_weights(trained.path).store
    assert not [name for name in exported if "lora" in name]
    for name, value in exported.items():
        assert torch.equal(value, served.read(name, (0,) * value.ndim, tuple(value.shape))), name
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    plain = CheckpointReader(trained.path).read("model.model.layers.0.mlp.up_proj.weight").view(np.int16)
    assert not np.array_equal(exported["model.layers.0.mlp.up_proj.weight"].view(torch.int16).numpy(), plain)


def test_the_adapter_is_exported_in_the_form_of_peft(trained: Found, tmp_path: Path) -> None:
    """Read as the PEFT library reads: each tensor by its name and a prefix, the scale from the configuration."""
    export_adapter(CheckpointReader(trained.path), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    assert expected.items() <= config.items()
    assert set(config["target_modules"]) == set(TARGETS)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert all(name.startswith(prefix) for name in tensors)
    stored = CheckpointReader(trained.path)
    base = twin(starting_decoder(MODEL)).bfloat16().float()
    with_adapters(base, {name.removeprefix(prefix): value for name, value in tensors.items()})
    assert len(tensors) == sum(name.startswith("adapter.") for name in stored.manifest.tensors)
    served = Decoder(MODEL, Ops())
    open_weights(trained.path).load_into(served)
    whole = twin(served)
    tokens = torch.arange(24)[None] % MODEL.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, whole(tokens).logits, rtol=0.05, atol=0.05)
        unadapted = twin(starting_decoder(MODEL))(tokens).logits
    assert (unadapted - whole(tokens).logits).abs().max() > 0.5


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    run_alone(Layout(), tmp_path, training__total_steps=1)
    with pytest.raises(CheckpointMissing, match="no adapters"):
        export_adapter(CheckpointReader(CheckpointRoot(tmp_path / "root").committed()[0].path), tmp_path / "out")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, precision: str) -> None:
    config: Any = {"memory__precision": precision, "training__deterministic": "SameLayout"}
    whole = run_alone(ROW, tmp_path / "whole", **config)
    begun = run_alone(ROW, tmp_path / "cut", **config, training__total_steps=4)
    ended = run_alone(ROW, tmp_path / "cut", **config)
    assert begun.losses + ended.losses == whole.losses
    assert all(np.array_equal(value, ended.state[name]) for name, value in whole.state.items())


def two_ranks(_rank: int, _size: int) -> RankContext | None:
    return context_of(data_parallel(2))


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(2, two_ranks) as made:
        yield made


def train_in_two(held: RankContext | None, folder: Path, stage: int, steps: int) -> None:
    assert held is not None
    layout = replace(ROW, shard=2, zero_stage=stage)
    changes = {"training__deterministic": "SameLayout", "training__total_steps": steps}
    train_layout(layout, held, folder, changes)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_of_two_ranks_has_the_same_bits_and_export(world: RankWorld, tmp_path: Path, stage: int) -> None:
    world.call(train_in_two, tmp_path / "whole", stage, 6)
    for steps in (4, 6):
        world.call(train_in_two, tmp_path / "cut", stage, steps)
    whole, cut = read_state(tmp_path / "whole"), read_state(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(value, cut[name]) for name, value in whole.items())
    for name in ("whole", "cut"):
        newest = CheckpointRoot(tmp_path / name / "root").committed()[0]
        export_adapter(CheckpointReader(newest.path), tmp_path / name / "adapter")
    exported = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert exported[0] == exported[1]


def test_another_adapter_or_none_does_not_resume(tmp_path: Path) -> None:
    run_alone(ROW, tmp_path, training__total_steps=1)
    for changes in ({"lora": {"rank": RANK, "alpha": 1}}, {"lora": {"rank": 8, "alpha": ALPHA}}):
        with pytest.raises(OtherModel, match="lora"):
            run_alone(ROW, tmp_path, **changes)
    with pytest.raises(OtherModel, match="lora"):
        run_alone(replace(ROW, lora=False), tmp_path)


def test_memory_is_that_of_the_frozen_weights_and_the_adapters_state() -> None:
    with LiveBytes() as live:
        context = alone()
        config = ROW.config("unused", memory__precision="bf16")
        model, start = empty_slices(config, context, DEEP)
        zero = make_zero(config, model, context.mesh, context.device, start.fill)
        del start
        bytes_held = live.now
    zero.close()
    frozen = sum(state.bucket.plan.numel for state in zero.held if state.bucket.num_trainable == 0)
    trained = sum(state.bucket.plan.numel for state in zero.states)
    assert [state.bucket.name for state in zero.states] == ["adapters"]
    assert trained < 0.4 * frozen
    assert 2 * frozen + 14 * trained <= bytes_held < 2 * frozen + 14 * trained + 20_000
    planned = memory_by_rank(Job.from_config(config.model_dump(), ModelSize.from_fields(asdict(DEEP))))[0]
    assert planned.weights + planned.optimizer == pytest.approx(2 * frozen + 14 * trained, rel=0.1)
    assert planned.gradients == pytest.approx(4 * trained, rel=0.1)


def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for name in ("none", "selective", "full"):
        context = alone()
        changes = {"memory__activation_checkpointing": name, "training__total_steps": 3}
        train_layout(ROW, context, tmp_path / name, changes)
        found.append((losses_of(context), read_state(tmp_path / name)))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(np.array_equal(value, state[name]) for name, value in found[0][1].items())


def test_lamb_trains_adapters_and_leaves_the_rest(tmp_path: Path) -> None:
    run = run_alone(ROW, tmp_path, optimization__optimizer="lamb", training__total_steps=2)
    start = {f"adapter.{name}": value.numpy() for name, value in starting_adapters(MODEL, TARGETS).items()}
    start |= {f"model.{part.hf_name}": part.local().numpy() for part in starting_decoder(MODEL).named_parts()}
    changed = {name for name, value in start.items() if not np.array_equal(run.state[name], value)}
    assert changed == {name for name in start if name.startswith("adapter.")}


def test_unknown_targets_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"targets: unknown: w1, lm_head; allowed: q_proj, k_proj, .*, down_proj$"):
        LoraSettings(rank=4, alpha=8, targets=("w1", "q_proj", "lm_head"))


MIXTRAL = replace(SPARSE, architecture="mixtral", moe_intermediate_size=None, norm_topk_prob=True)
"""Its experts have matrices of other names."""


@pytest.fixture(scope="module", params=[MIXED, MIXTRAL], ids=["qwen3-moe-mixed", "mixtral"])
def sparse(request: pytest.FixtureRequest) -> ModelConfig:
    """A model with experts."""
    found: ModelConfig = request.param
    return found


@pytest.fixture(scope="module")
def trained_experts(tmp_path_factory: pytest.TempPathFactory, sparse: ModelConfig) -> Found:
    """A checkpoint of a run of that model with all targets, after ten steps."""
    folder = tmp_path_factory.mktemp("lora")
    run_alone(replace(ROW, model=sparse), folder, optimization__learning_rate=0.02)
    return CheckpointRoot(folder / "root").committed()[0]


def with_loaded_adapters(found: Found, model: ModelConfig) -> Decoder:
    """The frozen decoder with the adapters of a checkpoint beside it."""
    decoder = starting_decoder(model)
    adapt(decoder, LoraSettings(rank=RANK, alpha=ALPHA))
    reader = CheckpointReader(found.path)
    with torch.no_grad():
        for part in adapter_parts(decoder):
            part.local().copy_(torch.from_numpy(reader.read(f"adapter.{part.hf_name}")))
    return decoder


def loss_of(decoder: Decoder, batch: Any) -> Tensor:
    forward = ForwardPass(decoder, "sdpa", torch.device("cpu"), lambda _unit: None)
    return forward.loss_sum(batch, 1.0)


def gradient_of(part: Part) -> Tensor:
    assert part.parameter.grad is not None
    return part.parameter.grad[part.row_start : part.row_end]


def test_each_expert_has_an_adapter_that_changes_its_weight_alone(trained_experts: Found, sparse: ModelConfig) -> None:
    """Against the merged weights: the same loss, and gradients by the chain rule of W + alpha / rank * B A."""
    adapted, merged_one = with_loaded_adapters(trained_experts, sparse), Decoder(sparse, Ops())
    open_weights(trained_experts.path).load_into(merged_one)
    batch = MotifBatches(ROW.config("unused"), sparse.vocab_size).micro_batch(3)
    losses = loss_of(adapted, batch), loss_of(merged_one, batch)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    weights = {part.hf_name: gradient_of(part) for part in merged_one.named_parts()}
    parts = {part.hf_name: part for part in adapter_parts(adapted)}
    experts = [name.removesuffix(".lora_A.weight") for name in parts if ".experts." in name and ".lora_A" in name]
    assert len(experts) == 3 * 8 * len(sparse.expert_layers)
    for name in experts:
        a, b = (parts[f"{name}.lora_{letter}.weight"] for letter in "AB")
        of_weight = ALPHA / RANK * weights[f"{name}.weight"]
        torch.testing.assert_close(gradient_of(a), b.local().T @ of_weight, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(gradient_of(b), of_weight @ a.local().T, rtol=1e-3, atol=1e-5)
    assert all(part.local().any() for part in parts.values())


def test_adapters_of_experts_are_exported_in_the_form_of_peft_and_merged(
    trained_experts: Found, sparse: ModelConfig, tmp_path: Path
) -> None:
    names = sparse.family.experts
    assert names is not None
    reader = CheckpointReader(trained_experts.path)
    export_adapter(reader, tmp_path / "peft")
    export_hugging_face(reader, tmp_path / "merged")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    merged_tensors = load_file(tmp_path / "merged" / "model.safetensors")
    modules = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    assert {names.gate, names.up, names.down, "q_proj"} <= {*modules}
    name = f"model.layers.1.{names.part}.experts.5.{names.down}"
    a, b = (tensors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    plain = torch.from_numpy(reader.read(f"model.{name}.weight"))
    torch.testing.assert_close(merged_tensors[f"{name}.weight"], plain + ALPHA / RANK * b @ a, rtol=1e-6, atol=1e-7)
    assert not torch.equal(merged_tensors[f"{name}.weight"], plain)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(model=SPARSE, lora=True),
        Layout(model=MIXED, lora=True, shard=4, expert=2),
        Layout(model=SPARSE, lora=True, tensor=2),
        Layout(model=DEEP, lora=True, pipeline=2, shard=2),
    ],
    ids=str,
)
def test_the_plan_counts_the_adapters_of_a_rank(layout: Layout) -> None:
    """Elements on one rank, as the model itself has them."""
    planned_job = Job.from_config(layout.config("unused").model_dump(), ModelSize.from_fields(asdict(layout.model)))
    whole = Decoder(layout.model, Ops(), device="meta")
    adapt(whole, LoraSettings(rank=RANK, alpha=ALPHA))
    experts = sum(part.num_elements for part in adapter_parts(whole) if ".experts." in part.hf_name)
    cut = [part for part in adapter_parts(whole) if ".experts." not in part.hf_name]
    dense = sum(part.num_elements / (1 if part.shard_dim is None else layout.tensor) for part in cut)
    if layout.tensor > 1:
        parts = [part for part in adapter_parts(whole) if ".experts." in part.hf_name]
        experts = sum(part.num_elements // (1 if part.shard_dim is None else layout.tensor) for part in parts)
    expected = (dense + experts / layout.expert) / layout.pipeline
    ranks = pipeline_ranks(planned_job)
    assert sum(rank_parameters(planned_job, rank).trained for rank in ranks) / len(ranks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {}}, "lora needs model_from"),
        ({**LORA, "lora": {"targets": ["q_proj", "q_proj"]}}, "targets q_proj, q_proj: each one once"),
        ({**LORA, "lora": {"targets": ["lm_head"]}}, "lora.targets"),
        ({**LORA, "lora": {"rank": 0}}, "lora.rank"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**changes)


def test_the_targets_of_the_configuration_are_those_of_the_model() -> None:
    assert LoraConfig().targets == TARGETS


def test_adapters_that_do_not_fit_the_manifest_are_damage(trained: Found) -> None:
    manifest = trained.manifest

    def changed(meta: Any, drop: str = "") -> Manifest:
        tensors = [info for name, info in manifest.tensors.items() if not drop or not name.startswith(drop)]
        return Manifest.build(step=1, writer="0a1b2c3d", tensors=tensors, pieces=[], meta={"adapter": meta})

    good = manifest.meta["adapter"]
    assert adapter_of(changed(good)) is not None
    name = "adapter.model.layers.0.self_attn.q_proj.lora_A"
    for damaged in (
        changed(None),
        changed({**good, "rank": 5}),
        changed({**good, "alpha": "8"}),
        changed(good, drop=name),
        changed(good, drop="model.model.layers.0.self_attn.q_proj"),
        changed(good, drop="adapter."),
    ):
        with pytest.raises(CheckpointCorrupt):
            adapter_of(damaged)
