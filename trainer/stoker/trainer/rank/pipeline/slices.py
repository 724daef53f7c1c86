"""The layers of each pipeline stage, and the slices of the model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.parameter import Part
from stoker.pod.pipeline.stage_cut import cut_layers, estimate_costs


@dataclass(frozen=True)
class Slices:
    """The stages of one rank by number, in the order of the forward pass."""

    decoders: dict[int, Decoder]

    def named_parts(self) -> Iterator[Part]:
        """Yield the parts of all stages."""
        for decoder in self.decoders.values():
            yield from decoder.named_parts()


def stage_layers(model: ModelConfig, num_stages: int, sequence_length: int) -> Sequence[range]:
    """Return the layers of every stage: as even in estimated cost as they can be, embedding and output layer counted.

    Raises:
        ValueError: the model has fewer layers than stages.
    """
    costs = estimate_costs(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        sequence_length=sequence_length,
    )
    return cut_layers(costs, num_stages)
