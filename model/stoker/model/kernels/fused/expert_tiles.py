"""Tiles of the grouped products of serving, by the number of rows of a mean expert.

A step of decodes reads every expert that has a row, and is as fast as the weights come: there a program takes all rows
of an expert, so that its weights are read once. With many rows each tile of rows is a program, because the rows of one
expert alone would be one program's long work. `bench/gpu/experts_search.py` times the candidates.

Called by `expert_products`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertTile(NamedTuple):
    rows: int
    outputs: int
    """Outputs of gate and as many of up."""
    columns: int
    warps: int
    stages: int
    described: bool = True
    """Weights come through tensor descriptors, where they are aligned for it."""
    mapped: bool = False
    """One program for each tile of rows; else for each expert."""


class LayerTiles(NamedTuple):
    gate_up: ExpertTile
    down: ExpertTile


PLAIN = LayerTiles(ExpertTile(16, 32, 32, 4, 2, False), ExpertTile(16, 32, 32, 4, 2, False))
"""float32, whose products are not for tensor cores."""
BY_MEAN_ROWS: tuple[tuple[int, LayerTiles], ...] = (
    (10, LayerTiles(ExpertTile(16, 64, 128, 4, 3), ExpertTile(16, 128, 128, 4, 3))),
    (24, LayerTiles(ExpertTile(32, 128, 128, 8, 3), ExpertTile(32, 128, 64, 8, 4))),
    (56, LayerTiles(ExpertTile(64, 64, 64, 4, 4, mapped=True), ExpertTile(64, 128, 64, 4, 4, mapped=True))),
    (256, LayerTiles(ExpertTile(128, 128, 64, 8, 4, mapped=True), ExpertTile(128, 256, 64, 8, 4, mapped=True))),
)
"""Most rows of a mean expert, and the tiles that were fastest on an H200 with Qwen3-30B-A3B's shape."""
MANY = LayerTiles(ExpertTile(128, 128, 64, 8, 3, mapped=True), ExpertTile(128, 256, 64, 8, 4, mapped=True))


def tiles_for(num_rows: int, num_experts: int, dtype: torch.dtype) -> LayerTiles:
    """Return the tiles for this number of rows, whichever experts they have: the choice is known to the host alone."""
    if dtype is torch.float32:
        return PLAIN
    mean = num_rows / num_experts
    return next((tiles for most, tiles in BY_MEAN_ROWS if mean <= most), MANY)
