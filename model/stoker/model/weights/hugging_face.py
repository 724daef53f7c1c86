"""Hugging Face folders: config.json, safetensors (one file or sharded with an index), and the files that travel along.

Nothing is unpickled: a folder with only `.bin` weights is refused.

Read-only. Made by `source`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.travelling_files import FileTooLarge, read_limited, read_travelling_files
from stoker.model.weights.config_file import read_config
from stoker.model.weights.direct import RUN_BYTES, load_direct, tensor_places
from stoker.model.weights.loading import (
    IGNORED_SUFFIXES,
    OnProgress,
    WeightsError,
    box_slices,
    check_fit,
    load_parts,
)
from stoker.model.weights.safetensors_header import check_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
"""Largest file that `save` writes."""

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_hugging_face(folder: Path, decoder: Decoder, progress: OnProgress | None = None) -> None:
    """Fill the decoder from the folder's safetensors. Raises WeightsError where they do not fit."""
    load_parts(decoder, SafetensorsStore(folder), progress)


def save_hugging_face(
    folder: Path, decoder: Decoder, files: Mapping[str, bytes] | None = None, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the decoder (one rank, all layers) as a new Hugging Face folder with `files` (tokenizer and so on) beside
    it.
    """
    if decoder.group is not None or not (decoder.is_first and decoder.is_last):
        raise ValueError("save_hugging_face: not supported yet: a decoder cut over ranks; export a checkpoint instead")
    parts = {part.hf_name: part for part in decoder.named_parts()}
    dtype = next(decoder.parameters()).dtype
    tensors = {name: PlannedTensor(part.global_shape, dtype) for name, part in parts.items()}
    save_folder(
        folder, decoder.config, tensors, lambda name: parts[name].local().cpu(), files or {}, shard_bytes=shard_bytes
    )


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, PlannedTensor],
    make: Callable[[str], Tensor],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: OnProgress | None = None,
) -> None:
    """Write a new folder under a temporary name, then rename it.

    At most one shard is in memory. Raises ValueError where the folder exists, and OSError where it cannot be written;
    nothing of it is left then.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder or delete it")
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    staging.mkdir(parents=True)
    try:
        dtype = next(iter(tensors.values())).dtype
        for name, data in files.items():
            (staging / name).write_bytes(data)
        (staging / "config.json").write_text(
            json.dumps(config.to_hugging_face(str(dtype).removeprefix("torch.")), indent=2) + "\n"
        )
        save_shards(staging, plan_shards(tensors, shard_bytes), tensors, make, progress)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def plan_shards(tensors: Mapping[str, PlannedTensor], shard_bytes: int) -> list[list[str]]:
    """Names per file, in order; a file grows until the next tensor would exceed `shard_bytes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.num_bytes
    return shards


def save_shards(
    folder: Path,
    shards: list[list[str]],
    tensors: Mapping[str, PlannedTensor],
    make: Callable[[str], Tensor],
    progress: OnProgress | None,
) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(folder / file, {name: make(name).to(tensors[name].dtype).contiguous() for name in names})
        (folder / file).chmod(
            (folder / "config.json").stat().st_mode
        )  # safetensors makes files that only their owner can read
        weight_map |= dict.fromkeys(names, file)
        if progress is not None:
            progress(len(weight_map), len(tensors))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors.values())},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file. Raises OSError with its path: the library's error for a full disk is its own."""
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, f"cannot be written: {error}", str(file)) from error


class SafetensorsStore:
    """The tensors of a folder, read by box."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.files = weight_files(self.folder)
        self.places: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        for file in self.files:
            for name, shape, dtype in headers(file):
                self.add(name, file, shape, dtype)
        self.opened: tuple[Path, Any] | None = None

    def add(self, name: str, file: Path, shape: tuple[int, ...], dtype: str) -> None:
        """Integers and 8-bit floats are no weights without their scales."""
        if name in self.places:
            raise WeightsError(f"{self.folder}: {name} is in both {self.places[name][0].name} and {file.name}")
        if dtype not in SAFETENSORS_DTYPES and not name.endswith(IGNORED_SUFFIXES):
            raise WeightsError(
                f"{self.folder}: not supported yet: {name} of dtype {dtype}; allowed: {', '.join(SAFETENSORS_DTYPES)}"
            )
        self.places[name] = (file, shape, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the largest tensor, which is the one that weights are stored in."""
        weights = [place for name, place in self.places.items() if not name.endswith(IGNORED_SUFFIXES)]
        if not weights:
            raise WeightsError(f"{self.folder}: the files hold no weights")
        _, _, name = max(weights, key=lambda place: math.prod(place[1]))
        return SAFETENSORS_DTYPES[name]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _) in self.places.items()}

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        tensor: Tensor = self.handle(self.places[name][0]).get_slice(name)[box_slices(start, size)]
        return tensor

    def handle(self, file: Path) -> Any:
        """Opening maps the file; one is kept, because names come in the files' order."""
        if self.opened is None or self.opened[0] != file:
            self.opened = (file, safe_open(file, framework="pt"))
        return self.opened[1]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. An index is foreign input: its entries must be plain names."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise WeightsError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        if not (folder / SINGLE_FILE).is_file():
            raise WeightsError(f"{folder / SINGLE_FILE}: a file with the weights is needed, this is none")
        return [folder / SINGLE_FILE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{index}: weight_map must be an object that says which file each tensor is in")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise WeightsError(f"{index}: {name!r} is not a plain file name")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise WeightsError(f"{folder}: {name} is missing, but {INDEX_FILE} lists it")
    return [folder / name for name in names]


def headers(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (name, shape, dtype) of each tensor of one file."""
    check_header(file)
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a mapping
                entry = opened.get_slice(name)
                yield name, tuple(entry.get_shape()), entry.get_dtype()
    except SafetensorError as error:
        raise WeightsError(f"{file}: not a valid safetensors file: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_limited(file))
    except FileTooLarge as error:
        raise WeightsError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: must hold an object")
    return value


class HuggingFaceWeights:
    """A folder as a source of weights."""

    kind = "huggingFace"

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder)
        self.tokenizer_files = read_travelling_files(self.path)
        self.config = read_config(read_json(self.path / "config.json"), self.tokenizer_files)
        self.store = SafetensorsStore(self.path)
        self.dtype = self.store.dtype

    def load_into(self, decoder: Decoder, progress: OnProgress | None = None) -> None:
        if next(decoder.parameters()).device.type == "cpu":
            load_parts(decoder, self.store, progress)
        else:
            self.load_direct(decoder, progress)

    def load_direct(self, decoder: Decoder, progress: OnProgress | None = None, *, run_bytes: int = RUN_BYTES) -> None:
        """Load by several threads, without a copy where dtypes agree. Raises WeightsError as `load_parts` does."""
        check_fit(decoder, self.store)
        names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
        places = tensor_places(self.store.files)
        load_direct(decoder.named_parts(), places, self.store, names, progress, run_bytes=run_bytes)
