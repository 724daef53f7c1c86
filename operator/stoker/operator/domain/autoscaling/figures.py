"""The inputs of a decision as text for status and events. Pure; called by `rule`."""

from __future__ import annotations

import math

from stoker.operator.domain.autoscaling.decision import Limits, PoolInput
from stoker.operator.domain.autoscaling.prediction import Prediction


def shown_inputs(limits: Limits, seen: PoolInput, prediction: Prediction | None) -> dict[str, str]:
    """Name -> figure, with few digits: what was known, and what was predicted for the need."""
    shown = {
        "ready": str(seen.ready),
        "running": str(seen.running),
        "waiting": str(seen.waiting),
        "held": str(seen.held),
        "requestsPerSecond": _number(seen.rate),
        "startupSeconds": f"{seen.startup_s:.0f}",
        "kvUse": f"{seen.kv_use:.2f}",
    }
    shown |= {name: str(count) for name, count in (("borrowed", seen.borrowed), ("lent", seen.lent)) if count}
    if seen.copies > 1:
        shown["copies"] = str(seen.copies)
    if limits.placeable is not None:
        shown["placeable"] = str(limits.placeable)
    if limits.beside_other is not None:
        shown["besideOther"] = str(limits.beside_other)
    if seen.relief:
        shown["relief"] = str(seen.relief)
    if seen.demand is not None:
        shown["forecastPerSecond"] = _number(seen.demand.rate)
        shown["burstiness"] = f"{seen.demand.burstiness:.1f}"
        shown["promptTokens"] = f"{seen.demand.uncached.moment():.0f}"
        shown["outputTokens"] = f"{seen.demand.output:.0f}"
    if seen.curve is not None:
        shown["stepMs"] = _number(seen.curve.base_s * 1000)
        shown["promptTokenUs"] = _number(seen.curve.prompt_token_s * 1e6)
        shown["decodeTokenUs"] = _number(seen.curve.decode_token_s * 1e6)
    if prediction is not None:
        shown["predictedTtftMs"] = _number(prediction.first_token_s * 1000)
        shown["predictedItlMs"] = _number(prediction.gap_s * 1000)
    for name, value in (("ttftMs", seen.measured.first_token_s), ("itlMs", seen.measured.gap_s)):
        if value is not None:
            shown[f"measured{name[0].upper()}{name[1:]}"] = _number(value * 1000)
    if seen.measured.late_share:
        shown["lateShare"] = f"{seen.measured.late_share:.3f}"
    return shown


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "unbounded"
