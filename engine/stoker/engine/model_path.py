"""The path of a model on a command line, checked before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.pod.config_file import ConfigError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Form of a model's name on the Hugging Face hub: `ORGANISATION/MODEL`."""


def check_model(path: Path) -> None:
    """Refuse a path that holds no model, before anything is loaded.

    Raises:
        ConfigError: names the path and what is needed.
    """
    if not path.exists() and HUB_NAME.fullmatch(str(path)):
        raise ConfigError(
            f"{path} is not on this machine; for that repository of the Hugging Face hub give hf://{path}"
        )
    if not path.exists():
        raise ConfigError(f"{path} does not exist; a folder or a GGUF file is needed")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file")
    elif (path / "config.json").exists() and not (path / "tokenizer.json").exists():
        raise ConfigError(f"{path}: tokenizer.json is missing")
    elif not (path / "config.json").exists() and not (path / "manifest.json").exists():
        steps = sorted(path.glob("step-*.*/manifest.json"))
        hint = f"; it holds checkpoints, such as {steps[-1].parent}" if steps else ""
        raise ConfigError(
            f"{path}: neither a Hugging Face folder (config.json) nor a checkpoint folder (manifest.json){hint}"
        )
