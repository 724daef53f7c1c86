"""Makes the stages of a rank from its slices of the model. Called by `build`."""

from __future__ import annotations

from stoker.model.decoder import Decoder
from stoker.model.kernels.weight_queue import WeightQueue, set_weight_queue
from stoker.pod.pipeline.actions import ScheduleName
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.layers_again import LayersAgain
from stoker.trainer.rank.pipeline.stage import Stage
from stoker.trainer.rank.plan_check import choose_layers
from stoker.trainer.rank.savings import Savings
from stoker.trainer.rank.zero import Zero


def stage_again(config: TrainerConfig, number: int, decoder: Decoder, zero: Zero) -> LayersAgain | None:
    """What backward of a stage computes again in each layer, with a budget of activations."""
    if config.memory.activation_budget_gib is None:
        return None
    choices = choose_layers(config, decoder.config, (number, len(decoder.blocks)))
    return LayersAgain(decoder, zero.ready, choices)


def make_stage(
    number: int,
    decoder: Decoder,
    zero: Zero,
    name: ScheduleName,
    recompute: bool,
    again: LayersAgain | None = None,
) -> Stage:
    """A stage whose weights' gradients are put off where the schedule splits backward."""
    queue = WeightQueue() if name == "ZeroBubble" else None
    if queue is not None:
        for parameter in decoder.blocks.parameters():
            if parameter.requires_grad:
                set_weight_queue(parameter, queue)
    savings = Savings(decoder.ops, zero.gathered)
    return Stage(number, decoder, zero.ready, zero, recompute=recompute, queue=queue, savings=savings, again=again)
