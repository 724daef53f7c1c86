"""Weights out of a Stoker checkpoint folder: its `model.*` tensors, verified while they are read.

Adapters of a LoRA run are merged into them.

Read-only. Made by `source`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stoker.checkpoint.adapter import adapter_of, read_merged
from stoker.checkpoint.box import Box
from stoker.checkpoint.dtype import from_float32
from stoker.checkpoint.reader import CheckpointReader
from stoker.model.decoder import Decoder
from stoker.model.travelling_files import check_size, size_limit
from stoker.model.weights.config_file import read_config
from stoker.model.weights.loading import OnProgress, WeightsError, load_parts

PREFIX = "model."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointWeights:
    """A folder as a source of weights.

    Opening raises the checkpoint's own errors where the folder is damaged or has another digest.
    """

    kind = "checkpoint"

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        self.path = Path(folder)
        reader = CheckpointReader(self.path, digest)
        self.digest: str = reader.manifest.digest
        names = [entry.name for entry in reader.manifest.files]
        if "config.json" not in names:
            raise WeightsError(f"{folder}: the checkpoint carries no config.json, so it cannot be served")
        self.store = CheckpointStore(reader)
        self.dtype = self.store.dtype
        for entry in reader.manifest.files:
            check_size(f"{folder}: {entry.name}", entry.bytes, size_limit(entry.name))
        self.tokenizer_files: Mapping[str, bytes] = {
            name: reader.read_file(name) for name in names if name != "config.json"
        }
        self.config = read_config(json.loads(reader.read_file("config.json")), self.tokenizer_files)

    def load_into(self, decoder: Decoder, progress: OnProgress | None = None) -> None:
        load_parts(decoder, self.store, progress)


class CheckpointStore:
    """The `model.*` tensors of a reader under Hugging Face names."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.adapter = adapter_of(reader.manifest)
        self.infos = {
            name.removeprefix(PREFIX): info for name, info in reader.manifest.tensors.items() if name.startswith(PREFIX)
        }
        for name, info in self.infos.items():
            if info.dtype not in DTYPES:
                raise WeightsError(
                    f"{reader.folder}: not supported yet: {name} of dtype {info.dtype}; allowed: {', '.join(DTYPES)}"
                )
        if not self.infos:
            raise WeightsError(f"{reader.folder}: the checkpoint holds no weights")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the largest tensor."""
        return DTYPES[max(self.infos.values(), key=lambda info: info.bytes).dtype]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(info.shape) for name, info in self.infos.items()}

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        box, stored = Box(start, size), self.infos[name].dtype
        if self.adapter is not None and self.adapter.adapts(name):
            found = from_float32(read_merged(self.reader, self.adapter, name, box), stored)
        else:
            found = self.reader.read(PREFIX + name, box)
        values, dtype = torch.from_numpy(found), DTYPES[stored]
        return values if values.dtype == dtype else values.view(dtype)  # bfloat16 comes as integers
