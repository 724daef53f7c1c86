"""Export to a Hugging Face folder: `config.json`, tokenizer files, and the weights as safetensors.

Adapters are merged into the weights, or written alone in the form of the PEFT library.

The safetensors layout (8 bytes little-endian length, a JSON header, raw tensors) is written here directly, tensor by
tensor, so that an export needs no more memory than its largest tensor and no library beyond numpy.

Called by the command `export`; reads through `reader` and changes no checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stoker.checkpoint.adapter import ADAPTERS, Adapter, adapter_of, read_merged
from stoker.checkpoint.dtype import Array, from_float32, item_bytes, to_float32
from stoker.checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing
from stoker.checkpoint.manifest import TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.storage import PosixStorage, Sink

PREFIX = "model."
PEFT_PREFIX = "base_model.model."
SHARD_BYTES = 5 * 10**9
Dtype = Literal["stored", "float32", "bfloat16", "float16"]

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Weight:
    """A tensor of the checkpoint and what it becomes."""

    name: str
    """Its Hugging Face name."""
    source: TensorInfo
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.source.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: str
    tensors: int
    bytes: int
    files: tuple[str, ...]


def export_hugging_face(
    reader: CheckpointReader, out: Path, *, dtype: Dtype = "stored", shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write a Hugging Face folder; it appears under its name only when it is complete.

    Tied weights are written once, adapters are merged into their weights. `dtype` converts float tensors (nearest,
    ties to even).

    Raises:
        CheckpointExists: `out` exists.
        CheckpointMissing: the checkpoint has no weights or no `config.json`.
        CheckpointCorrupt: a piece is damaged.
        CheckpointError: a value is too large for `dtype`.
    """
    config = _config(reader)
    shards = plan_shards(_weights(reader, config, dtype), shard_bytes)
    read = partial(_merged, reader, adapter_of(reader.manifest))

    def write(folder: Path) -> None:
        _write_shards(read, folder, shards)
        _write_files(reader, folder)
        _write(folder / "config.json", [_pretty(_with_dtype(config, shards))])

    return _export(Path(out), write, [weight for shard in shards for weight in shard])


def export_adapter(reader: CheckpointReader, out: Path, *, dtype: Dtype = "stored") -> Exported:
    """Write the adapters alone as the PEFT library stores them: `adapter_config.json`, `adapter_model.safetensors`.

    The folder appears under its name only when it is complete.

    Raises:
        CheckpointExists: `out` exists.
        CheckpointMissing: the checkpoint has no adapters.
        CheckpointCorrupt: a piece is damaged.
        CheckpointError: a value is too large for `dtype`.
    """
    adapter = adapter_of(reader.manifest)
    if adapter is None:
        raise CheckpointMissing(f"{reader.folder}: no adapters (tensors {ADAPTERS}*): not of a run with lora")
    weights = [
        Weight(PEFT_PREFIX + name.removeprefix(ADAPTERS), tensor, _target_dtype(tensor.dtype, dtype))
        for name, tensor in sorted(reader.manifest.tensors.items())
        if name.startswith(ADAPTERS)
    ]

    def write(folder: Path) -> None:
        _write_shard(partial(_stored, reader), folder / "adapter_model.safetensors", weights)
        _write_files(reader, folder)
        _write(folder / "adapter_config.json", [_pretty(_peft_config(reader, adapter))])

    return _export(Path(out), write, weights)


def _export(out: Path, write: Callable[[Path], None], weights: Sequence[Weight]) -> Exported:
    """Let `write` fill a folder beside `out`, and rename it when it is whole."""
    if out.exists():
        raise CheckpointExists(f"{out} exists; an export makes its folder")
    unfinished = out.with_name(out.name + ".partial")
    if unfinished.exists():
        raise CheckpointExists(f"{unfinished} is left from an export that did not end; remove it first")
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        PosixStorage().sync_folder(unfinished)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # else the next try would be refused
        raise
    files = tuple(PosixStorage().names(out))
    return Exported(str(out), len(weights), sum(weight.bytes for weight in weights), files)


def _peft_config(reader: CheckpointReader, adapter: Adapter) -> dict[str, Any]:
    """`adapter_config.json`; the base model is what the run started from, as far as the manifest knows it."""
    config = reader.manifest.meta.get("config")
    model_from = config.get("model_from") if isinstance(config, dict) else None
    base = model_from.get("path") if isinstance(model_from, dict) else None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": list(adapter.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
    }


def plan_shards(weights: Sequence[Weight], shard_bytes: int) -> list[list[Weight]]:
    """Weights in order, in shards of at most `shard_bytes`; a larger weight has a shard of its own."""
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not shards or weight.bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(weight)
        room -= weight.bytes
    return shards


def _weights(reader: CheckpointReader, config: dict[str, Any], dtype: Dtype) -> list[Weight]:
    tied = config.get("tie_word_embeddings") is True
    weights = []
    for name, tensor in sorted(reader.manifest.tensors.items()):
        target = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and not (tied and target == "lm_head.weight"):
            weights.append(Weight(target, tensor, _target_dtype(tensor.dtype, dtype)))
    if not weights:
        raise CheckpointMissing(f"{reader.folder}: no weights (tensors {PREFIX}*)")
    return weights


def _target_dtype(stored: str, wanted: Dtype) -> str:
    if wanted == "stored" or stored not in ("float32", "bfloat16", "float16"):
        return stored
    return wanted


def _config(reader: CheckpointReader) -> dict[str, Any]:
    try:
        config = json.loads(reader.read_file("config.json"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{reader.folder}: config.json: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{reader.folder}: config.json must be an object")
    return config


def _with_dtype(config: dict[str, Any], shards: Sequence[Sequence[Weight]]) -> dict[str, Any]:
    """The configuration with the dtype that the weights really have, when they have one."""
    dtypes = {weight.dtype for shard in shards for weight in shard}
    if len(dtypes) != 1:
        return config
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | dict.fromkeys(keys, dtypes.pop())


Read = Callable[[Weight], Array]
"""Returns the carrier bits of what a weight becomes."""


def _merged(reader: CheckpointReader, adapter: Adapter | None, weight: Weight) -> Array:
    if adapter is None or not adapter.adapts(weight.name):
        return _stored(reader, weight)
    return _rounded(read_merged(reader, adapter, weight.name), weight)


def _stored(reader: CheckpointReader, weight: Weight) -> Array:
    values = reader.read(weight.source.name)
    return values if weight.dtype == weight.source.dtype else _rounded(to_float32(values, weight.source.dtype), weight)


def _write_shards(read: Read, folder: Path, shards: Sequence[Sequence[Weight]]) -> None:
    names = list(_shard_names(len(shards)))
    for name, shard in zip(names, shards, strict=True):
        _write_shard(read, folder / name, shard)
    if len(shards) > 1:
        places = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(weight.bytes for shard in shards for weight in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write(folder / "model.safetensors.index.json", [_pretty(index)])


def _shard_names(count: int) -> Iterator[str]:
    if count == 1:
        yield "model.safetensors"
        return
    for number in range(1, count + 1):
        yield f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_shard(read: Read, path: Path, shard: Sequence[Weight]) -> None:
    _write(path, _shard_parts(read, shard))


def _shard_parts(read: Read, shard: Sequence[Weight]) -> Iterator[bytes | memoryview]:
    header = _header(shard)
    yield len(header).to_bytes(8, "little") + header
    for weight in shard:
        values = read(weight)
        yield values.data.cast("B") if values.size else b""


def _header(shard: Sequence[Weight]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in shard:
        fields[weight.name] = {
            "dtype": _SAFETENSORS[weight.dtype],
            "shape": list(weight.source.shape),
            "data_offsets": [offset, offset + weight.bytes],
        }
        offset += weight.bytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # readers map tensors into memory, so the data starts aligned


def _rounded(values: Array, weight: Weight) -> Array:
    try:
        return from_float32(values, weight.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {weight.source.name}: {error}") from error


def _write_files(reader: CheckpointReader, folder: Path) -> None:
    """Write the files that travel along, but for the model's configuration."""
    for entry in reader.manifest.files:
        if entry.name != "config.json":
            _write(folder / entry.name, [reader.read_file(entry.name)])


def _write(path: Path, parts: Sequence[bytes] | Iterator[bytes | memoryview]) -> None:
    sink: Sink = PosixStorage().create(path)
    try:
        for part in parts:
            sink.write(memoryview(part))
        sink.sync()
    finally:
        sink.close()


def _pretty(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
