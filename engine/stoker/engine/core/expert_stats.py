"""The report on experts in main memory, from the counts of a rank's layers.

Called by `engine` for `Stats`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.engine.core.stats import ExpertStats
from stoker.model.hosted_experts import HostedExperts


def expert_stats(layers: Sequence[HostedExperts]) -> ExpertStats | None:
    """Add up the layers' counts; None where there are no such layers."""
    if not layers:
        return None
    return ExpertStats(
        slots=sum(layer.num_slots for layer in layers),
        experts=sum(len(layer.own) for layer in layers),
        expert_bytes=layers[0].expert_bytes,
        hits=sum(layer.meter.hits for layer in layers),
        misses=sum(layer.meter.misses for layer in layers),
        loaded_bytes=sum(layer.meter.loaded_bytes for layer in layers),
        waited_s=sum(layer.copies.waited_s for layer in layers),
    )
