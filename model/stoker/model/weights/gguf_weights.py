"""GGUF weights: dequantised, with llama.cpp's order of rows undone, under Hugging Face names.

Read-only. Made by `source`; `stoker model` converts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.weights.gguf_file import GgufError, GgufFile
from stoker.model.weights.gguf_tokenizer import tokenizer_files
from stoker.model.weights.hugging_face import PlannedTensor, save_folder
from stoker.model.weights.loading import OnProgress, box_slices, load_parts


def convert(file: Path, out: Path, *, dtype: torch.dtype | None = None, progress: OnProgress | None = None) -> None:
    """Write `file` as a new Hugging Face folder `out`.

    `dtype`: default, the file's own where it is not quantised, else float32.
    """
    weights = GgufWeights(file)
    dtype = dtype or weights.dtype
    tensors = {name: PlannedTensor(shape, dtype) for name, shape in weights.store.shapes().items()}
    save_folder(out, weights.config, tensors, weights.store.whole, weights.tokenizer_files, progress=progress)


class GgufWeights:
    """A file as a source of weights; nothing is written to disk."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        file = GgufFile(self.path)
        self.config = file.config()
        self.store = GgufStore(file)
        self.dtype = self.store.dtype
        self.tokenizer_files: Mapping[str, bytes] = tokenizer_files(file)

    def load_into(self, decoder: Decoder, progress: OnProgress | None = None) -> None:
        load_parts(decoder, self.store, progress)


class GgufStore:
    """The tensors of a file under Hugging Face names."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.config, self.names = file, file.config(), file.names()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the largest tensor; float32 where it is quantised."""
        largest = max(self.file.tensors.values(), key=lambda tensor: int(tensor.n_elements))
        plain = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
        return plain.get(largest.tensor_type, torch.float32)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tuple(int(extent) for extent in reversed(self.file.tensors[gguf_name].shape))
            for name, gguf_name in self.names.items()
        }

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self.whole(name)[box_slices(start, size)]

    def whole(self, name: str) -> Tensor:
        """Return the tensor in float32."""
        tensor = self.file.tensors[self.names[name]]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GgufError(
                f"{self.file.path}: not supported yet: {tensor.name} is of type {tensor.tensor_type.name}"
            ) from error
        whole = torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shapes()[name])
        return unpermute(whole, heads) if (heads := self.permuted_heads(tensor.name)) else whole

    def permuted_heads(self, gguf_name: str) -> int | None:
        """llama.cpp stores q and k of llama models with the two halves of a head interleaved."""
        if self.file.architecture != "llama" or not gguf_name.startswith("blk."):
            return None
        return {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(gguf_name.split(".")[2])


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order: rows 2i and 2i + 1 of a head become rows i and i + H/2."""
    return rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
