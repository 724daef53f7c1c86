"""The models of a directory: Hugging Face folders, Stoker checkpoints and GGUF files, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class ModelFolder:
    """A model that can be loaded."""

    name: str
    path: Path
    num_bytes: int
    """Size of its files."""


@dataclass(frozen=True)
class ModelFolders:
    """What is directly below a directory, sorted by name."""

    models: Mapping[str, ModelFolder]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Names that may be models -> why that cannot be found out."""


def model_folders(directory: Path) -> ModelFolders:
    """The models directly below a directory. What is certainly none is left out.

    A GGUF file beside a folder of the same name keeps its ending, so that neither hides the other.

    Raises:
        OSError: the directory cannot be read.
    """
    found: list[ModelFolder] = []
    unreadable: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        try:
            model = _model_at(path)
        except FileNotFoundError:  # it has gone since it was listed
            continue
        except OSError as error:
            unreadable[path.name] = f"{path} cannot be read: {error.strerror}"
            continue
        found += [model] if model is not None else []
    folders = {model.name for model in found if model.name == model.path.name}
    named = (replace(model, name=model.path.name) if model.name in folders else model for model in found)
    return ModelFolders({model.name: model for model in named}, unreadable)


def _model_at(path: Path) -> ModelFolder | None:
    if path.is_file() and path.suffix == ".gguf":
        return ModelFolder(path.stem, path, path.stat().st_size)
    if not any((path / name).is_file() for name in ("config.json", "manifest.json")):
        return None
    files = (Path(at, name) for at, _, names in os.walk(path) for name in names)
    return ModelFolder(path.name, path, sum(map(file_bytes, files)))


def file_bytes(file: Path) -> int:
    """Size of a file; 0 where it has gone since it was listed, as parts of a download do."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
