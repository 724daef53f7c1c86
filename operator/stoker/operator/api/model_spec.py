"""The model that a job trains: its dimensions, or the source of its weights.

The dimensions have the names of the model's configuration.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef
from stoker.operator.api.value import Count, Decimal, Name, Path, Value, exactly_one, rule, rules

LayerIndex = Annotated[int, Field(ge=0, le=4095)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class RopeScaling(Value):
    """Llama 3's scaling of the rotary frequencies."""

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
    """Architecture and dimensions of a model with random weights."""

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
                "headDim must be even, because rotary positions turn pairs",
                shown="headDim {has(self.headDim) ? self.headDim : self.hiddenSize / self.numHeads} is odd:"
                " rotary positions turn pairs",
                field=".headDim",
            ),
            rule(
                "(self.architecture in ['mixtral', 'qwen3-moe']) == has(self.numExperts)"
                " && has(self.numExperts) == has(self.numExpertsPerToken)",
                "mixtral and qwen3-moe, and only they, need numExperts and numExpertsPerToken",
                field=".numExperts",
            ),
            rule(
                "!has(self.numExperts) || !has(self.numExpertsPerToken) || self.numExpertsPerToken <= self.numExperts",
                "numExpertsPerToken is above numExperts",
                shown="numExpertsPerToken {self.numExpertsPerToken} is above numExperts {self.numExperts}",
                field=".numExpertsPerToken",
            ),
            rule(
                "self.architecture == 'qwen3-moe' || !has(self.moeIntermediateSize) && self.normTopkProb"
                " && self.decoderSparseStep == 1 && !has(self.mlpOnlyLayers)",
                "moeIntermediateSize, normTopkProb, decoderSparseStep and mlpOnlyLayers are for qwen3-moe",
                field=".architecture",
            ),
            rule(
                "self.architecture != 'llama' || !has(self.slidingWindow)",
                "llama has no slidingWindow",
                field=".slidingWindow",
            ),
            rule(
                "self.maxWindowLayers == 0 || has(self.slidingWindow) && self.architecture in ['qwen2', 'qwen3']",
                "maxWindowLayers needs slidingWindow and qwen2 or qwen3",
                field=".maxWindowLayers",
            ),
            rule(
                "!self.attentionBias || self.architecture in ['llama', 'qwen3', 'qwen3-moe']",
                "attentionBias is for llama, qwen3 and qwen3-moe",
                field=".attentionBias",
            ),
        )
    )

    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
    vocab_size: Count
    """Rows of the embedding; at least the tokenizer's."""
    hidden_size: Count
    """Width of the residual stream."""
    intermediate_size: Count
    """Width of the feed-forward layer."""
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    num_heads: Count
    num_kv_heads: Count | None = None
    """Key and value heads; default: `numHeads`."""
    head_dim: Count | None = None
    """Elements of a head; default: `hiddenSize / numHeads`."""
    max_position_embeddings: Count | None = None
    """Longest sequence in tokens; default: `training.sequenceLength`."""
    rope_theta: Decimal = "10000"
    rope_scaling: RopeScaling | None = None
    norm_eps: Decimal = "1e-5"
    tie_embeddings: bool = False
    """Use the embedding as output layer."""
    attention_bias: bool = False
    """Add biases to the q, k, v and o projections."""
    initializer_range: Decimal = "0.02"
    """Standard deviation of the random weights."""
    sliding_window: Count | None = None
    """Tokens that one token attends to, itself included; default: all before it."""
    max_window_layers: Annotated[int, Field(ge=0, le=4096)] = 0
    """The first so many layers have no window."""
    num_experts: Count | None = None
    """Experts of one layer."""
    num_experts_per_token: Count | None = None
    moe_intermediate_size: Count | None = None
    """Width of one expert; default: `intermediateSize`."""
    norm_topk_prob: bool = True
    """The weights of a token's experts add up to one."""
    decoder_sparse_step: Annotated[int, Field(ge=1, le=4096)] = 1
    """Every so many layers have experts; the others are dense."""
    mlp_only_layers: Annotated[
        tuple[LayerIndex, ...], Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    """Further dense layers, counted from 0."""
    router_aux_loss_coef: Decimal = "0.001"
    """Weight of the load-balance loss."""
    router_z_loss_coef: Decimal = "0"
    """Weight of the router's z loss."""


class FromCheckpoint(Value):
    """Checkpoint of the same namespace; the job waits until it is verified."""

    name: Name
    state: Literal["Weights", "All"] = "Weights"
    """`Weights`, or `All`: also optimizer, schedule, data position and random state."""


class FromFolder(Value):
    """Folder or file on a mounted volume."""

    path: Path


class FromHub(Value):
    """Repository of the Hugging Face hub."""

    id: Annotated[str, Field(max_length=200, pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Annotated[str, Field(max_length=128, pattern=r"^[\w./-]+$")] = "main"
    token_secret_ref: KeyRef | None = None


class ModelFrom(Value):
    """Source of weights, architecture, tokenizer and chat template."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("checkpoint", "huggingFace", "gguf", "hub")))

    checkpoint: FromCheckpoint | None = None
    hugging_face: FromFolder | None = None
    """Folder with config.json and safetensors, on a mounted volume."""
    gguf: FromFolder | None = None
    """GGUF file on a mounted volume."""
    hub: FromHub | None = None
