"""The model's configuration out of a folder's files: config.json, with end tokens from generation_config.json.

Pure; called by `checkpoint` and `hugging_face`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker.model.config import ModelConfig
from stoker.model.config_json import token_ids


def read_config(raw: Mapping[str, Any], files: Mapping[str, bytes]) -> ModelConfig:
    """Return the configuration with the end tokens of generation_config.json.

    Chat models often end a turn with a token that only that file lists.
    """
    config = ModelConfig.from_hugging_face(raw)
    ids = token_ids(read_generation_config(files), "eos_token_id", "generation_config.json")
    return replace(config, eos_token_ids=ids) if ids else config


def read_generation_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the settings; empty where the file is missing. Raises ValueError where it holds no object."""
    try:
        settings = json.loads(files.get("generation_config.json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"generation_config.json: not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError("generation_config.json: must hold an object")
    return settings
