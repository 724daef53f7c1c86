"""The models of a directory: Hugging Face folders, Stoker checkpoints and GGUF files, by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class ModelFolder:
    """A model that can be loaded."""

    name: str
    path: Path
    num_bytes: int
    """Size of its files."""


def model_folders(directory: Path) -> dict[str, ModelFolder]:
    """The models directly below a directory, sorted by name. Anything else there is left out.

    A GGUF file beside a folder of the same name keeps its ending, so that neither hides the other.

    Raises:
        OSError: the directory cannot be read.
    """
    found = [model for path in sorted(directory.iterdir()) if (model := _model_at(path)) is not None]
    folders = {model.name for model in found if model.name == model.path.name}
    named = (replace(model, name=model.path.name) if model.name in folders else model for model in found)
    return {model.name: model for model in named}


def _model_at(path: Path) -> ModelFolder | None:
    try:
        if path.is_file() and path.suffix == ".gguf":
            return ModelFolder(path.stem, path, path.stat().st_size)
        if not any((path / name).is_file() for name in ("config.json", "manifest.json")):
            return None
    except OSError:  # it may not be read, or has gone since it was listed
        return None
    files = (Path(at, name) for at, _, names in os.walk(path) for name in names)
    return ModelFolder(path.name, path, sum(map(file_bytes, files)))


def file_bytes(file: Path) -> int:
    """Size of a file; 0 where it has gone since it was listed, as parts of a download do."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
