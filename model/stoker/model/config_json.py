"""Reading a Hugging Face `config.json` as foreign input: values by name, and what this build refuses. No torch here."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from stoker.model.family import BY_MODEL_TYPE, Family

MOST_LAYERS = MOST_EXPERTS = 4096
"""Far above any model: a number in a damaged file would make lists that no memory holds."""


def read_window(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Read the sliding window. Raises ValueError where `layer_types` gives other layers a window."""
    window, full = raw.get("sliding_window"), 0
    if family.window == "never" or (family.window != "always" and not raw.get("use_sliding_window")):
        window = None
    layers = whole_number(raw, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, not {layers}")
    if window is not None and family.window == "switched by layer":
        full = min(whole_number(raw, "max_window_layers"), layers)
    if full == layers:
        window = None
    plain = window is None
    kinds = ["full_attention" if plain or layer < full else "sliding_attention" for layer in range(layers)]
    if raw.get("layer_types") not in (None, [], kinds):
        raise ValueError(f"config.json: not supported yet: layer_types = {raw['layer_types']!r}")
    if window is None:
        return {}
    return {"sliding_window": whole_number(raw, "sliding_window"), "max_window_layers": full}


def read_experts(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Read the fields of a family with experts."""
    if jitter := raw.get("router_jitter_noise"):
        raise ValueError(f"config.json: not supported yet: router_jitter_noise = {jitter!r}")
    fields: dict[str, Any] = {
        "num_experts": whole_number(raw, read_name(raw, "num_experts", "num_local_experts", "default_experts")),
        "num_experts_per_token": whole_number(raw, "num_experts_per_tok"),
        "router_aux_loss_coef": number({"router_aux_loss_coef": 0.001} | given(raw), "router_aux_loss_coef"),
        "router_z_loss_coef": number({"router_z_loss_coef": 0} | given(raw), "router_z_loss_coef"),
    }
    if architecture == "mixtral":
        return fields
    size = whole_number(raw, "moe_intermediate_size")
    return fields | {
        "moe_intermediate_size": None if size == raw.get("intermediate_size") else size,
        "norm_topk_prob": bool(raw.get("norm_topk_prob")),
        "decoder_sparse_step": whole_number({"decoder_sparse_step": 1} | given(raw), "decoder_sparse_step"),
        "mlp_only_layers": tuple(int(layer) for layer in raw.get("mlp_only_layers") or ()),
    }


def read_name(raw: Mapping[str, Any], *names: str) -> str:
    """Return the first name that is given: transformers has several for some fields."""
    return next((name for name in names if raw.get(name) is not None), names[0])


def needed(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json: {name} is missing")
    return raw[name]


def given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are given; null counts as missing."""
    return {name: value for name, value in raw.items() if value is not None}


def whole_number(raw: Mapping[str, Any], name: str) -> int:
    value = needed(raw, name)
    if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"config.json: {name} must be a whole number, not {value!r}")
    return int(value)


def token_ids(raw: Mapping[str, Any], name: str, file: str) -> tuple[int, ...]:
    """Return a token id, or a list of them; nulls are left out. Raises ValueError."""
    value = raw.get(name)
    listed = [token for token in (value if isinstance(value, list) else [value]) if token is not None]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in listed):
        raise ValueError(f"{file}: {name} must be a token id or a list of them, not {reprlib.repr(value)}")
    return tuple(listed)


def number(raw: Mapping[str, Any], name: str) -> float:
    """Return a finite number: Python's JSON has NaN and Infinity, too."""
    value = needed(raw, name)
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"config.json: {name} must be a number, not {reprlib.repr(value)}")
    return float(value)


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse every feature of the families that changes the computation and is not built."""
    if (kind := raw.get("model_type")) not in BY_MODEL_TYPE:
        raise ValueError(f"config.json: not supported yet: model_type {kind!r}; allowed: {', '.join(BY_MODEL_TYPE)}")
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": kind == "llama" and bool(raw.get("use_sliding_window")),
        "sliding_window": kind == "llama" and raw.get("sliding_window") and raw.get("use_sliding_window") is None,
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1) not in (None, 1),
        "quantization_config": raw.get("quantization_config") is not None,
        "compression_config": raw.get("compression_config") is not None,
        "pretraining_tp": raw.get("pretraining_tp", 1) not in (None, 1),
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"config.json: not supported yet: {name} = {raw[name]!r}")
