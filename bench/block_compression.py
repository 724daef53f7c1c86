"""Compression of cache blocks without loss: how small they get, how fast, and below which link that would pay.

Keys and values are those of SmolLM2-135M in bfloat16 over the project's own pages, in blocks of 64 tokens. `planes`:
the high bytes of all numbers, then the low ones, so that exponents lie together. One thread.
Run: python bench/block_compression.py [--tokens 2048]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
MODEL = Path.home() / ".cache" / "stoker" / "models" / "smollm2-135m-instruct"
BLOCK, ROUNDS = 64, 5
CODECS = {"lz4": pa.Codec("lz4_raw"), "zstd 1": pa.Codec("zstd", 1)}


class Figures(NamedTuple):
    """Of one codec over all blocks. Rates in bytes of blocks per second."""

    ratio: float
    """Compressed over plain bytes."""
    pack_per_s: float
    unpack_per_s: float

    @property
    def pays_below(self) -> float:
        """Bytes per second of a link on which packing, sending and unpacking one after the other takes as long."""
        return (1 - self.ratio) / (1 / self.pack_per_s + 1 / self.unpack_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    torch.set_num_threads(1)
    blocks = blocks_of(parser.parse_args().tokens)
    found = {}
    for name, codec in CODECS.items():
        for form, change in (("", as_it_is), (", planes", planes)):
            figures = measure([change(block) for block in blocks], codec)
            found[f"{name}{form}"] = {**figures._asdict(), "pays_below": figures.pays_below}
            print(
                f"{name + form:16} {figures.ratio:.3f} of the bytes, {figures.pack_per_s / 1e9:.2f} GB/s to pack,"
                f" {figures.unpack_per_s / 1e9:.2f} to unpack; pays below {figures.pays_below / 1e9:.3f} GB/s"
            )
    print(json.dumps({"block_bytes": len(blocks[0]), "blocks": len(blocks), **found}))


def blocks_of(tokens: int) -> list[bytes]:
    """Whole blocks of a text's keys and values, as they lie in the cache: [layers, 2, tokens, heads, dim]."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(MODEL)(text[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with torch.inference_mode():
        layers = model(ids, use_cache=True).past_key_values.layers
    cache_LPTHD = torch.stack([torch.stack([one.keys[0], one.values[0]]) for one in layers]).transpose(2, 3)
    words = cache_LPTHD.contiguous().view(torch.int16).numpy()
    return [words[:, :, begin : begin + BLOCK].tobytes() for begin in range(0, words.shape[2] - BLOCK + 1, BLOCK)]


def as_it_is(block: bytes) -> bytes:
    return block


def planes(block: bytes) -> bytes:
    """The high bytes of all numbers, then the low ones."""
    pairs = np.frombuffer(block, dtype=np.uint8).reshape(-1, 2)
    return pairs[:, 1].tobytes() + pairs[:, 0].tobytes()


def measure(blocks: list[bytes], codec: pa.Codec) -> Figures:
    """The best of some rounds."""
    packed = [codec.compress(block, asbytes=True) for block in blocks]
    assert [codec.decompress(one, len(blocks[0]), asbytes=True) for one in packed] == blocks
    plain = sum(map(len, blocks))
    pack_s = least(lambda: [codec.compress(block) for block in blocks])
    unpack_s = least(lambda: [codec.decompress(one, len(blocks[0])) for one in packed])
    return Figures(sum(map(len, packed)) / plain, plain / pack_s, plain / unpack_s)


def least(work: Callable[[], object]) -> float:
    """Processor seconds of the fastest round: other work on the machine counts less."""
    times = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        times.append(time.process_time() - began_s)
    return min(times)


if __name__ == "__main__":
    main()
