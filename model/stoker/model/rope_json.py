"""Reading the rotary fields of a Hugging Face `config.json`. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.model.config_json import given, number, whole_number
from stoker.model.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)


class Rope(NamedTuple):
    """Positions of a model."""

    theta: float
    scaling: RopeScaling | None
    max_position_embeddings: int


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), and the longest context.

    With yarn that is at least `factor` times the original one, whatever the file says: models are shipped with their
    original context, and yarn is added to the file by hand.
    """
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    fields = _checked(name, raw.get(name) or {})
    theta = {"rope_theta": raw.get("default_theta", 10000.0)} | given({**raw, **given(fields)})
    longest = whole_number(raw, "max_position_embeddings")
    scaling = _scaling(fields, longest)
    if isinstance(scaling, YarnScaling):
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    return Rope(number(theta, "rope_theta"), scaling, longest)


def _checked(name: str, fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping):
        raise ValueError(f"config.json: {name} must be an object, not {fields!r}")
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise ValueError(f"config.json: not supported yet: {name} per layer type: {', '.join(fields)}")
    if (share := fields.get("partial_rotary_factor", 1)) not in (None, 1):
        raise ValueError(f"config.json: not supported yet: partial_rotary_factor = {share!r}")
    return fields


def _scaling(fields: Mapping[str, Any], longest: int) -> RopeScaling | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=number(fields, "factor"))
    if kind == "yarn":
        return _yarn(given(fields), longest)
    if kind == "llama3":
        return Llama3Scaling(
            factor=number(fields, "factor"),
            low_freq_factor=number(fields, "low_freq_factor"),
            high_freq_factor=number(fields, "high_freq_factor"),
            original_max_position_embeddings=whole_number(fields, "original_max_position_embeddings"),
        )
    raise ValueError(f"config.json: not supported yet: rope_scaling {kind!r}; allowed: default, linear, llama3, yarn")


def _yarn(fields: Mapping[str, Any], longest: int) -> YarnScaling:
    fields = {"beta_fast": 32, "beta_slow": 1, "mscale": 0, "mscale_all_dim": 0, **fields}
    factor = number(fields, "factor")
    usual = yarn_attention_factor(factor, number(fields, "mscale"), number(fields, "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=whole_number(
            {"original_max_position_embeddings": longest, **fields}, "original_max_position_embeddings"
        ),
        attention_factor=number({"attention_factor": usual, **fields}, "attention_factor"),
        beta_fast=number(fields, "beta_fast"),
        beta_slow=number(fields, "beta_slow"),
        truncate=bool(fields.get("truncate", True)),
    )
