"""A folder of random bfloat16 weights that a server can load, for measurements.

The values are random numbers of the right size, because products of zeros are faster than products of numbers.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models

from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.weights.hugging_face import INDEX_FILE, SHARD_BYTES, PlannedTensor, plan_shards

PIECE_BYTES = 64 * 2**20
THREADS = 8
SCALE = 0.02
WriteShard = Callable[[Path, Mapping[str, PlannedTensor]], None]


class ShardHeader(NamedTuple):
    """The start of a safetensors file."""

    encoded: bytes
    begins: dict[str, int]
    """First byte of each tensor in the file."""
    file_bytes: int


def make_random_folder(folder: Path, shape: ModelConfig, layers: int | None = None) -> None:
    """Write weights, config and a tokenizer of `vocab_size` words. 16 GB take some seconds on a RAM disk."""
    config = replace(shape, num_layers=layers or shape.num_layers)
    write_folder(folder, config, write_random, tokenizer(config.vocab_size))


def write_folder(folder: Path, config: ModelConfig, write_shard: WriteShard, tokenizer_json: str) -> None:
    """Write config, tokenizer, index and shards; `write_shard` makes the file of each shard."""
    parts = list(Decoder(config, Ops(), dtype=torch.bfloat16, device="meta").named_parts())
    planned = {part.hf_name: PlannedTensor(part.global_shape, torch.bfloat16) for part in parts}
    shards = plan_shards(planned, SHARD_BYTES)
    folder.mkdir(parents=True)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(file, {name: planned[name] for name in names})
        weight_map |= dict.fromkeys(names, file.name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_hugging_face("bfloat16")))
    (folder / "tokenizer.json").write_text(tokenizer_json)


def shard_header(tensors: Mapping[str, PlannedTensor]) -> ShardHeader:
    """The header of a safetensors file of bfloat16 tensors, and where each begins."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.num_bytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = 8 + len(encoded)
    begins = {name: first + entry["data_offsets"][0] for name, entry in header.items()}
    return ShardHeader(struct.pack("<Q", len(encoded)) + encoded, begins, first + end)


def tokenizer(size: int) -> str:
    """A tokenizer whose every token is a word of its own, written as byte-level BPE writes words."""
    made = Tokenizer(models.BPE({f"Ġw{number}": number for number in range(size)}, []))
    made.decoder = decoders.ByteLevel()
    return str(made.to_str())


def write_random(file: Path, tensors: Mapping[str, PlannedTensor]) -> None:
    header = shard_header(tensors)
    random = _bytes(torch.randn(PIECE_BYTES // 2, generator=torch.Generator().manual_seed(0)) * SCALE)
    ones = _bytes(torch.ones(PIECE_BYTES // 2))
    with file.open("wb") as opened, ThreadPoolExecutor(THREADS) as pool:
        opened.write(header.encoded)
        opened.truncate(header.file_bytes)
        for name, tensor in tensors.items():
            values = ones if "norm" in name else random
            begin = header.begins[name]
            for place, length in _pieces(tensor.num_bytes):
                pool.submit(os.pwrite, opened.fileno(), values[:length], begin + place)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.to(torch.bfloat16).view(torch.uint8).numpy())


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    for place in range(0, num_bytes, PIECE_BYTES):
        yield place, min(PIECE_BYTES, num_bytes - place)
