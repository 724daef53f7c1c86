"""Each optimizer against a plain reference over 50 steps, weight decay by name, and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.pod.config_file import ConfigError
from stoker.trainer.protocol.config import NO_DECAY, OptimizationConfig
from stoker.trainer.rank.bucket import Decays, decays_matrices, make_buckets
from stoker.trainer.rank.bucket_state import ZeroSettings
from stoker.trainer.rank.clip import GradientNorm
from stoker.trainer.rank.lamb import Lamb, tensor_sizes
from stoker.trainer.rank.mesh import one_rank_mesh
from stoker.trainer.rank.optimizer import Adam, Optimizer
from stoker.trainer.rank.weight_decay import decay_by_name
from stoker.trainer.rank.zero import Zero
from testing.trainer.tiny_run import TINY

STEPS, RATE = 50, 3e-3
Parameters = Sequence[nn.Parameter]
Reference = Callable[[Parameters, Parameters, OptimizationConfig], torch.optim.Optimizer]


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of the paper, tensor by tensor, in fp64."""

    def __init__(self, decayed: Parameters, others: Parameters, config: OptimizationConfig) -> None:
        groups = [{"params": decayed, "decay": config.weight_decay}, {"params": others, "decay": 0.0}]
        super().__init__(groups, {})
        self.config, self.steps = config, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for x in group["params"]:
                self.update(x, group["decay"])

    def update(self, x: Tensor, decay: float) -> None:
        config, state = self.config, self.state[x]
        grad = torch.zeros_like(x, dtype=torch.float64) if x.grad is None else x.grad.double()
        m = config.beta1 * state.get("m", 0) + (1 - config.beta1) * grad
        v = config.beta2 * state.get("v", 0) + (1 - config.beta2) * grad**2
        state["m"], state["v"] = m, v
        m_hat, v_hat = m / (1 - config.beta1**self.steps), v / (1 - config.beta2**self.steps)
        direction = m_hat / (v_hat.sqrt() + config.epsilon) + decay * x.double()
        norm, length = x.double().norm(), direction.norm()
        ratio = norm / length if norm > 0 and length > 0 else 1.0
        x -= (RATE * ratio * direction).float()


def torchs(kind: type[torch.optim.Adam]) -> Reference:
    def make(decayed: Parameters, others: Parameters, config: OptimizationConfig) -> torch.optim.Optimizer:
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return kind(groups, lr=RATE, betas=(config.beta1, config.beta2), eps=config.epsilon)

    return make


REFERENCES: dict[str, Reference] = {
    "adam": torchs(torch.optim.Adam),
    "adamw": torchs(torch.optim.AdamW),
    "lamb": PlainLamb,
}


class Regression(nn.Module):
    """Three layers; the weight of the first one is two tensors, of which the second starts as zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fused = nn.Linear(40, 70)
        self.norm = nn.LayerNorm(70)
        self.out = nn.Linear(70, 30, bias=False)
        with torch.no_grad():
            self.fused.weight[50:] = 0

    def project(self, x: Tensor) -> Tensor:
        projected: Tensor = self.fused(x)
        return projected

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 40, generator=generator), torch.randn(16, 30, generator=generator)
        loss: Tensor = (self.out(self.norm(torch.tanh(self.project(x)))) - y).square().mean()
        return loss


SPLIT = [50 * 40, 20 * 40]


def make_zero(model: nn.Module, optimizer: Optimizer, decays: Decays = decays_matrices) -> Zero:
    settings = ZeroSettings(stage=1, compute_dtype=torch.float32, any_data_parallel=False)
    buckets = make_buckets([], model, decays=decays)
    return Zero(buckets, one_rank_mesh(), optimizer, GradientNorm(Ops(), by_line=False), settings)


def make_optimizer(config: OptimizationConfig, model: Regression) -> Optimizer:
    if config.optimizer != "lamb":
        return Adam(config, Ops())
    return Lamb(config, Ops(), lambda _kind, cells: cells, by_line=False, sizes={id(model.fused.weight): SPLIT})


def train(model: Regression, zero: Zero, steps: int = STEPS) -> None:
    for step in range(steps):
        zero.begin_step(1)
        model.loss(step).backward()
        zero.end_micro_batch()
        zero.finish_reduce()
        zero.update(step + 1, RATE, torch.ones(()))
    zero.wait_parameters()


class Split(Regression):
    """The same model with a parameter for each tensor, as the reference sees it."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.fused.weight.detach()
        self.first, self.second = nn.Parameter(weight[:50].clone()), nn.Parameter(weight[50:].clone())
        self.bias = nn.Parameter(self.fused.bias.detach().clone())
        del self.fused

    def project(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.cat([self.first, self.second]), self.bias)


@pytest.mark.parametrize("name", REFERENCES)
def test_an_optimizer_equals_its_reference_over_fifty_steps(name: str) -> None:
    config = OptimizationConfig.model_validate({"optimizer": name, "learning_rate": RATE, "weight_decay": 0.1})
    model, plain = Regression(), Split()
    train(model, make_zero(model, make_optimizer(config, model)))
    decayed = [value for value in plain.parameters() if value.ndim > 1]
    reference = REFERENCES[name](decayed, [value for value in plain.parameters() if value.ndim == 1], config)
    for step in range(STEPS):
        reference.zero_grad()
        plain.loss(step).backward()
        reference.step()
    expected = {"fused.weight": torch.cat([plain.first, plain.second]), "fused.bias": plain.bias}
    expected |= {"norm.weight": plain.norm.weight, "norm.bias": plain.norm.bias, "out.weight": plain.out.weight}
    for key, value in model.named_parameters():
        torch.testing.assert_close(value, expected[key], rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(name: str, scale: float) -> None:
    config = OptimizationConfig.model_validate({"optimizer": name, "learning_rate": RATE})
    model = Regression()
    zero = make_zero(model, make_optimizer(config, model))
    train(model, zero, steps=2)
    before = [held.clone() for held in zero.states[0].shards().values()]
    zero.begin_step(1)
    (model.loss(9) * float("inf")).backward()
    zero.end_micro_batch()
    zero.finish_reduce()
    zero.update(3, RATE, torch.tensor(scale))
    assert all(torch.equal(*pair) for pair in zip(before, zero.states[0].shards().values(), strict=True))


@pytest.mark.parametrize("name", REFERENCES)
def test_frozen_parameters_keep_their_values_while_the_others_learn(name: str) -> None:
    config = OptimizationConfig.model_validate({"optimizer": name, "learning_rate": RATE, "weight_decay": 0.1})
    model = Regression()
    model.out.weight.requires_grad_(False)
    model.fused.bias.requires_grad_(False)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    train(model, make_zero(model, make_optimizer(config, model)), steps=3)
    changed = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert changed == {"fused.weight", "norm.weight", "norm.bias"}


def decoder() -> Decoder:
    return Decoder(TINY, Ops())


def test_by_default_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = decoder()
    decays = decay_by_name(model.named_parts(), NO_DECAY)
    assert all(decays(parameter) == decays_matrices(parameter) for parameter in model.parameters())


def test_tensors_without_decay_are_chosen_by_name() -> None:
    model = decoder()
    decays = decay_by_name(model.named_parts(), ["*embed_tokens*", "*layers.1.*_norm.weight"])
    undecayed = {name for name, parameter in model.named_parameters() if not decays(parameter)}
    assert undecayed == {"embedding.weight", "blocks.1.q_norm.weight", "blocks.1.k_norm.weight"}
    plan = make_buckets([], model, decays=decays)[0].plan
    assert {item.name for item in plan.ranges if not item.decay} == undecayed


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*lm_hed*", r"optimization.noDecay '\*lm_hed\*' matches no tensor of the model"),
        ("*.q_proj.weight", r"q_proj.weight alone; the tensors .*k_proj.weight.* are one parameter"),
    ],
)
def test_a_pattern_that_cannot_hold_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decay_by_name(decoder().named_parts(), [pattern])


def test_sizes_of_tensors_cover_each_parameter() -> None:
    model = decoder()
    sizes = tensor_sizes(model.named_parts())
    np.testing.assert_array_equal(
        [sum(sizes[id(value)]) for value in model.parameters()], [value.numel() for value in model.parameters()]
    )
