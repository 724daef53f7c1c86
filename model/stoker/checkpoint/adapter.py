"""Low-rank adapters in a checkpoint, and the weights that they make: W + alpha / rank * B A.

A checkpoint of a LoRA run holds the frozen weights as `model.NAME.weight`, and beside them `adapter.NAME.lora_A.weight`
and `adapter.NAME.lora_B.weight` with their moments; its manifest's `meta.adapter` has rank, alpha and targets. Loader
and export read merged weights, so that such a checkpoint is served and trained from like any other.

Pure but for reads through `reader`; called by `export` and by the model's loader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.checkpoint.box import Box
from stoker.checkpoint.dtype import to_float32
from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.manifest import Manifest
from stoker.checkpoint.reader import CheckpointReader

WEIGHTS, ADAPTERS = "model.", "adapter."
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Adapter:
    """The adapters of one checkpoint."""

    rank: int
    alpha: float
    names: frozenset[str]
    """Hugging Face names of the adapted tensors, without `.weight`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """The last words of the names of the adapted tensors; experts of mixtral have others than `targets`."""
        return tuple(sorted({name.rsplit(".", 1)[-1] for name in self.names}))

    def adapts(self, hf_name: str) -> bool:
        """Whether the tensor `model.layers.0.self_attn.q_proj.weight` has an adapter."""
        return hf_name.removesuffix(".weight") in self.names


def adapter_of(manifest: Manifest) -> Adapter | None:
    """Return the adapters of a checkpoint; None for one without.

    Raises:
        CheckpointCorrupt: they do not fit `meta.adapter` or the weights: to leave them out would serve another model.
    """
    stored = [name.removeprefix(ADAPTERS) for name in manifest.tensors if name.startswith(ADAPTERS)]
    meta = manifest.meta.get("adapter")
    if meta is None and not stored:
        return None
    rank, alpha = _settings(meta)
    names = frozenset(name.removesuffix(A) for name in stored if name.endswith(A))
    if not names or set(stored) != {name + suffix for name in names for suffix in (A, B)}:
        raise CheckpointCorrupt(f"manifest: {len(stored)} tensors {ADAPTERS}* are no pairs of lora_A and lora_B")
    for name in names:
        _check_shapes(manifest, name, rank)
    return Adapter(rank, alpha, names)


def read_merged(
    reader: CheckpointReader, adapter: Adapter | None, hf_name: str, box: Box | None = None
) -> npt.NDArray[np.float32]:
    """Return a box of a weight as float32 (None: all of it), with what its adapter adds.

    Raises:
        CheckpointCorrupt: a piece is damaged.
    """
    info = reader.tensor(WEIGHTS + hf_name)
    box = Box.whole(info.shape) if box is None else box
    weight = to_float32(reader.read(info.name, box), info.dtype)
    if adapter is None or not adapter.adapts(hf_name):
        return weight
    name = ADAPTERS + hf_name.removesuffix(".weight")
    (row, column), (rows, columns) = box.start, box.size
    a = to_float32(reader.read(name + A, Box((0, column), (adapter.rank, columns))), "float32")
    b = to_float32(reader.read(name + B, Box((row, 0), (rows, adapter.rank))), "float32")
    return weight + np.float32(adapter.scale) * (b @ a)


def _settings(meta: object) -> tuple[int, float]:
    fields: Mapping[str, Any] = meta if isinstance(meta, dict) else {}
    rank, alpha, targets = fields.get("rank"), fields.get("alpha"), fields.get("targets")
    is_number = type(alpha) in (int, float) and math.isfinite(alpha)  # type: ignore[arg-type]
    are_names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if type(rank) is not int or rank < 1 or not is_number or not are_names:
        raise CheckpointCorrupt(f"manifest: meta.adapter {meta!r} must have rank, alpha and targets")
    return rank, float(alpha)  # type: ignore[arg-type]


def _check_shapes(manifest: Manifest, name: str, rank: int) -> None:
    tensors = manifest.tensors
    weight, a, b = (tensors.get(key) for key in (f"{WEIGHTS}{name}.weight", ADAPTERS + name + A, ADAPTERS + name + B))
    if weight is None or a is None or b is None or len(weight.shape) != 2:
        raise CheckpointCorrupt(f"manifest: {ADAPTERS}{name} has no matrix {WEIGHTS}{name}.weight beside it")
    rows, columns = weight.shape
    if (a.shape, b.shape) != ((rank, columns), (rows, rank)) or not a.dtype == b.dtype == "float32":
        raise CheckpointCorrupt(
            f"manifest: {ADAPTERS}{name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}; rank {rank} and a "
            f"weight {list(weight.shape)} need float32 {[rank, columns]} and {[rows, rank]}"
        )
