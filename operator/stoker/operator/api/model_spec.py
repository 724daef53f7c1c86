"""Which model a job trains: its dimensions, or where its weights come from. The dimensions carry the names of the model's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.value import Count, Decimal, Name, Path, Value, exactly_one, rule, rules

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class RopeScaling(Value):
    """Llama 3's stretching of the rotary frequencies."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("double(self.factor) >= 1.0", "factor must be at least 1", field=".factor"),
            rule(
                "0.0 < double(self.lowFreqFactor) && double(self.lowFreqFactor) < double(self.highFreqFactor)",
                "lowFreqFactor must be above 0 and below highFreqFactor",
                field=".lowFreqFactor",
            ),
        )
    )

    factor: Decimal
    low_freq_factor: Decimal = "1"
    high_freq_factor: Decimal = "4"
    original_max_position_embeddings: Count = 8192


class ModelSpec(Value):
    """Architecture and dimensions of a model that starts from random weights."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.numKvHeads) || self.numHeads % self.numKvHeads == 0",
                "numHeads must be a multiple of numKvHeads",
                shown="numHeads {self.numHeads} is not a multiple of numKvHeads {self.numKvHeads}",
                field=".numKvHeads",
            ),
            rule(
                "has(self.headDim) || self.hiddenSize % self.numHeads == 0",
                "without headDim, hiddenSize must be a multiple of numHeads",
                shown="hiddenSize {self.hiddenSize} is not a multiple of numHeads {self.numHeads}: give headDim",
                field=".hiddenSize",
            ),
            rule(
                "(has(self.headDim) ? self.headDim : self.hiddenSize / self.numHeads) % 2 == 0",
                "headDim must be even, rotary positions turn pairs",
                shown="headDim {has(self.headDim) ? self.headDim : self.hiddenSize / self.numHeads} is odd: rotary positions turn pairs",
                field=".headDim",
            ),
            rule(
                "(self.architecture == 'moe') == has(self.numExperts) && has(self.numExperts) == has(self.numExpertsPerToken)",
                "numExperts and numExpertsPerToken belong to architecture moe, which needs both",
                field=".numExperts",
            ),
            rule(
                "!has(self.numExperts) || !has(self.numExpertsPerToken) || self.numExpertsPerToken <= self.numExperts",
                "numExpertsPerToken is above numExperts",
                shown="numExpertsPerToken {self.numExpertsPerToken} is above numExperts {self.numExperts}",
                field=".numExpertsPerToken",
            ),
        )
    )

    architecture: Literal["llama", "mistral", "qwen3", "moe"]
    vocab_size: Count
    """At least the tokenizer's."""
    hidden_size: Count
    intermediate_size: Count
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    num_heads: Count
    num_kv_heads: Count | None = None
    """Default: `numHeads`."""
    head_dim: Count | None = None
    """Default: `hiddenSize / numHeads`."""
    max_position_embeddings: Count | None = None
    """Default: `training.sequenceLength`."""
    rope_theta: Decimal = "10000"
    rope_scaling: RopeScaling | None = None
    norm_eps: Decimal = "1e-5"
    tie_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: Decimal = "0.02"
    sliding_window: Count | None = None
    """Tokens that one token sees (mistral)."""
    num_experts: Count | None = None
    num_experts_per_token: Count | None = None
    moe_intermediate_size: Count | None = None
    """Width of one expert; default: `intermediateSize`."""


class FromCheckpoint(Value):
    """A Checkpoint object of the same namespace that is Ready and verified."""

    name: Name
    state: Literal["Weights", "All"] = "Weights"
    """`All` also takes optimizer, schedule, data position and random state."""


class FromFolder(Value):
    """A folder or file on a mounted volume."""

    path: Path


class FromHub(Value):
    """A repository of the Hugging Face hub."""

    id: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    revision: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._/-]+$")] = "main"
    token_secret_ref: KeyRef | None = None


class ModelFrom(Value):
    """Weights, architecture, tokenizer and chat template to start from."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("checkpoint", "huggingFace", "gguf", "hub")))

    checkpoint: FromCheckpoint | None = None
    hugging_face: FromFolder | None = None
    """A folder with config.json and safetensors."""
    gguf: FromFolder | None = None
    """A GGUF file."""
    hub: FromHub | None = None
