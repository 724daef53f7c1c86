"""The files that travel with weights: tokenizer, chat template, generation settings. They are bytes here; nobody interprets them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TRAVELLING_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def read_travelling_files(folder: Path) -> Mapping[str, bytes]:
    """Name -> content of those that the folder has."""
    return {name: (folder / name).read_bytes() for name in TRAVELLING_FILES if (folder / name).is_file()}
