"""A model's head, read before others make room for it: one that can never be loaded takes no loaded one's place."""

from __future__ import annotations

import json

from stoker.engine.model_path import check_model
from stoker.engine.shelf.folders import ModelFolder
from stoker.model.config import ModelConfig
from stoker.model.weights.gguf_file import GgufFile
from stoker.model.weights.gguf_tokenizer import tokenizer_files


def check_head(model: ModelFolder) -> None:
    """Read the configuration of a model, without its weights. A checkpoint's is read with them.

    Raises:
        ValueError: names the file and what is wrong.
        OSError: it cannot be read.
    """
    check_model(model.path)
    config = model.path / "config.json"
    if model.path.is_file():
        file = GgufFile(model.path)
        file.config()
        tokenizer_files(file)
    elif config.is_file():
        try:
            ModelConfig.from_hugging_face(json.loads(config.read_text(encoding="utf-8")))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"{config}: {error}") from error
