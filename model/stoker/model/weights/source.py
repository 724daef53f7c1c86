"""The sources of weights: a Hugging Face folder, a GGUF file or a Stoker checkpoint folder, found by their content.

`open_weights` is how trainer, engine and `stoker model` reach weights; no other module chooses the format. Read-only: a
source can be loaded any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from stoker.checkpoint.bucket_storage import is_bucket_path
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.weights.checkpoint import CheckpointWeights
from stoker.model.weights.hugging_face import HuggingFaceWeights
from stoker.model.weights.loading import NoWeights, OnProgress, TensorStore, WeightsError


class WeightsSource(Protocol):
    """Weights that can be loaded any number of times."""

    @property
    def kind(self) -> str:
        """huggingFace | gguf | checkpoint"""
        ...

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """The stored weights'; float32 for quantised ones."""
        ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Name -> content of the files that travel along: tokenizer, chat template, generation_config.json; not
        config.json.

        May be empty.
        """
        ...

    @property
    def store(self) -> TensorStore:
        """The tensors one by one, for a caller that fills a decoder piece by piece."""
        ...

    def load_into(self, decoder: Decoder, progress: OnProgress | None = None) -> None:
        """Fill this rank's parameters.

        Raises ValueError (WeightsError, CheckpointError) that names what does not fit.
        """
        ...


def open_weights(path: Path | str, digest: str | None = None) -> WeightsSource:
    """Look at `path` and open it. `digest`: a checkpoint's manifest digest that must match; refused for other kinds.

    Raises:
        NoWeights: there are none of a kind that is known.
        ValueError: they cannot be used (WeightsError, GgufError, CheckpointError).
        OSError: they cannot be read.
    """
    path = Path(path)
    if is_bucket_path(path) or (path / "manifest.json").is_file():
        return CheckpointWeights(path, digest)
    if digest is not None:
        raise WeightsError(f"{path}: a digest was given, but this is no checkpoint folder (no manifest.json)")
    if (path / "config.json").is_file():
        return HuggingFaceWeights(path)
    if path.is_file():
        from stoker.model.weights.gguf_weights import GgufWeights  # imports tables of its formats

        return GgufWeights(path)
    if not path.exists():
        raise NoWeights(f"{path} does not exist")
    raise NoWeights(
        f"{path}: neither a Hugging Face folder (config.json), nor a checkpoint folder (manifest.json), nor a GGUF file"
    )
