"""Training of a model with experts: against a plain loop, with recompute, in logs and metrics, saved and resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.experts import Experts
from stoker.model.kernels.expert_rows import Routes
from stoker.model.kernels.ops import Ops
from stoker.pod.config_file import ConfigError
from stoker.trainer.agent.metrics import router_metrics
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import StepEvent
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.pipeline.slices import check_experts
from stoker.trainer.rank.schedule import learning_rate
from testing.trainer.tiny_run import TINY, SyntheticBatches, alone, tiny_config, tiny_decoder, train

SPARSE = replace(
    TINY,
    architecture="qwen3-moe",
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=24,
    num_layers=3,
    decoder_sparse_step=1,
    mlp_only_layers=(1,),
    router_aux_loss_coef=0.05,
    router_z_loss_coef=0.01,
)


def run(folder: Path, **changes: Any) -> list[StepEvent]:
    context = alone()
    train(tiny_config(folder, **changes), context, SPARSE)
    return context.channel.all(StepEvent)  # type: ignore[attr-defined, no-any-return]


class Watching(Ops):
    """Keeps the logits of the routers."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def route(self, logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes:
        self.seen.append(logits_TE)
        return super().route(logits_TE, num_choices, normalise)


def plain_loop(config: TrainerConfig) -> list[dict[str, Any]]:
    """Train with torch's AdamW; the loss of a step is written out."""
    decoder, batches = tiny_decoder(config, SPARSE), SyntheticBatches(config)
    optimization, steps = config.optimization, []
    decayed = [parameter for parameter in decoder.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in decoder.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": optimization.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (optimization.beta1, optimization.beta2)
    adam = torch.optim.AdamW(groups, betas=betas, eps=optimization.epsilon)
    total = config.training.total_steps
    assert total is not None
    for step in range(total):
        adam.zero_grad()
        targets, losses, tokens = batches.target_tokens(step), torch.zeros(3), torch.zeros(4)
        for batch in batches.micro_batches(step, 0, 1):
            attend = PackedAttend(decoder.ops, "auto", torch.as_tensor(batch.cu_seqlens))
            seen: list[Tensor] = []
            for block in decoder.blocks:
                if isinstance(block.feed_forward, Experts):
                    block.feed_forward.ops = Watching(seen)
            hidden = decoder(torch.as_tensor(batch.tokens_T), torch.as_tensor(batch.positions_T), attend)
            weights = torch.as_tensor(batch.weights_T)
            loss = decoder.cross_entropy(hidden, torch.as_tensor(batch.targets_T), weights).loss_sum / targets
            share = weights.sum() / targets
            balance = (
                torch.stack([torch.as_tensor(load_balancing_loss_func((logits,), 4, 2)) for logits in seen]).mean()
                * share
            )
            z = torch.stack([logits.logsumexp(-1).square().mean() for logits in seen]).mean() * share
            (loss + SPARSE.router_aux_loss_coef * balance + SPARSE.router_z_loss_coef * z).backward()
            losses += torch.stack([loss, balance, z]).detach()
            for logits in seen:
                tokens += torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), optimization.gradient_clipping)
        for group in adam.param_groups:
            group["lr"] = learning_rate(optimization, step + 1, total)
        adam.step()
        steps.append({"losses": losses.tolist(), "norm": float(norm), "tokens": tokens.tolist()})
    return steps


def test_a_run_equals_a_plain_loop_with_the_routers_losses(tmp_path: Path) -> None:
    expected = plain_loop(tiny_config(tmp_path))
    for ours, theirs in zip(run(tmp_path), expected, strict=True):
        found = [ours.loss, ours.router_balance_loss, ours.router_z_loss]
        assert found == pytest.approx(theirs["losses"], rel=2e-5)
        assert ours.grad_norm == pytest.approx(theirs["norm"], rel=2e-5)
        assert list(ours.expert_tokens or ()) == theirs["tokens"]
        assert ours.expert_imbalance is not None
        assert ours.expert_imbalance >= 1.0


def test_recompute_counts_tokens_and_losses_once(tmp_path: Path) -> None:
    plain, again = run(tmp_path / "plain"), run(tmp_path / "again", memory__activation_checkpointing="full")
    for ours, theirs in zip(again, plain, strict=True):
        assert (ours.step, ours.expert_tokens) == (theirs.step, theirs.expert_tokens)
        for name in ("loss", "grad_norm", "router_balance_loss", "router_z_loss"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5)


def test_a_run_saves_a_tensor_for_each_expert_and_resumes_bitwise(tmp_path: Path) -> None:
    saves = {"checkpoint__interval_steps": 3}
    events = run(tmp_path, **saves)
    root = CheckpointRoot(tmp_path / "root")
    reader = CheckpointReader(root.committed()[0].path)
    shapes = {name: tuple(info.shape) for name, info in reader.manifest.tensors.items()}
    assert shapes["model.model.layers.0.mlp.gate.weight"] == (4, 32)
    assert shapes["model.model.layers.2.mlp.experts.3.up_proj.weight"] == (24, 32)
    assert shapes["optimizer.exp_avg.model.layers.2.mlp.experts.0.down_proj.weight"] == (32, 24)
    assert "model.model.layers.1.mlp.experts.0.up_proj.weight" not in shapes
    shutil.rmtree(root.committed()[0].path)  # of step 6: a resumed run begins at step 3
    again = run(tmp_path, **saves)
    assert [(event.step, event.loss, event.grad_norm) for event in again] == [
        (event.step, event.loss, event.grad_norm) for event in events[3:]
    ]


def test_the_log_and_the_metrics_hold_losses_and_tokens_of_each_expert(tmp_path: Path) -> None:
    event = run(tmp_path, logging__jsonl=str(tmp_path / "log.jsonl"))[-1]
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    names = ("router_balance_loss", "router_z_loss", "expert_imbalance")
    assert [line[name] for name in names] == [getattr(event, name) for name in names]
    assert tuple(line["expert_tokens"]) == event.expert_tokens
    assert sum(line["expert_tokens"]) == 8 * 24 * 2 * 2  # sequences x tokens x experts of a token x layers
    metrics = {metric.name: metric for metric in router_metrics(event)}
    assert set(metrics) == {f"stoker_trainer_{name}" for name in (*names, "expert_tokens")}
    samples = metrics["stoker_trainer_expert_tokens"].samples
    assert [(sample.labels["expert"], sample.value) for sample in samples] == [
        (str(expert), float(count)) for expert, count in enumerate(event.expert_tokens or ())
    ]
    dense = alone()
    train(tiny_config(tmp_path / "dense", training__total_steps=1), dense)
    (dense_event,) = dense.channel.all(StepEvent)  # type: ignore[attr-defined]
    assert list(router_metrics(dense_event)) == []


@pytest.mark.parametrize(
    ("dims", "model", "message"),
    [
        (ParallelDims(shard=2, expert=2), TINY, "expert 2 needs a model with experts, got architecture qwen3"),
    ],
)
def test_a_mesh_that_does_not_fit_the_experts_is_refused(dims: ParallelDims, model: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_experts(model, dims)
