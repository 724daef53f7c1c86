"""The cut of a model into pipeline stages for serving, and the weights of each stage.

A decode step reads all weights of a stage but the embedding, so these are its cost. Pure; every rank computes the same.

Called by `plan` and by `execution.rank_place`.
"""

from __future__ import annotations

from stoker.model.config import ModelConfig
from stoker.pod.pipeline.stage_cut import LayerCosts, cut_layers


def stage_layers(model: ModelConfig, stages: int) -> tuple[range, ...]:
    """Return each stage's layers. Raises ValueError where there are fewer layers than stages."""
    table = model.vocab_size * model.hidden_size
    layers = tuple(float(layer_parameters(model, layer)) for layer in range(model.num_layers))
    return cut_layers(LayerCosts(layers=layers, head=float(table)), stages)


def stage_parameters(model: ModelConfig, layers: range) -> int:
    """Count the weights of a stage. A tied table is held by the first and by the last."""
    table = model.vocab_size * model.hidden_size
    first, last = layers.start == 0, layers.stop == model.num_layers
    tables = first + last - (first and last and model.tie_embeddings)
    return sum(layer_parameters(model, layer) for layer in layers) + tables * table + last * model.hidden_size


def layer_parameters(model: ModelConfig, layer: int) -> int:
    """Count the weights of one layer; those of all layers add up to what `ModelConfig.num_parameters` counts."""
    hidden, sparse = model.hidden_size, len(model.expert_layers)
    tables = model.vocab_size * hidden * (1 if model.tie_embeddings else 2)
    dense, router = 3 * hidden * model.intermediate_size, hidden * (model.num_experts or 0)
    without = model.count_parameters(0) - tables - hidden - (model.num_layers - sparse) * dense - sparse * router
    experts = router + 3 * hidden * (model.num_experts or 0) * model.expert_size
    return without // model.num_layers + (experts if model.has_experts(layer) else dense)


def stage_of(rank: int, tensor: int, pipeline: int) -> int:
    """The stage of a rank; rank 0 is in the last one."""
    return pipeline - 1 - rank // tensor
