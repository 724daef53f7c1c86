"""The layout of one rank's cache block: which layers, heads and tokens are in it, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Grid(NamedTuple):
    """The equal cells into which a block is cut: runs of layers x runs of heads x runs of tokens, numbered with the
    tokens innermost."""

    layers: int = 1
    heads: int = 1
    tokens: int = 1

    @property
    def cells(self) -> int:
        return self.layers * self.heads * self.tokens


ONE_CELL = Grid()


@dataclass(frozen=True)
class BlockLayout:
    """[layers, 2, block_size, kv_heads, head_dim] of one dtype; 2 = keys, values. Ranges are global indices."""

    first_layer: int
    end_layer: int
    block_size: int
    """In tokens."""
    first_head: int
    end_head: int
    """Heads of keys and values."""
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        sizes = {"layers": self.num_layers, "block_size": self.block_size, "heads": self.num_heads}
        for name, size in (sizes | {"head_dim": self.head_dim}).items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def num_heads(self) -> int:
        return self.end_head - self.first_head

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.num_layers, 2, self.block_size, self.num_heads, self.head_dim

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes
